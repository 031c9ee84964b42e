"""Where the host holds the GPU back: what it needs to issue a step, against what the GPU needs to compute it."""

import pandas as pd

from analysis.columns import study_ranks
from analysis.formatting import configuration_label, join, number, percent, telling_fields
from analysis.scaling import Analysis


def issue_ratio(found: pd.DataFrame) -> pd.Series:
    """Host time to issue a step / device time of its kernels, for each configuration; NaN where either is unknown.

    Above 1 the host is the slower of the two, and the ratio says how many times faster the step could be, at most, if
    issuing took no time and nothing else held it back.
    """
    return found["step_launch_s"].astype(float) / found["busy_s"].astype(float)


def fewer_launches(row: pd.Series) -> str:
    """What helps a configuration that the host limits, but for what its execution is already."""
    execution = str(row.get("execution", "eager"))
    changes = ["a larger batch"]
    changes += [] if "compile" in execution else ["compilation"]
    changes += [] if "graph" in execution else ["CUDA graphs"]
    return join(changes, "or")


def advice(analysis: Analysis) -> str | None:
    """How many configurations the host limits, by how much where the GPU is idle most, and what to do; None for none."""
    found = analysis.configurations
    limited = found[[value is True for value in found["host_bound"]]]
    if limited.empty:
        return None
    ratio = issue_ratio(limited)
    idle = 1 - limited["busy_fraction"].astype(float)
    by = idle if idle.notna().any() else limited["step_launch_s"].astype(float)
    place = int(by.fillna(0.0).to_numpy().argmax())
    worst = limited.iloc[place]
    names = telling_fields(found, worst, [*(n for n in analysis.axes if n != "world_size"), "world_size"])
    label = configuration_label(worst, names, study_ranks(analysis))
    issue = f"it needs {number(1e3 * worst['step_launch_s'], 1)} ms to issue a step"
    if pd.notna(ratio.iloc[place]):
        issue += (
            f" whose kernels take the GPU {number(1e3 * worst['busy_s'], 1)} ms, {number(ratio.iloc[place], 1)} times as long, and the "
            f"GPU is busy for {percent(worst['busy_fraction'])} of the step"
        )
    return (
        f"The host limits {len(limited)} of {len(found)} configurations{', most' if len(limited) > 1 else ''} with {label}: {issue}. "
        f"There {fewer_launches(worst)} can help: more work for each launch, or fewer of them."
    )
