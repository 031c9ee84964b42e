"""Reduce steps to windows: one row per trial, rank and window, from which the measures are computed.

The steps of a large study take gigabytes, its windows a few megabytes. The report therefore reads steps in portions
and keeps only the windows.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis.read.schema import PHASES

OPTIONAL_PHASES = ("scatter_s", "replicate_s", "gather_s", "reduce_s", "graph_s", "after_backward_s", "other_s")
"""Phases whose columns a frame of steps may lack, because most strategies do not have them."""

LAUNCHED = ("forward_s", "loss_s", "backward_s", "after_backward_s", "optimizer_s")
"""Phases that the host issues to the device as kernels. A user's workload may have no separate loss."""

LAUNCHES = tuple(f"{name.removesuffix('_s')}_launch_s" for name in LAUNCHED)

TRACED = ("collectives_s", "exposed_collectives_s", "kernels_s")
"""Times of steps under a profiler, which most windows lack."""

TRACED_WINDOWS = ("profile", "communication", "busy")
"""Windows whose steps may have them: of strategies that communicate not only in buckets, of scripts, and of steps whose
parts launch more kernels than the device can queue. The last ones, and scripts with buckets, only have `kernels_s`.
"""

_OPTIONAL = (*OPTIONAL_PHASES, "after_backward_launch_s", *TRACED)

KEYS = ["trial_id", "rank", "window"]

_MEDIANS = [*PHASES, "step_s", "host_to_device_bytes", "host_transfer_s", *LAUNCHES, "step_launch_s", *TRACED]
_PEAKS = ["peak_memory_bytes", "peak_reserved_bytes"]

REQUIRED_COLUMNS = (
    *KEYS, "step", "samples", "window_s", *(name for name in _MEDIANS if name not in _OPTIONAL),
    "previous_step_done", *_PEAKS,
)  # fmt: skip
"""Columns of steps that `windows` requires."""

WINDOW_COLUMNS = (
    *KEYS, "steps", "samples", "window_s", *_MEDIANS, "longest_load_wait_s", "host_to_device_bytes_per_s",
    "launch_ratio", "previous_steps_seen", "previous_steps_done", *_PEAKS,
)  # fmt: skip


def require(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    """Raise ValueError with the names of the columns that `frame` lacks."""
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise ValueError(f"{what} lacks the columns {', '.join(missing)}")


def windows(steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial, rank and window, with `WINDOW_COLUMNS`. Values that were not measured are NaN.

    The argument has the layout of steps.parquet and any number of trials. Raises ValueError for missing columns.

    Columns of the result:
    steps: number of steps. samples: their sum. window_s: wall seconds of the window. Peaks: the largest.
    previous_steps_seen: steps that report whether the device had finished the step before them.
    previous_steps_done: those of them that report it had. The first step of a window does not count for either: the
    synchronisation that opens the window finishes the step before it.
    load_wait_s: mean over the steps, because loader processes deliver in bursts: with 8 of them that are too slow, most
    steps do not wait, and every eighth waits for all. longest_load_wait_s: the same of the rank that waits longest in a
    step, for which ranks that have their batch wait in a collective. step_s: median of the steps without it, plus it.
    The phase in which they wait (`_waiting_phase`) also contains the mean of that wait. All other columns are medians
    over the steps, including two ratios: host_to_device_bytes_per_s (bytes / seconds of a copy) and launch_ratio (host
    time to issue a step / duration of the step).
    """
    require(steps, REQUIRED_COLUMNS, "the frame of steps")
    steps = steps.assign(**{name: np.nan for name in _OPTIONAL if name not in steps})
    copied_bytes = steps["host_to_device_bytes"].astype(float)
    copy_s, span_s = steps["host_to_device_s"], steps["step_s"]
    done = steps["previous_step_done"].astype(float)
    load_s, longest_s = _load_waits_s(steps)
    frame = steps[[*KEYS, "step", "samples", "window_s", *_MEDIANS, *_PEAKS]].assign(
        host_to_device_bytes=copied_bytes,
        host_to_device_bytes_per_s=copied_bytes / copy_s.where((copy_s > 0) & (copied_bytes > 0)),
        launch_ratio=steps["step_launch_s"] / span_s.where(span_s > 0),
        unloaded_step_s=span_s - longest_s,
        others_s=longest_s - load_s,
    )
    grouped = frame.groupby(KEYS, sort=False, observed=True)
    later = done.where(frame["step"] > grouped["step"].transform("min"))
    result = grouped[["samples", "window_s", *_PEAKS]].agg(
        {"samples": "sum", "window_s": "first"} | dict.fromkeys(_PEAKS, "max")
    )
    result["samples"] = grouped["samples"].sum(min_count=1)  # unknown for some scripts
    result["steps"] = grouped.size()
    medians = [*_MEDIANS, "unloaded_step_s", "host_to_device_bytes_per_s", "launch_ratio"]
    result[medians] = grouped[medians].median()
    result["load_wait_s"] = grouped["load_wait_s"].mean()
    others_mean_s = grouped["others_s"].mean()
    result["longest_load_wait_s"] = result["load_wait_s"] + others_mean_s
    result["step_s"] = result.pop("unloaded_step_s") + result["longest_load_wait_s"].fillna(0.0)
    _include_waits(result, frame[(others_mean_s > 0).reindex(pd.MultiIndex.from_frame(frame[KEYS])).to_numpy()])
    later_by_window = later.groupby([frame[name] for name in KEYS], sort=False, observed=True)
    result["previous_steps_seen"] = later_by_window.count()
    result["previous_steps_done"] = later_by_window.sum()
    return result.reset_index()[list(WINDOW_COLUMNS)].astype({"trial_id": "str", "window": "str"})


_WAITING = ("backward_s", "reduce_s", "after_backward_s", "forward_s", "graph_s")
"""Phases in which ranks may wait for one another, the usual one first."""


def _load_waits_s(steps: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return each step's wait for a batch, of its own rank and the longest of all ranks, in seconds.

    The longest is the rank's own in steps under no_sync, in which ranks do not wait for one another.
    """
    waits = steps["load_wait_s"].astype(float).fillna(0.0)
    of_step = [steps[name] for name in ("trial_id", "window", "step")]
    longest = waits.groupby(of_step, sort=False, observed=True).transform("max")
    return waits, longest.where(steps["window"].astype(str) != "no_sync", waits)


def _include_waits(result: pd.DataFrame, frame: pd.DataFrame) -> None:
    """Replace medians of phases that contain waits for other ranks' loaders, which come in bursts as their own do.

    frame: the steps of ranks that wait.
    """
    if frame.empty:
        return
    phases = _waiting_phase(frame)
    for name in phases.dropna().unique():
        of_phase = frame.assign(without_s=(frame[name].astype(float) - frame["others_s"]).clip(lower=0.0))
        grouped = of_phase.groupby(KEYS, sort=False, observed=True)
        with_waits = (grouped["without_s"].median() + grouped["others_s"].mean())[phases == name].dropna()
        result.loc[with_waits.index, name] = with_waits


def _waiting_phase(frame: pd.DataFrame) -> pd.Series:
    """Return, per trial, rank and window, the phase that has room for the waits for other ranks' loaders."""
    room = {name: np.minimum(frame[name].astype(float), frame["others_s"]) for name in _WAITING}
    return frame[KEYS].assign(**room).groupby(KEYS, sort=False, observed=True).sum().idxmax(axis=1)
