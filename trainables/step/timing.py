"""Clocks that time the parts of a step without disturbing them, and what a timed step leaves behind.

A mark on CUDA is an event recorded on the stream: about 2.5 us of host time and no synchronisation. Marks are read
after the window. On the CPU a mark is `time.perf_counter()`. A window never mixes the two clocks: on CUDA every phase
is device time between two events, the load wait included (the device's idle gap before the batch arrived).
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Mark = Any


Row = dict[str, Any]
"""One step's columns, as `steps.parquet` has them; a column that does not apply is left out"""


RANGES = (
    "load_wait",
    "host_to_device",
    "scatter",
    "replicate",
    "forward",
    "gather",
    "loss",
    "backward",
    "reduce",
    "graph",
    "optimizer",
)
"""the parts that a step may have, in order, as profilers are told of them. `scatter`, `replicate` and `gather` are
DataParallel's; `reduce` is communication of gradients outside the backward pass; `graph` is everything after the copy
where the step is one CUDA graph"""


PHASES = tuple(f"{name}_s" for name in RANGES)
"""their columns; together those that a step has are step_s"""


class Clock(Protocol):
    """Marks points in the work of a device and tells the seconds between them."""

    def mark(self) -> Mark: ...

    def seconds(self, first: Mark, second: Mark) -> float: ...

    def passed(self, mark: Mark) -> bool | None:
        """Whether the device has come past the mark already; None where host and device are one."""

    def synchronize(self) -> None: ...

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """A range of this name for a profiler that watches from outside (NVTX, for nsys)."""


class CpuClock:
    """The host's monotonic clock: a CPU step is over when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def passed(self, mark: float) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaClock:
    """Events on the current stream of one device; resolution about 0.5 us (CUDA runtime API, cudaEventElapsedTime)."""

    def __init__(self, device: torch.device):
        self.device = device
        self._cycles_per_s: float | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1e3

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)

    def hold(self, seconds: float) -> torch.cuda.Event:
        """Keeps the device busy with nothing for so long; gives the mark of its end."""
        torch.cuda._sleep(int(seconds * self._spin_cycles_per_s()))
        return self.mark()

    def _spin_cycles_per_s(self) -> float:
        if self._cycles_per_s is None:
            cycles = 10_000_000
            torch.cuda._sleep(cycles)
            begin = self.mark()
            torch.cuda._sleep(cycles)
            end = self.mark()
            self.synchronize()
            self._cycles_per_s = cycles / self.seconds(begin, end)
        return self._cycles_per_s


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@dataclass(frozen=True)
class StepOutput:
    """What a step gives, on the device and still unread.

    loss: detached. host_to_device_bytes: what it copied to the device; None: nothing to copy. loss_scale: after the step;
    None: none. parts: reads the seconds of parts inside a CUDA graph, once the device has passed it and before the next
    replay; None: no graph.
    """

    loss: torch.Tensor
    host_to_device_bytes: int | None = None
    loss_scale: torch.Tensor | None = None
    parts: Callable[[], Row] | None = None


@dataclass
class StepMarks:
    """What one instrumented step leaves behind: where it and its parts began, and host facts."""

    begin: Mark = None
    end: Mark = None
    parts: list[tuple[str, Mark]] = field(default_factory=list)
    """name of each part and the mark at its begin, in order; a part may come again, and then they add up"""
    last_gradient: Mark = None
    host_stamps_s: list[float] = field(default_factory=list)
    """the host's time at each part's begin, and at the step's end"""
    busy: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    """name, begin and end of each part whose kernels ran back to back; an end that is None is not known"""
    host_load_s: float = 0.0
    host_transfer_s: float | None = None
    previous_step_done: bool | None = None
    given: StepOutput | None = None
    graph_parts: Row = field(default_factory=dict)


Annotate = Callable[[str], AbstractContextManager[Any]]
"""names what runs inside to a profiler"""


Begin = Callable[[str], None]
"""told by a step that its part of this name begins, and that the one before it ends"""


Step = Callable[[Any, Begin], StepOutput]
"""`step(batch, begin)` trains one step, and calls `begin` with the name of each of its parts as it begins"""


def no_mark(name: str) -> None:
    """The begin of a part in a window without instruments."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's collector, whose pauses hit ranks at different times, runs before the window and not in it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def ranges(annotate: Annotate) -> Iterator[Begin]:
    """Gives what ends a profiler's current range and begins the next; the last ends with the context.

    Ranges belong to a thread: what begins on another one (autograd's, say) is left inside the current range.
    """
    thread = threading.get_ident()
    current: AbstractContextManager[Any] | None = None

    def advance(name: str) -> None:
        nonlocal current
        if threading.get_ident() != thread:
            return
        if current is not None:
            current.__exit__(None, None, None)
        current = annotate(name)
        current.__enter__()

    yield advance
    if current is not None:
        current.__exit__(None, None, None)


def read_numbers(values: list[torch.Tensor]) -> list[float]:
    """Numbers from the device, in one copy."""
    return torch.stack([value.double().reshape(()) for value in values]).cpu().tolist() if values else []
