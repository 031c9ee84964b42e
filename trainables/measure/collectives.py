"""Find the collectives of a trace, and how much of each was hidden behind computation."""

import gzip
import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from trainables.step.timing import Row

BOUNDARY = "scaling_study::boundary"
"""name of the trace event between steps"""

GZIP_MAGIC = b"\x1f\x8b"
MICROSECONDS = 1e6
"""per second; the unit of Chrome traces"""

ANNOTATION = "user_annotation"
BACKWARD = "autograd::engine::evaluate_function"
"""start of the names of autograd's events, one per backward operation"""

GLOO_PREFIX = "gloo:"
"""c10d's name for the execution of a collective by gloo, from its issue to its completion"""

GLOO_REDUCTION = "gloo:all_reduce"

GLOO_CALLS = {"c10d::allreduce_": ("all_reduce", 0), "c10d::_reduce_scatter_base_": ("reduce_scatter", 1)}
"""calls that gloo executes as an all-reduce: their operation, and which of their arguments is the input"""

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
COPY_TO_DEVICE = "Memcpy HtoD"
"""start of the names of copies to the device"""

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

Work = tuple[float, float, float]
"""when a computation was issued by the host, started and ended"""


class TraceRows(NamedTuple):
    """Rows of one rank. last_gradients_s: by step, for those with buckets. totals: by step, see `trace_rows`."""

    collectives: list[Row]
    buckets: list[Row]
    last_gradients_s: dict[int, float]
    totals: dict[int, Row]


def read_trace(content: bytes) -> list[dict[str, Any]]:
    """Return the events with a duration of a trace: Chrome trace JSON of torch.profiler, gzipped or not."""
    trace = json.loads(gzip.decompress(content) if content[:2] == GZIP_MAGIC else content)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def boundaries(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the times between the steps of a trace, in order."""
    return sorted(event["ts"] for event in events if event["name"] == BOUNDARY and _category(event) == ANNOTATION)


def kernel_seconds(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return how long a device was busy, without NCCL's kernels and copies to the device. None if it did nothing."""
    spans = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if _category(event) in DEVICE_WORK and not _nccl(event) and not event["name"].startswith(COPY_TO_DEVICE)
    ]
    return _length(_union(spans)) / MICROSECONDS if spans else None


def trace_rows(events: Sequence[dict[str, Any]], rank: int, numbers: Sequence[int], window: str) -> TraceRows:
    """Return the rows of collectives.parquet and buckets.parquet of one rank, from the events of its trace.

    numbers: the traced steps, between which there are boundaries.

    A step has buckets if all-reduces are all that it communicates from its first backward operation on, as under DDP or
    if the script averages gradients itself. Their `ready_s` is, on GPUs, the end of the work that was launched before.

    totals, columns of steps.parquet: collectives_s: time with at least one collective in progress.
    exposed_collectives_s: the part without computation. kernels_s: time with computation on the GPU; None on CPUs.
    """
    device = _Device(events) if any(_category(event) == "kernel" for event in events) else None
    found, work = _host_work(events) if device is None else device.work()
    compute = _union((start, end) for _, start, end in work)
    found.sort(key=lambda collective: collective.issued)
    rows = TraceRows([], [], {}, {})
    for number, (begin, end) in zip(numbers, pairwise(boundaries(events)), strict=False):
        start = begin if device is None else device.done(begin)
        of_step = [collective for collective in found if begin <= collective.issued < end]
        seen: Counter[Any] = Counter()
        for collective in of_step:
            key = (collective.operation, collective.group, collective.bytes)
            row = {"rank": rank, "window": window, "step": number, **collective.columns(start)}
            hidden = _overlap((collective.start, collective.end), compute) / MICROSECONDS
            rows.collectives.append(row | {"collective": seen[key], "hidden_s": hidden})
            seen[key] += 1
        spans = _union((collective.start, collective.end) for collective in of_step)
        hidden = sum(_overlap(span, compute) for span in spans)
        kernels = _union((first, last) for issued, first, last in work if begin <= issued < end)
        rows.totals[number] = {
            "collectives_s": _length(spans) / MICROSECONDS,
            "exposed_collectives_s": (_length(spans) - hidden) / MICROSECONDS,
            "kernels_s": None if device is None else _length(kernels) / MICROSECONDS,
        }
        backward = [event for event in events if begin <= event["ts"] < end and event["name"].startswith(BACKWARD)]
        reductions = _reductions(of_step, min((event["ts"] for event in backward), default=None))
        if reductions:
            last = max(event["ts"] + event["dur"] for event in backward)
            if reductions[-1].issued < last:  # within the last backward operation, when the last gradient is ready
                last = reductions[-1].issued
            done = last if device is None else device.done(last)
            rows.last_gradients_s[number] = (done - start) / MICROSECONDS
            for bucket, collective in enumerate(reductions):
                ready = collective.start if device is None else min(device.done(collective.issued), collective.start)
                row = {"rank": rank, "window": window, "step": number, "bucket": bucket, "bytes": collective.bytes}
                times = {"ready_s": ready - start, "end_s": collective.end - start}
                rows.buckets.append(row | {name: value / MICROSECONDS for name, value in times.items()})
    return rows


@dataclass(frozen=True)
class _Collective:
    """A collective of a trace; times in microseconds. issued: host time of the call."""

    operation: str
    issued: float
    start: float
    end: float
    group: str | None = None
    group_size: int | None = None
    bytes: int | None = None

    def columns(self, start: float) -> Row:
        """Return the columns of collectives.parquet, with seconds from `start`."""
        return {
            "operation": self.operation,
            "group": self.group,
            "group_size": self.group_size,
            "bytes": self.bytes,
            "start_s": (self.start - start) / MICROSECONDS,
            "end_s": (self.end - start) / MICROSECONDS,
        }


def _reductions(collectives: Sequence[_Collective], first_backward: float | None) -> list[_Collective]:
    """Return the all-reduces from the first backward operation on; none if there is other communication, too."""
    if first_backward is None:
        return []
    found = [collective for collective in collectives if collective.issued >= first_backward]
    if any("reduce" not in row.operation or "scatter" in row.operation or not row.bytes for row in found):
        return []
    return found


def _category(event: Mapping[str, Any]) -> str:
    return str(event.get("cat", "")).lower()


def _host_work(events: Iterable[dict[str, Any]]) -> tuple[list[_Collective], list[Work]]:
    """Return gloo's collectives, and when operators ran on the host."""
    found = [
        _Collective(operation, event["ts"], event["ts"], event["ts"] + event["dur"], bytes=_host_bytes(_details(event)))
        for operation, event in _executed_by_gloo(events)
    ]
    operators = (event for event in events if _category(event) == "cpu_op" and event["name"].startswith("aten::"))
    return found, [(event["ts"], event["ts"], event["ts"] + event["dur"]) for event in operators]


def _executed_by_gloo(events: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the operation and the event of each collective that gloo executed, in order.

    gloo executes a reduce-scatter as an all-reduce. If there are as many calls of a size as all-reduces, they are named
    by the calls.
    """
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    called: dict[int, list[str]] = defaultdict(list)
    for event in ordered:
        if event["name"] in GLOO_CALLS:
            operation, index = GLOO_CALLS[event["name"]]
            called[_elements(_shapes(event)[index : index + 1])].append(operation)
    executed = [event for event in ordered if event["name"].startswith(GLOO_PREFIX)]
    reductions = Counter(_elements(_shapes(event)) for event in executed if event["name"] == GLOO_REDUCTION)
    names = {size: iter(operations) for size, operations in called.items() if len(operations) == reductions[size]}
    found = []
    for event in executed:
        operation = event["name"].removeprefix(GLOO_PREFIX)
        if event["name"] == GLOO_REDUCTION and (size := _elements(_shapes(event))) in names:
            operation = next(names[size])
        found.append((operation, event))
    return found


def _details(event: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = event.get("args", {})
    return details


def _shapes(event: dict[str, Any]) -> Sequence[Any]:
    return _details(event).get("Input Dims", ())


def _elements(shapes: Sequence[Any]) -> int:
    """Return the number of elements of tensors, or lists of tensors, with these shapes."""
    return sum(
        math.prod(shape) if all(isinstance(edge, int) for edge in shape) else _elements(shape) for shape in shapes
    )


def _host_bytes(arguments: dict[str, Any]) -> int | None:
    """Return the bytes of a collective's input tensors."""
    total = 0
    for shape, name in zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False):
        if name not in TYPE_BYTES or not all(isinstance(edge, int) for edge in shape):
            return None
        total += TYPE_BYTES[name] * math.prod(shape)
    return total or None


class _Device:
    """What ran on the GPU of a trace."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.events = [event for event in events if _category(event) in DEVICE_WORK]
        self.issued = {
            event["args"]["correlation"]: event["ts"]
            for event in events
            if _category(event) in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
        }
        launches = sorted(
            (self._issued(event), event["ts"] + event["dur"]) for event in self.events if not _nccl(event)
        )
        self.launches = [issued for issued, _ in launches]
        self.done_by = list(accumulate((end for _, end in launches), max))

    def _issued(self, event: dict[str, Any]) -> float:
        return float(self.issued.get(event.get("args", {}).get("correlation"), event["ts"]))

    def done(self, issued: float) -> float:
        """Return when the device has finished all computation that was launched before, at the earliest then."""
        index = bisect_left(self.launches, issued)
        return max(issued, self.done_by[index - 1]) if index else issued

    def work(self) -> tuple[list[_Collective], list[Work]]:
        """Return NCCL's kernels, and when other work ran."""
        found, compute = [], []
        for event in self.events:
            start, end, details = event["ts"], event["ts"] + event["dur"], event.get("args", {})
            if not _nccl(event):
                compute.append((self._issued(event), start, end))
                continue
            operation, group = details.get("Collective name"), details.get("Process Group Name")
            size = details.get("Group size")
            found.append(
                _Collective(
                    str(operation or event["name"].partition("(")[0]).strip("_"),
                    self._issued(event),
                    start,
                    end,
                    None if group is None else str(group),
                    None if size is None else int(size),
                    _device_bytes(details),
                )
            )
        return found, compute


def _nccl(event: Mapping[str, Any]) -> bool:
    return _category(event) == "kernel" and str(event["name"]).lower().startswith("nccl")


def _device_bytes(details: dict[str, Any]) -> int | None:
    """Return the bytes of the larger of a collective's input and output on this rank."""
    elements = [int(details[name]) for name in ("In msg nelems", "Out msg nelems") if details.get(name)]
    size = NCCL_TYPE_BYTES.get(str(details.get("dtype")))
    return max(elements) * size if elements and size else None


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals that cover the same points, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def _overlap(interval: Interval, disjoint: Sequence[Interval]) -> float:
    """Return the length of the part of an interval that ordered disjoint intervals cover."""
    start, end = interval
    index = max(0, bisect_right(disjoint, (start, float("inf"))) - 1)
    total = 0.0
    while index < len(disjoint) and disjoint[index][0] < end:
        total += max(0.0, min(end, disjoint[index][1]) - max(start, disjoint[index][0]))
        index += 1
    return total
