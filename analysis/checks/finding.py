"""Input and result of the data checks."""

from dataclasses import dataclass

import pandas as pd

from analysis.measure.measures import configuration_of

FALSE_ALARM = 0.05
"""Maximum probability of a finding in a study without the problem."""

MATTERS = 0.02
"""Effects below this share of a step, or of throughput, are not reported. Hosts differ more from day to day."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: its name, one sentence, the affected trials, and the suggested fix."""

    name: str
    sentence: str
    trial_ids: tuple[str, ...]
    what_to_do: str


@dataclass(frozen=True)
class CheckData:
    """Input of the checks.

    trials: one row per done trial: trial_id, configuration (number), started_at (s) and throughput_samples_per_s, NaN
    if unknown. shapes: see `step_shape.step_shapes`. windows: see `reduce.windows`.
    """

    trials: pd.DataFrame
    shapes: pd.DataFrame
    windows: pd.DataFrame


def check_data(
    configurations: pd.DataFrame, measured: pd.DataFrame, shapes: pd.DataFrame, window_rows: pd.DataFrame
) -> CheckData:
    """Build the input from the frames of an analysis.

    configurations: see `configurations.configurations`. measured: see `measures.summaries`. shapes, window_rows:
    reduced steps.
    """
    rows = measured.reindex(columns=["trial_id", "started_at", "throughput_samples_per_s"])
    trials = rows.assign(configuration=rows["trial_id"].map(configuration_of(configurations))).dropna(
        subset="configuration"
    )
    trials = trials.astype({"configuration": int, "started_at": float, "throughput_samples_per_s": float})
    known = set(trials["trial_id"])
    return CheckData(trials, shapes[shapes["trial_id"].isin(known)], window_rows[window_rows["trial_id"].isin(known)])


def probability(p: float) -> str:
    """Format a p-value for readers."""
    return "0.001 or less" if p <= 0.001 else f"{p:.3f}"
