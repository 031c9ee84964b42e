"""Clocks that time phases without disturbing them, and the windows of a trial.

A mark on CUDA is an event recorded on the stream: about 2.5 us of host time and no synchronisation. Marks are read
after the window. On the CPU a mark is `time.perf_counter()`. A window never mixes the two clocks: on CUDA every phase
is device time between two events, the load wait included (the device's idle gap before the batch arrived).
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

Mark = Any
Row = dict[str, Any]
"""One step's columns, as `steps.parquet` has them; a column that does not apply is left out"""

RANGES = ("load_wait", "host_to_device", "forward", "loss", "backward", "optimizer")
"""the parts of a step, in order, as profilers are told of them"""

PHASES = tuple(f"{name}_s" for name in RANGES)
"""their columns; together they are step_s"""

HOLD_MARGIN_S = 5e-3
"""how much longer than the host took to issue a phase before the device is held, at the least"""


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


@dataclass
class StepMarks:
    """What one instrumented step leaves behind: marks in the order of PHASES, and host facts."""

    marks: list[Mark] = field(default_factory=list)
    host_stamps_s: list[float] = field(default_factory=list)
    host_load_s: float = 0.0
    host_transfer_s: float | None = None
    host_to_device_bytes: int | None = None
    previous_step_done: bool | None = None
    loss: torch.Tensor | None = None


Annotate = Callable[[str], AbstractContextManager[Any]]
"""names what runs inside to a profiler"""

Step = Callable[[Any, Callable[[], None]], tuple[torch.Tensor, int | None]]
"""`step(batch, mark)` trains one step and calls `mark` after the copy, the forward pass, the loss, the backward pass and
the optimizer; it gives the detached loss and the bytes that it copied to the device (None: nothing to copy)"""


def no_mark() -> None:
    """The mark of a window without instruments."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Python's collector, whose pauses hit ranks at different times, runs before the window and not in it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def plain_window(
    step: Step, batches: Iterator[Any], steps: int, clock: Clock, barrier: Callable[[], None]
) -> tuple[float, list[torch.Tensor]]:
    """Wall seconds of `steps` bare steps, the device synchronised at both ends, and each step's loss, still unread."""
    losses = []
    clock.synchronize()
    barrier()
    begin_s = time.perf_counter()
    for _ in range(steps):
        loss, _bytes = step(next(batches), no_mark)
        losses.append(loss)
    clock.synchronize()
    return time.perf_counter() - begin_s, losses


def phase_window(
    step: Step,
    batches: Iterator[Any],
    steps: int,
    clock: Clock,
    barrier: Callable[[], None],
    *,
    wait_for_copy: bool = False,
) -> tuple[float, list[StepMarks]]:
    """Wall seconds of `steps` instrumented, free-running steps and their marks. Nothing synchronises inside.

    wait_for_copy: but after each copy to the device the host waits for it, as many training scripts do.
    """
    kept = []
    clock.synchronize()
    barrier()
    begin_s = time.perf_counter()
    end_of_step = clock.mark()
    for _ in range(steps):
        taken = StepMarks(marks=[end_of_step])
        next_range = ranges(RANGES, clock.annotate)
        load_began_s = time.perf_counter()
        batch = next(batches)
        copy_began_s = time.perf_counter()
        taken.host_load_s = copy_began_s - load_began_s
        taken.marks.append(clock.mark())
        next_range()

        def mark() -> None:
            taken.marks.append(clock.mark())  # noqa: B023
            if len(taken.marks) == 3:  # noqa: B023 - the copy is issued
                if wait_for_copy:
                    clock.synchronize()
                taken.host_transfer_s = time.perf_counter() - copy_began_s  # noqa: B023
            next_range()  # noqa: B023

        taken.loss, taken.host_to_device_bytes = step(batch, mark)
        taken.previous_step_done = clock.passed(end_of_step)
        end_of_step = taken.marks[-1]
        kept.append(taken)
    clock.synchronize()
    return time.perf_counter() - begin_s, kept


def ranges(names: Sequence[str], annotate: Annotate) -> Callable[[], None]:
    """Begins a range of the first name; each call ends the current one and begins the next, if there is one."""
    left = iter(names)
    current = annotate(next(left))
    current.__enter__()

    def advance() -> None:
        nonlocal current
        current.__exit__(None, None, None)
        name = next(left, None)
        if name is not None:
            current = annotate(name)
            current.__enter__()

    return advance


def step_window(
    step: Step,
    batches: Iterator[Any],
    around: Sequence[Callable[[], AbstractContextManager[Any]]],
    clock: Clock,
    barrier: Callable[[], None],
    annotate: Annotate | None = None,
) -> tuple[float, list[StepMarks]]:
    """Wall seconds of free-running steps, one for each of `around`, in whose context it runs; two marks for each.

    `annotate` names the step's parts to a profiler (None: the clock's own ranges).
    """
    kept = []
    annotate = annotate or clock.annotate
    clock.synchronize()
    barrier()
    begin_s = time.perf_counter()
    end_of_step = clock.mark()
    for context in around:
        taken = StepMarks(marks=[end_of_step])
        with annotate("step"), context():
            next_range = ranges(RANGES, annotate)
            batch = next(batches)
            next_range()
            taken.loss, _bytes = step(batch, next_range)
        end_of_step = clock.mark()
        taken.marks.append(end_of_step)
        kept.append(taken)
    clock.synchronize()
    return time.perf_counter() - begin_s, kept


def issue_window(step: Step, batches: Iterator[Any], steps: int, clock: Clock) -> list[StepMarks]:
    """Single steps, each issued onto an idle device: host stamps tell the time to issue, marks what the device took.

    In free running the launch queue fills up and the time to issue converges to the device's; only an idle device
    tells the two apart.
    """
    kept = []
    for _ in range(steps):
        taken = StepMarks()
        batch = next(batches)
        clock.synchronize()

        def mark() -> None:
            taken.host_stamps_s.append(time.perf_counter())  # noqa: B023
            taken.marks.append(clock.mark())  # noqa: B023

        mark()
        taken.loss, taken.host_to_device_bytes = step(batch, mark)
        kept.append(taken)
    clock.synchronize()
    return kept


def busy_window(step: Step, batches: Iterator[Any], steps: int, clock: CudaClock, hold_s: float) -> list[StepMarks]:
    """Single steps, each phase issued onto a device that is held until the host is done, so that its kernels then run
    without a gap: what the device itself needs.

    Marks come in pairs, begin and end of each phase. A phase that the host did not finish issuing within `hold_s`
    (too many kernels for the launch queue, say) would contain the host's time: its pair is None.
    """
    kept = []
    for _ in range(steps):
        taken = StepMarks()
        batch = next(batches)
        begin = held = clock.mark()

        def mark() -> None:
            nonlocal begin, held
            still_held = not clock.passed(held)
            taken.marks.append((begin, clock.mark()) if still_held else None)  # noqa: B023
            clock.synchronize()
            begin = held = clock.hold(hold_s)

        clock.synchronize()
        begin = held = clock.hold(hold_s)
        taken.loss, _bytes = step(batch, mark)
        kept.append(taken)
    clock.synchronize()
    return kept


def busy_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `busy_window`: seconds of device work in each phase after the copy."""
    pairs = taken.marks[1:]
    return {name: clock.seconds(*pair) for name, pair in zip(PHASES[2:], pairs, strict=True) if pair is not None}


def step_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `step_window`."""
    return {"step_s": clock.seconds(taken.marks[0], taken.marks[1])}


def account_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `step_window` whose third mark is that of the last local gradient."""
    return step_row(taken, clock) | {"last_gradient_s": clock.seconds(taken.marks[0], taken.marks[2])}


def phase_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `phase_window`. Call it when the device has passed all marks."""
    row = _spans(PHASES, taken, clock)
    row["host_load_s"] = taken.host_load_s
    row["host_transfer_s"] = None if taken.host_to_device_bytes is None else taken.host_transfer_s
    row["previous_step_done"] = taken.previous_step_done
    return row


def issue_row(taken: StepMarks, clock: Clock) -> Row:
    """The columns of one step of `issue_window`: device spans as in `phase_row`, and `*_launch_s` of the host."""
    row = _spans(PHASES[1:], taken, clock)
    stamps_s = taken.host_stamps_s
    for name, (first_s, second_s) in zip(PHASES[2:], pairwise(stamps_s[1:]), strict=True):
        row[name.removesuffix("_s") + "_launch_s"] = second_s - first_s
    row["step_launch_s"] = stamps_s[-1] - stamps_s[0]
    return row


def _spans(phases: tuple[str, ...], taken: StepMarks, clock: Clock) -> Row:
    """Seconds of each phase, which add up to `step_s`.

    Where nothing was copied there is no copy to time: it is null, and the gap between its two marks is the forward
    pass's.
    """
    marks = list(taken.marks)
    row: Row = {"host_to_device_bytes": taken.host_to_device_bytes}
    if taken.host_to_device_bytes is None:
        del marks[phases.index("host_to_device_s") + 1]
        phases = tuple(name for name in phases if name != "host_to_device_s")
        row["host_to_device_s"] = None
    row |= {name: clock.seconds(first, second) for name, (first, second) in zip(phases, pairwise(marks), strict=True)}
    row["step_s"] = clock.seconds(marks[0], marks[-1])
    return row
