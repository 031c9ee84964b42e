"""Check the live communication breakdown against profiler traces.

A trace is the export of `torch.profiler` for one rank: gzip-compressed Chrome trace JSON with one event per kernel.
NCCL kernels are recognised by their names, which start with `nccl` in all versions (ncclKernel_..., later
ncclDevKernel_...).
"""

import gzip
import io
import json
import multiprocessing
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.measure.communication import bucket_rows, step_rows
from analysis.read.results import Results, ResultsError, filesystem

Intervals = npt.NDArray[np.float64]
"""Starts and ends in seconds, shape [n, 2]."""

RELATIVE_TOLERANCE = 0.05
ABSOLUTE_TOLERANCE_S = 1e-4
"""The live breakdown agrees if its exposed time is within either tolerance of the trace."""

COMPARED = ("communication_s", "hidden_s", "exposed_s")

CHECK_COLUMNS = [
    "trial_id", "rank",
    *(column.removesuffix("_s") + end for column in COMPARED
      for end in ("_trace_s", "_live_s", "_difference_s", "_difference_share")),
    "holds", "uncovered_s", "wire_trace_s", "wire_live_s", "problem",
]  # fmt: skip

MAX_TRACE_BYTES = 2**28
"""Largest trace that is read, before compression."""

FEW_TRIALS = 4
"""From this many trials on, traces are read in separate processes."""

_NO_TRACE = (
    OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error,
)  # fmt: skip
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(ResultsError):
    """A trace cannot be used: one line with its file and the reason."""


def read_kernels(path: str, world_size: int) -> pd.DataFrame:
    """Return everything that ran on the GPU of one rank, in the order of launch by the host.

    Columns: name; communication (True for NCCL kernels; False for other kernels, copies and memsets); begin_s and
    end_s, relative to the first start; launch (CUPTI's correlation number, which counts the process's CUDA API calls
    and therefore orders launches).

    Raises TraceError if the file is not a trace, contains no GPU events (a trace of CPU ranks), or contains no
    communication although there are several ranks. Matching by name would otherwise fail silently if names change.
    """
    system, location = filesystem(path)
    try:
        with system.open_input_stream(location, compression=None) as stream:
            trace = json.loads(_unpacked(stream.read(MAX_TRACE_BYTES)))
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        rows = [_kernel(event) for event in events if str(event.get("cat", "")).lower() in _GPU_CATEGORIES]
    except _NO_TRACE as error:
        reason = str(error).strip().partition("\n")[0]
        raise TraceError(f"{path}: not a trace exported by torch.profiler ({type(error).__name__}: {reason})") from None
    if not rows:
        raise TraceError(f"{path}: contains no kernel, copy or memset; traces of CPU ranks cannot be checked")
    kernels = pd.DataFrame(rows).sort_values("launch", kind="stable", ignore_index=True)
    if world_size > 1 and not kernels["communication"].any():
        raise TraceError(
            f"{path}: none of the {len(kernels)} kernels starts with 'nccl', although {world_size} ranks communicate"
        )
    kernels[["begin_s", "end_s"]] -= kernels["begin_s"].min()
    return kernels


def _unpacked(content: bytes) -> bytes:
    """Decompress gzip. Raises ValueError beyond `MAX_TRACE_BYTES`."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(MAX_TRACE_BYTES + 1)
    if len(unpacked) > MAX_TRACE_BYTES:
        raise ValueError(f"more than {MAX_TRACE_BYTES} bytes")
    return unpacked


def _kernel(event: dict[str, Any]) -> dict[str, Any]:
    name, begin_us = str(event["name"]), float(event["ts"])
    return {
        "name": name,
        "communication": str(event["cat"]).lower() == "kernel" and name.lower().startswith("nccl"),
        "begin_s": begin_us / 1e6,
        "end_s": (begin_us + float(event["dur"])) / 1e6,
        "launch": int(event["args"]["correlation"]),
    }


def union(intervals: Intervals) -> Intervals:
    """Return the same points as disjoint intervals, in order. Adjacent intervals are merged."""
    if not len(intervals):
        return intervals.reshape(0, 2)
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.r_[True, ordered[1:, 0] > reach[:-1]]
    return np.stack([ordered[first, 0], reach[np.r_[first[1:], True]]], axis=1)


def length_s(intervals: Intervals) -> float:
    """Return the seconds in at least one of the intervals."""
    return float(np.diff(union(intervals)).sum())


def overlap_s(first: Intervals, second: Intervals) -> float:
    """Return the seconds in both: |A| + |B| - |A or B|."""
    return max(0.0, length_s(first) + length_s(second) - length_s(np.concatenate([first, second])))


def gradient_kernels(kernels: pd.DataFrame, buckets: Sequence[int], path: str = "trace") -> pd.DataFrame:
    """Return the all-reduces of the gradients, one row each.

    Columns: step (0, 1, ...), bucket, begin_s, end_s, last_gradient_s.
    buckets: number of buckets per traced step. Other communication, such as the broadcast of buffers, is omitted.
    last_gradient_s: end of the last compute kernel launched before the step's last all-reduce. Later launches (copies
    out of the buckets, the optimizer) wait for communication on the compute stream; times alone would not distinguish
    these copies from the backward pass. The division of the last bucket by the number of ranks is included, a few us.

    Raises TraceError if the number of all-reduces differs from the number of buckets.
    """
    reduces = kernels[kernels["communication"] & kernels["name"].str.contains("AllReduce", case=False)]
    if len(reduces) != sum(buckets):
        raise TraceError(
            f"{path}: contains {len(reduces)} all-reduce kernels, expected {sum(buckets)} "
            f"(buckets of {len(buckets)} steps)"
        )
    compute = kernels[~kernels["communication"]]
    ended_s = np.maximum.accumulate(np.r_[-np.inf, compute["end_s"].to_numpy()])
    result = reduces[["begin_s", "end_s", "launch"]].reset_index(drop=True)
    result.insert(0, "step", np.repeat(np.arange(len(buckets)), buckets))
    result.insert(1, "bucket", result.groupby("step").cumcount())
    last_launch = result.groupby("step")["launch"].transform("last")
    result["last_gradient_s"] = ended_s[np.searchsorted(compute["launch"].to_numpy(), last_launch.to_numpy())]
    return result.drop(columns="launch")


def uncovered_s(kernels: pd.DataFrame, reduces: pd.DataFrame) -> pd.Series:
    """Return the seconds of each step's all-reduces without a running compute kernel, by step.

    Holistic Trace Analysis calls this exposed (comm_comp_overlap). It includes gaps between the kernels of a host-bound
    backward pass. It is at least the part after the last gradient, unless copies out of the buckets run then.
    """
    compute = union(kernels.loc[~kernels["communication"], ["begin_s", "end_s"]].to_numpy(float))
    seconds = {}
    for step, group in reduces.groupby("step"):
        spans = group[["begin_s", "end_s"]].to_numpy(float)
        nearby = compute[(compute[:, 1] > spans[:, 0].min()) & (compute[:, 0] < spans[:, 1].max())]
        seconds[step] = length_s(spans) - overlap_s(spans, nearby)
    return pd.Series(seconds, name="uncovered_s", dtype=float).rename_axis("step")


def within_tolerance(trace_s: float, live_s: float) -> bool:
    """Return True if the live seconds are within 5 % or 0.1 ms of the trace's."""
    return abs(live_s - trace_s) <= max(ABSOLUTE_TOLERANCE_S, RELATIVE_TOLERANCE * trace_s)


def against_live(trace: pd.DataFrame, live: pd.DataFrame) -> dict[str, Any]:
    """Compare the mean seconds per step in the trace and the live breakdown, for the same steps of one rank.

    trace, live: as returned by `communication.step_rows`. For communication, hidden and exposed: `<name>_trace_s`,
    `<name>_live_s`, `<name>_difference_s` (live - trace) and `<name>_difference_share` (relative to the trace; None if
    that is 0); and `holds`, which depends on the exposed time.
    """
    row: dict[str, Any] = {}
    for column in COMPARED:
        name = column.removesuffix("_s")
        trace_s, live_s = float(trace[column].mean()), float(live[column].mean())
        row |= {
            f"{name}_trace_s": trace_s,
            f"{name}_live_s": live_s,
            f"{name}_difference_s": live_s - trace_s,
            f"{name}_difference_share": (live_s - trace_s) / trace_s if trace_s else None,
        }
    return row | {"holds": within_tolerance(row["exposed_trace_s"], row["exposed_live_s"])}


def check_trial(trial: pd.Series, buckets: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trace of a trial: rank, the values of `against_live`, uncovered_s, wire_trace_s, wire_live_s.

    trial: a row of `results.Results.trials`, on GPUs; buckets, steps: frames of `results.Results`. Both sides are
    reduced by `communication.bucket_rows` and `step_rows`, so they differ only in their observations. Wire time is None
    unless every rank has a trace, because the shortest duration may be missing.

    Raises TraceError like `read_kernels` and `gradient_kernels`.
    """
    trials = trial.to_frame().T
    buckets = buckets[buckets["window"] == "profile"]
    live = bucket_rows(buckets, steps, trials)
    trace_buckets, trace_stamps, uncovered = [], [], {}
    for path in trial["trace_paths"]:
        rank = _rank_of(path)
        rank_buckets = live.loc[live["rank"] == rank, list(buckets.columns)]
        kernels = read_kernels(path, trial["world_size"])
        reduces = gradient_kernels(kernels, rank_buckets.groupby("step").size().tolist(), path)
        trace_buckets.append(
            rank_buckets.assign(ready_s=reduces["begin_s"].to_numpy(), end_s=reduces["end_s"].to_numpy())
        )
        trace_stamps.append(
            rank_buckets.assign(last_gradient_s=reduces["last_gradient_s"].to_numpy()).groupby("step").head(1)
        )
        uncovered[rank] = float(uncovered_s(kernels, reduces).mean())
    trace_steps = step_rows(bucket_rows(pd.concat(trace_buckets), pd.concat(trace_stamps), trials))
    live_steps = step_rows(live)
    rows = []
    for rank, uncovered_mean_s in uncovered.items():
        pair = [frame[frame["rank"] == rank] for frame in (trace_steps, live_steps)]
        wire = [frame["wire_s"].mean() if len(uncovered) == trial["world_size"] else None for frame in pair]
        others = {"uncovered_s": uncovered_mean_s, "wire_trace_s": wire[0], "wire_live_s": wire[1]}
        rows.append({"rank": rank, **against_live(*pair), **others})
    return pd.DataFrame(rows)


def agreement(results: Results) -> pd.DataFrame:
    """Return `check_trial`, with trial_id and `problem`, for every trial with traces of several GPUs.

    If the traces of a trial cannot be used, it has one row with the reason as `problem`, and `holds` is False.
    """
    trials = results.trials.reindex(columns=["trial_id", "device", "world_size", "trace_paths"])
    tasks = []
    for _, trial in trials.iterrows():
        if trial["trace_paths"] and trial["device"] == "cuda" and trial["world_size"] > 1:
            buckets, steps = (f[f["trial_id"] == trial["trial_id"]] for f in (results.buckets, results.steps))
            tasks.append((trial, buckets, steps))
    if len(tasks) < FEW_TRIALS:
        frames = [_check_task(task) for task in tasks]
    else:  # each trace is megabytes of JSON and takes 1 to 2 s
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("forkserver")) as pool:
            frames = list(pool.map(_check_task, tasks))
    return (
        pd.concat(frames, ignore_index=True).reindex(columns=CHECK_COLUMNS)
        if frames
        else pd.DataFrame(columns=CHECK_COLUMNS)
    )


def _check_task(task: tuple[pd.Series, pd.DataFrame, pd.DataFrame]) -> pd.DataFrame:
    trial, buckets, steps = task
    try:
        rows = check_trial(trial, buckets, steps).assign(problem=None)
    except TraceError as error:
        rows = pd.DataFrame([{"holds": False, "problem": str(error)}])
    return rows.assign(trial_id=trial["trial_id"])


def _rank_of(path: str) -> int:
    name = path.rpartition("/")[2]
    digits = name.removeprefix("rank").partition(".")[0]
    if not (name.startswith("rank") and digits.isdigit()):
        raise TraceError(f"{path}: the file name must be rank<R>.json.gz")
    return int(digits)
