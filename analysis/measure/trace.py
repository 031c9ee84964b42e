"""What a profiler trace says about a step's communication, and the live account held against it.

A trace is what `torch.profiler` exports of one rank: Chrome trace JSON, gzip'd, with an event for each kernel. NCCL's
kernels are known by their names, which have begun with `nccl` in every version (ncclKernel_..., later ncclDevKernel_...).
"""

import gzip
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.load.results import Results, ResultsError, filesystem
from analysis.measure.communication import bucket_rows, step_rows

Intervals = npt.NDArray[np.float64]
"""begins and ends in seconds, [n, 2]"""

RELATIVE_TOLERANCE = 0.05
ABSOLUTE_TOLERANCE_S = 1e-4
"""The live account holds where its exposed time is within either of the trace's."""

COMPARED = ("communication_s", "hidden_s", "exposed_s")

CHECK_COLUMNS = [
    "trial_id", "rank",
    *(column.removesuffix("_s") + end for column in COMPARED for end in ("_trace_s", "_live_s", "_difference_s", "_difference_share")),
    "holds", "uncovered_s", "wire_trace_s", "wire_live_s", "problem",
]  # fmt: skip

FEW_TRIALS = 4
"""so many trials with traces are read in processes of their own"""

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(ResultsError):
    """A trace cannot be used: one line with its file and what is wrong."""


def read_kernels(path: str, world_size: int) -> pd.DataFrame:
    """Everything that ran on the GPU of one rank, in the order in which the host launched it.

    Columns: name, communication (an NCCL kernel; kernels, copies and memsets else), begin_s and end_s from the first
    begin on, launch (CUPTI's correlation number: it counts the process's calls of the CUDA API, so it orders launches).

    Raises TraceError where the file is no trace, holds nothing of a GPU (a trace of CPU ranks), or, of more than one
    rank, no communication: matching names silently finds nothing when they change.
    """
    system, place = filesystem(path)
    try:
        with system.open_input_stream(place, compression=None) as stream:
            trace = json.loads(gzip.decompress(stream.read()))
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        rows = [_kernel(event) for event in events if str(event.get("cat", "")).lower() in _GPU_CATEGORIES]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = str(error).strip().partition("\n")[0]
        raise TraceError(f"{path}: not a trace that torch.profiler exports ({type(error).__name__}: {what})") from None
    if not rows:
        raise TraceError(
            f"{path}: holds no kernel, copy or memset; a trace of a CPU rank has no communication to check"
        )
    kernels = pd.DataFrame(rows).sort_values("launch", kind="stable", ignore_index=True)
    if world_size > 1 and not kernels["communication"].any():
        raise TraceError(
            f"{path}: none of its {len(kernels)} kernels begins with 'nccl', though {world_size} ranks communicate"
        )
    kernels[["begin_s", "end_s"]] -= kernels["begin_s"].min()
    return kernels


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
    """The same points as disjoint intervals in order; touching ones become one."""
    if not len(intervals):
        return intervals.reshape(0, 2)
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.r_[True, ordered[1:, 0] > reach[:-1]]
    return np.stack([ordered[first, 0], reach[np.r_[first[1:], True]]], axis=1)


def length_s(intervals: Intervals) -> float:
    """Seconds that lie in at least one of the intervals."""
    return float(np.diff(union(intervals)).sum())


def overlap_s(first: Intervals, second: Intervals) -> float:
    """Seconds that lie in both: |A| + |B| - |A or B|."""
    return max(0.0, length_s(first) + length_s(second) - length_s(np.concatenate([first, second])))


def gradient_kernels(kernels: pd.DataFrame, buckets: Sequence[int], path: str = "trace") -> pd.DataFrame:
    """The all-reduces of the gradients, a row each: step (0, 1, ...), bucket, begin_s, end_s, last_gradient_s.

    `buckets` has the number of buckets of each traced step; other communication, such as the broadcast of buffers, is
    left out. last_gradient_s: end of the last compute kernel that the host launched before the step's last all-reduce.
    What it launches later (copies out of the buckets, the optimizer) waits for communication on the compute stream; by
    time alone such copies could not be told from the backward pass. The division of the last bucket by the number of
    ranks counts as part of it, a few us.

    Raises TraceError where there are not as many all-reduces as buckets.
    """
    reduces = kernels[kernels["communication"] & kernels["name"].str.contains("AllReduce", case=False)]
    if len(reduces) != sum(buckets):
        raise TraceError(
            f"{path}: holds {len(reduces)} all-reduce kernels, but its {len(buckets)} steps had {sum(buckets)} buckets"
        )
    compute = kernels[~kernels["communication"]]
    ended_s = np.maximum.accumulate(np.r_[-np.inf, compute["end_s"].to_numpy()])
    found = reduces[["begin_s", "end_s", "launch"]].reset_index(drop=True)
    found.insert(0, "step", np.repeat(np.arange(len(buckets)), buckets))
    found.insert(1, "bucket", found.groupby("step").cumcount())
    last_launch = found.groupby("step")["launch"].transform("last")
    found["last_gradient_s"] = ended_s[np.searchsorted(compute["launch"].to_numpy(), last_launch.to_numpy())]
    return found.drop(columns="launch")


def uncovered_s(kernels: pd.DataFrame, reduces: pd.DataFrame) -> pd.Series:
    """Seconds of each step's all-reduces during which no compute kernel ran, by step.

    This is what Holistic Trace Analysis calls exposed (comm_comp_overlap). Gaps between the kernels of a backward pass
    that waits for its host count there, though the pass is not over: it is at least the part after the last gradient
    unless copies out of the buckets run then.
    """
    compute = union(kernels.loc[~kernels["communication"], ["begin_s", "end_s"]].to_numpy(float))
    found = {}
    for step, group in reduces.groupby("step"):
        spans = group[["begin_s", "end_s"]].to_numpy(float)
        near = compute[(compute[:, 1] > spans[:, 0].min()) & (compute[:, 0] < spans[:, 1].max())]
        found[step] = length_s(spans) - overlap_s(spans, near)
    return pd.Series(found, name="uncovered_s", dtype=float).rename_axis("step")


def holds(trace_s: float, live_s: float) -> bool:
    """Whether the live account's seconds are within 5 % or 0.1 ms of the trace's."""
    return abs(live_s - trace_s) <= max(ABSOLUTE_TOLERANCE_S, RELATIVE_TOLERANCE * trace_s)


def compare(trace: pd.DataFrame, live: pd.DataFrame) -> dict[str, Any]:
    """Means per step of both accounts of the same steps of one rank, as `communication.step_rows` has them.

    For communication, hidden and exposed: `<name>_trace_s`, `<name>_live_s`, `<name>_difference_s` (live - trace) and
    `<name>_difference_share` (of the trace's; None where that is 0); and `holds`, by the exposed time.
    """
    found: dict[str, Any] = {}
    for column in COMPARED:
        name = column.removesuffix("_s")
        trace_s, live_s = float(trace[column].mean()), float(live[column].mean())
        found |= {
            f"{name}_trace_s": trace_s,
            f"{name}_live_s": live_s,
            f"{name}_difference_s": live_s - trace_s,
            f"{name}_difference_share": (live_s - trace_s) / trace_s if trace_s else None,
        }
    return found | {"holds": holds(found["exposed_trace_s"], found["exposed_live_s"])}


def check_trial(trial: pd.Series, buckets: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """A row for each trace of a trial: rank, the values of `compare`, uncovered_s, wire_trace_s and wire_live_s.

    trial: a row of `results.Results.trials`, of GPUs; buckets, steps: frames of `results.Results`. Both sides are totalled by
    `communication.bucket_rows` and `step_rows`, so that they differ in what was seen alone. Wire is given where every
    rank has a trace: without one of them the shortest duration may be missing.

    Raises TraceError as `read_kernels` and `gradient_kernels` do.
    """
    trials = trial.to_frame().T
    buckets = buckets[buckets["window"] == "profile"]
    live = bucket_rows(buckets, steps, trials)
    traced, stamps, uncovered = [], [], {}
    for path in trial["trace_paths"]:
        rank = _rank_of(path)
        own = live.loc[live["rank"] == rank, list(buckets.columns)]
        kernels = read_kernels(path, trial["world_size"])
        reduces = gradient_kernels(kernels, own.groupby("step").size().tolist(), path)
        traced.append(own.assign(ready_s=reduces["begin_s"].to_numpy(), end_s=reduces["end_s"].to_numpy()))
        stamps.append(own.assign(last_gradient_s=reduces["last_gradient_s"].to_numpy()).groupby("step").head(1))
        uncovered[rank] = float(uncovered_s(kernels, reduces).mean())
    seen = step_rows(bucket_rows(pd.concat(traced), pd.concat(stamps), trials))
    told = step_rows(live)
    rows = []
    for rank, uncovered_mean_s in uncovered.items():
        pair = [frame[frame["rank"] == rank] for frame in (seen, told)]
        wire = [frame["wire_s"].mean() if len(uncovered) == trial["world_size"] else None for frame in pair]
        more = {"uncovered_s": uncovered_mean_s, "wire_trace_s": wire[0], "wire_live_s": wire[1]}
        rows.append({"rank": rank, **compare(*pair), **more})
    return pd.DataFrame(rows)


def check(results: Results) -> pd.DataFrame:
    """`check_trial` of every trial that has traces of several GPUs, with its trial_id and `problem`.

    Where a trial's traces cannot be used, its one row has the reason as `problem` and `holds` is False.
    """
    trials = results.trials.reindex(columns=["trial_id", "device", "world_size", "trace_paths"])
    tasks = []
    for _, trial in trials.iterrows():
        if trial["trace_paths"] and trial["device"] == "cuda" and trial["world_size"] > 1:
            buckets, steps = (f[f["trial_id"] == trial["trial_id"]] for f in (results.buckets, results.steps))
            tasks.append((trial, buckets, steps))
    if len(tasks) < FEW_TRIALS:
        found = [_checked(task) for task in tasks]
    else:  # a trace is megabytes of JSON: a second or two each
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("forkserver")) as pool:
            found = list(pool.map(_checked, tasks))
    return (
        pd.concat(found, ignore_index=True).reindex(columns=CHECK_COLUMNS)
        if found
        else pd.DataFrame(columns=CHECK_COLUMNS)
    )


def _checked(task: tuple[pd.Series, pd.DataFrame, pd.DataFrame]) -> pd.DataFrame:
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
        raise TraceError(f"{path}: the name of a trace is rank<R>.json.gz")
    return int(digits)
