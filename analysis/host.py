"""Where the host holds the GPU back: what it needs to issue a step, against what the GPU needs to compute it."""

import pandas as pd

from analysis.formatting import join


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
