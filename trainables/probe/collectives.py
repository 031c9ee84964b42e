"""Find the collectives of a trace, and how much of each was hidden behind computation."""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainables.probe.job import Row
from trainables.probe.probe import BOUNDARY

GLOO_PREFIX = "gloo:"
"""c10d's name for the execution of a collective by gloo, from its issue to its completion"""

COMPUTE = ("kernel", "gpu_memcpy", "gpu_memset")
"""categories of work on the device; NCCL's kernels are excluded by name"""

TYPE_BYTES = {
    "float": 4, "int": 4, "long int": 8, "double": 8, "c10::bfloat16": 2, "c10::half": 2, "unsigned char": 1, "bool": 1,
    "signed char": 1, "float8": 1,
}  # fmt: skip
"""bytes per element of kineto's names of types"""

NCCL_TYPE_BYTES = {
    "Float": 4, "Int": 4, "Long": 8, "Double": 8, "BFloat16": 2, "Half": 2, "Byte": 1, "Bool": 1, "Char": 1,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
"""bytes per element of c10's names of types, which the metadata of NCCL's kernels uses"""

Interval = tuple[float, float]


def collective_rows(path: Path, rank: int, numbers: Sequence[int]) -> list[Row]:
    """Return the rows of collectives.parquet of one rank: one per collective of the traced steps.

    path: Chrome trace JSON of torch.profiler, gzipped or not. numbers: the traced steps, whose ends are marked.
    """
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    boundaries = sorted(
        event["ts"] for event in events if event["name"] == BOUNDARY and event["cat"] == "user_annotation"
    )
    if len(boundaries) < 2:
        return []
    on_device = any(event.get("cat") == "kernel" for event in events)
    found, compute = _device_work(events) if on_device else _host_work(events)
    starts = _device_starts(events, boundaries) if on_device else boundaries
    compute = _union(compute)
    rows: list[Row] = []
    for collective in sorted(found, key=lambda row: row["issued"]):
        index = bisect_right(boundaries, collective["issued"]) - 1
        if not 0 <= index < min(len(boundaries) - 1, len(numbers)):
            continue
        start, end = collective["start"], collective["end"]
        rows.append(
            {
                "rank": rank,
                "window": "communication",
                "step": numbers[index],
                "collective": 0,
                "operation": collective["operation"],
                "group": collective["group"],
                "group_size": collective["group_size"],
                "bytes": collective["bytes"],
                "start_s": (start - starts[index]) / 1e6,
                "end_s": (end - starts[index]) / 1e6,
                "hidden_s": _overlap((start, end), compute) / 1e6,
            }
        )
    return _numbered(rows)


def _numbered(rows: list[Row]) -> list[Row]:
    """Number the collectives of each step that have the same operation, group and size, which match across ranks."""
    counts: dict[Any, int] = {}
    for row in rows:
        key = tuple(row[name] for name in ("step", "operation", "group", "bytes"))
        row["collective"] = counts[key] = counts.get(key, -1) + 1
    return rows


def _host_work(events: Iterable[dict[str, Any]]) -> tuple[list[Row], list[Interval]]:
    """Return gloo's collectives, and the time in which operators ran on the host."""
    found, compute = [], []
    for event in events:
        interval = (event["ts"], event["ts"] + event["dur"])
        if event["name"].startswith(GLOO_PREFIX):
            operation = event["name"].removeprefix(GLOO_PREFIX)
            found.append(_collective(operation, interval, event["ts"], None, None, _host_bytes(event.get("args", {}))))
        elif event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):
            compute.append(interval)
    return found, compute


def _host_bytes(arguments: dict[str, Any]) -> int | None:
    """Return the bytes of a collective's input tensors."""
    total = 0
    for shape, name in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False):
        size = TYPE_BYTES.get(name)
        if size is None or any(not isinstance(edge, int) for edge in shape):
            return None
        for edge in shape:
            size *= edge
        total += size
    return total or None


def _device_work(events: Iterable[dict[str, Any]]) -> tuple[list[Row], list[Interval]]:
    """Return NCCL's kernels, and the time in which other work ran on the device."""
    events = list(events)
    issued = _launches(events)
    found, compute = [], []
    for event in events:
        if event.get("cat") not in COMPUTE:
            continue
        interval = (event["ts"], event["ts"] + event["dur"])
        if event["cat"] == "kernel" and event["name"].lower().startswith("nccl"):
            details = event.get("args", {})
            operation = details.get("Collective name") or event["name"].split("(")[0]
            found.append(
                _collective(
                    operation,
                    interval,
                    issued.get(details.get("correlation"), event["ts"]),
                    details.get("Process Group Name"),
                    details.get("Group size"),
                    _device_bytes(details),
                )
            )
        else:
            compute.append(interval)
    return found, compute


def _device_bytes(details: dict[str, Any]) -> int | None:
    """Return the bytes of the larger of a collective's input and output on this rank."""
    elements = [details[name] for name in ("In msg nelems", "Out msg nelems") if details.get(name)]
    size = NCCL_TYPE_BYTES.get(str(details.get("dtype")))
    return int(max(elements)) * size if elements and size else None


def _collective(
    operation: str, interval: Interval, issued: float, group: Any, group_size: Any, size: int | None
) -> Row:
    return {
        "operation": operation.strip("_"),
        "start": interval[0],
        "end": interval[1],
        "issued": issued,
        "group": None if group is None else str(group),
        "group_size": None if group_size is None else int(group_size),
        "bytes": size,
    }


def _launches(events: Iterable[dict[str, Any]]) -> dict[Any, float]:
    """Return the host time of each launch by its correlation number."""
    return {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }


def _device_starts(events: Iterable[dict[str, Any]], boundaries: Sequence[float]) -> list[float]:
    """Return when the device passed each boundary: the end of everything that was launched before it."""
    events = list(events)
    issued = _launches(events)
    work = sorted(
        (issued[event["args"]["correlation"]], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in COMPUTE
        and not event["name"].lower().startswith("nccl")
        and event.get("args", {}).get("correlation") in issued
    )
    starts, latest, index = [], 0.0, 0
    for boundary in boundaries:
        while index < len(work) and work[index][0] < boundary:
            latest = max(latest, work[index][1])
            index += 1
        starts.append(max(latest, boundary))
    return starts


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same points, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _overlap(interval: Interval, disjoint: Sequence[Interval]) -> float:
    """Return the length of the part of an interval that ordered disjoint intervals cover."""
    start, end = interval
    index = max(0, bisect_right(disjoint, (start, float("inf"))) - 1)
    total = 0.0
    while index < len(disjoint) and disjoint[index][0] < end:
        total += max(0.0, min(end, disjoint[index][1]) - max(start, disjoint[index][0]))
        index += 1
    return total
