"""Clocks that time the parts of a step without disturbing them, and the marks of a timed step.

On CUDA, a mark is an event recorded on the stream; it costs about 2.5 us of host time and no synchronisation. Marks are
read after the window. On the CPU, a mark is `perf_counter()`. A window never mixes the two clocks: on CUDA every
phase is device time between two events, including the load wait (the device's idle time before the batch arrives).
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trainables.clock import perf_counter

Mark = Any


Row = dict[str, Any]
"""the columns of one step, as in `steps.parquet`, without those that do not apply"""


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
    "after_backward",
    "optimizer",
    "other",
)
"""the possible parts of a step, in order; also the names of profiler ranges. `scatter`, `replicate` and `gather` belong
to DataParallel. `reduce` is gradient communication outside the backward pass. `graph` is everything after the copy if
the step is a CUDA graph. `after_backward` is the workload's own function, such as gradient clipping. `other` is what a
script does outside of these parts."""


PHASES = tuple(f"{name}_s" for name in RANGES)
"""the columns of the parts; those of a step add up to step_s"""


class Clock(Protocol):
    """Marks points in a device's work and measures the seconds between them."""

    def mark(self) -> Mark: ...

    def seconds(self, first: Mark, second: Mark) -> float: ...

    def passed(self, mark: Mark) -> bool | None:
        """Return True if the device has passed the mark. None on CPUs, where host and device are the same."""

    def synchronize(self) -> None: ...

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Return a range for an external profiler (NVTX, for nsys)."""


class CpuClock:
    """The host's monotonic clock. A CPU step is complete when its call returns."""

    def mark(self) -> float:
        return perf_counter()

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
        """Let the device spin for some seconds. Returns the mark at the end."""
        torch.cuda._sleep(int(seconds * self._spin_cycles_per_s()))
        return self.mark()

    def _spin_cycles_per_s(self) -> float:
        if self._cycles_per_s is None:
            cycles = 10_000_000
            torch.cuda._sleep(cycles)
            start = self.mark()
            torch.cuda._sleep(cycles)
            end = self.mark()
            self.synchronize()
            self._cycles_per_s = cycles / self.seconds(start, end)
        return self._cycles_per_s


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@dataclass(frozen=True)
class StepOutput:
    """The output of a step. Tensors are on the device.

    loss: detached. host_to_device_bytes: bytes copied to the device; None if the step copies nothing. loss_scale: after
    the step; None without loss scaling. parts: returns the seconds of the parts inside a CUDA graph, to be called after
    the device has finished the replay and before the next one; None without a graph.
    """

    loss: torch.Tensor
    host_to_device_bytes: int | None = None
    loss_scale: torch.Tensor | None = None
    parts: Callable[[], Row] | None = None


@dataclass
class StepMarks:
    """The marks and host measurements of one instrumented step."""

    start: Mark = None
    end: Mark = None
    parts: list[tuple[str, Mark]] = field(default_factory=list)
    """name and start mark of each part, in order; the times of repeated parts add up"""
    last_gradient: Mark = None
    host_stamps_s: list[float] = field(default_factory=list)
    """host time at the start of each part and at the end of the step"""
    busy: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    """name, start and end of each part whose kernels ran back to back; the end is None if unknown"""
    host_load_s: float = 0.0
    host_transfer_s: float | None = None
    previous_step_done: bool | None = None
    output: StepOutput | None = None
    graph_parts: Row = field(default_factory=dict)


Annotate = Callable[[str], AbstractContextManager[Any]]
"""(name) -> a profiler range"""


StartPart = Callable[[str], None]
"""called by a step with the name of a part when it starts, which ends the previous part"""


Step = Callable[[Any, StartPart], StepOutput]
"""`step(batch, start_part)` trains one step and calls `start_part` at the start of each of its parts"""


def no_mark(name: str) -> None:
    """Ignore the start of a part. For windows without instrumentation."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Run Python's garbage collector now and disable it inside, because its pauses hit ranks at different times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def ranges(annotate: Annotate) -> Iterator[StartPart]:
    """Yield a function that ends the current profiler range and starts the next. The last ends with the context.

    Ranges belong to a thread, so calls from other threads (such as autograd's) are ignored.
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
    """Copy scalars from the device to the host, in one transfer."""
    return torch.stack([value.double().reshape(()) for value in values]).cpu().tolist() if values else []
