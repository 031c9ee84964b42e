"""From steps to windows: a row for each trial, rank and window, with what the measures are made of.

Steps of a large study are gigabytes, its windows a few megabytes, so the report reads steps in portions and keeps these.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.load.schema import PHASES

OPTIONAL_PHASES = ("scatter_s", "replicate_s", "gather_s", "reduce_s", "graph_s")
"""Phases whose columns a frame of steps may lack: most strategies have no such part."""

LAUNCHED = ("forward_s", "loss_s", "backward_s", "optimizer_s")
"""The parts that the host issues to the device as kernels."""

LAUNCHES = tuple(f"{name.removesuffix('_s')}_launch_s" for name in LAUNCHED)

KEYS = ["trial_id", "rank", "window"]

_MEDIANS = [*PHASES, "step_s", "host_to_device_bytes", "host_transfer_s", *LAUNCHES, "step_launch_s"]
_PEAKS = ["peak_memory_bytes", "peak_reserved_bytes"]

REQUIRED_COLUMNS = (
    *KEYS, "step", "samples", "window_s", *(name for name in _MEDIANS if name not in OPTIONAL_PHASES), "previous_step_done",
    *_PEAKS,
)  # fmt: skip
"""Columns of steps that `windows` takes."""

WINDOW_COLUMNS = (
    *KEYS, "steps", "samples", "window_s", *_MEDIANS, "host_to_device_bytes_per_s", "launch_ratio", "previous_steps_seen",
    "previous_steps_done", *_PEAKS,
)  # fmt: skip


def require(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Raises ValueError naming the columns that `frame` lacks."""
    lacking = [name for name in columns if name not in frame.columns]
    if lacking:
        raise ValueError(f"{what} lacks the columns {', '.join(lacking)}")


def windows(steps: pd.DataFrame) -> pd.DataFrame:
    """A row for each window of a rank, with `WINDOW_COLUMNS`; what was not measured is NaN.

    steps: in the layout of steps.parquet, of any number of trials. Raises ValueError naming missing columns.

    steps: how many. samples: their sum. window_s: wall seconds of the window. Peaks: the largest. previous_steps_seen,
    previous_steps_done: steps after the first that tell whether the one before them had left the device, and those that
    say yes; the step before a window's first ended at the synchronisation that opened it, so the first says nothing.
    The rest are medians over the steps, also of their ratios: host_to_device_bytes_per_s (bytes / seconds of a copy) and
    launch_ratio (host time to issue a step / its span).
    """
    require(steps, REQUIRED_COLUMNS, "the frame of steps")
    steps = steps.assign(**{name: np.nan for name in OPTIONAL_PHASES if name not in steps})
    copied_bytes, copy_s, span_s = (
        steps["host_to_device_bytes"].astype(float),
        steps["host_to_device_s"],
        steps["step_s"],
    )
    done = steps["previous_step_done"].astype(float)
    frame = steps[[*KEYS, "step", "samples", "window_s", *_MEDIANS, *_PEAKS]].assign(
        host_to_device_bytes=copied_bytes,
        host_to_device_bytes_per_s=copied_bytes / copy_s.where((copy_s > 0) & (copied_bytes > 0)),
        launch_ratio=steps["step_launch_s"] / span_s.where(span_s > 0),
    )
    grouped = frame.groupby(KEYS, sort=False, observed=True)
    later = done.where(frame["step"] > grouped["step"].transform("min"))
    result = grouped[["samples", "window_s", *_PEAKS]].agg(
        {"samples": "sum", "window_s": "first"} | dict.fromkeys(_PEAKS, "max")
    )
    result["steps"] = grouped.size()
    medians = [*_MEDIANS, "host_to_device_bytes_per_s", "launch_ratio"]
    result[medians] = grouped[medians].median()
    of_window = later.groupby([frame[name] for name in KEYS], sort=False, observed=True)
    result["previous_steps_seen"] = of_window.count()
    result["previous_steps_done"] = of_window.sum()
    return result.reset_index()[list(WINDOW_COLUMNS)].astype({"trial_id": "str", "window": "str"})
