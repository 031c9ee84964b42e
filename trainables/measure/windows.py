"""The windows of a trial. Each runs some steps with its own instrumentation and returns their marks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from trainables.clock import perf_counter
from trainables.step.timing import Annotate, Clock, CudaClock, Mark, Step, StepMarks, StepOutput, no_mark, ranges

HOLD_MARGIN_S = 5e-3
"""minimum time by which the device is held longer than the host needs to issue a phase"""

PLAIN_PARTS = 3


def plain_window(
    step: Step, batches: Iterator[Any], steps: int, clock: Clock, barrier: Callable[[], None]
) -> tuple[float, list[StepOutput]]:
    """Run `steps` uninstrumented steps, synchronised at both ends. Returns wall seconds and the outputs."""
    outputs = []
    clock.synchronize()
    barrier()
    start_s = perf_counter()
    for _ in range(steps):
        outputs.append(step(next(batches), no_mark))
    clock.synchronize()
    return perf_counter() - start_s, outputs


class Block(NamedTuple):
    """A part of a plain window: its seconds, the outputs of its steps, and those of untimed steps right before it."""

    seconds: float
    outputs: Sequence[StepOutput]
    lead_in: Sequence[StepOutput] = ()

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.outputs)


def plain_blocks(
    step: Step,
    batches: Iterator[Any],
    lengths: Sequence[int],
    clock: Clock,
    barrier: Callable[[], None],
    enough: Callable[[Sequence[float]], bool],
) -> list[Block]:
    """Run blocks of uninstrumented steps, each a plain window, until `enough`.

    `enough` is called after each block with the seconds per step of each block so far. Between blocks the device is
    idle while loaders continue; this time is not measured.
    """
    blocks: list[Block] = []
    for length in lengths:
        blocks.append(Block(*plain_window(step, batches, length, clock, barrier)))
        if enough([block.step_s for block in blocks]):
            break
    return blocks


def steady_blocks(
    step: Step,
    batches: Iterator[Any],
    runs: Sequence[Sequence[int]],
    clock: Clock,
    barrier: Callable[[], None],
    enough: Callable[[Sequence[float]], bool],
) -> list[Block]:
    """Run blocks of uninstrumented steps, each timed between two clock marks, until `enough`.

    `runs` contains the steps per block, grouped into runs of blocks without a pause. `enough` is called after each run
    with the seconds per step of each block so far; the device is idle only then. An untimed step precedes each run, so
    that the device is as busy at its first mark as at all others. Blocks thus exclude the start-up cost that a
    `plain_window` includes.
    """
    blocks: list[Block] = []
    for lengths in runs:
        clock.synchronize()
        barrier()
        lead_in = [step(next(batches), no_mark)]
        marks, outputs = [clock.mark()], []
        for length in lengths:
            outputs.append([step(next(batches), no_mark) for _ in range(length)])
            marks.append(clock.mark())
        clock.synchronize()
        seconds = [clock.seconds(first, second) for first, second in pairwise(marks)]
        lead_ins = [lead_in, *[[]] * (len(lengths) - 1)]
        blocks += map(Block, seconds, outputs, lead_ins)
        if enough([block.step_s for block in blocks]):
            break
    return blocks


def interleaved_blocks(steps: int) -> list[tuple[bool, int]]:
    """Return blocks of steps with (True) and without communication, `steps` of each.

    Their order cancels a linear drift.
    """
    blocks = [(True, steps - steps // 2), (False, steps), (True, steps // 2)]
    return [(communicates, count) for communicates, count in blocks if count]


def phase_window(
    step: Step,
    batches: Iterator[Any],
    steps: int,
    clock: Clock,
    barrier: Callable[[], None],
    *,
    wait_for_copy: bool = False,
) -> tuple[float, list[StepMarks]]:
    """Run `steps` steps with a mark per part, without synchronising in between. Returns wall seconds and the marks.

    With `wait_for_copy`, the host waits for each copy to the device, as many training scripts do.
    """
    window_marks = []
    clock.synchronize()
    barrier()
    start_s = perf_counter()
    end_of_step = clock.mark()
    for _ in range(steps):
        window_marks.append(_phase_step(step, batches, clock, end_of_step, wait_for_copy))
        end_of_step = window_marks[-1].end
    clock.synchronize()
    return perf_counter() - start_s, window_marks


class Part(NamedTuple):
    """A part of a plain window (`outputs`) or of a phases window (`marks`), and its seconds."""

    seconds: float
    outputs: Sequence[StepOutput] = ()
    marks: Sequence[StepMarks] = ()


def plain_and_phase_parts(
    step: Step, batches: Iterator[Any], steps: int, clock: Clock, barrier: Callable[[], None]
) -> list[Part]:
    """Run `steps` plain steps in up to `PLAIN_PARTS` parts, with as many phase steps between them. Returns the parts.

    The noise of a shared host lasts longer than a window of a second. The same number of steps, spread over the trial,
    has a mean that varies less.
    """
    count = min(PLAIN_PARTS, steps)
    parts: list[Part] = []
    for plain_steps, phase_steps in zip_longest(_equal_parts(steps, count), _equal_parts(steps, max(1, count - 1))):
        plain_s, outputs = plain_window(step, batches, plain_steps, clock, barrier)
        parts.append(Part(plain_s, outputs=outputs))
        if phase_steps:
            phases_s, marks = phase_window(step, batches, phase_steps, clock, barrier)
            parts.append(Part(phases_s, marks=marks))
    return parts


def _equal_parts(steps: int, count: int) -> list[int]:
    """Return the steps of each part, which differ by at most one."""
    return [steps // count + (part < steps % count) for part in range(count)]


def _phase_step(step: Step, batches: Iterator[Any], clock: Clock, start: Mark, wait_for_copy: bool) -> StepMarks:
    marks = StepMarks(start=start, parts=[("load_wait", start)])
    transfer_start_s: float | None = None
    with ranges(clock.annotate) as next_range:

        def start_part(name: str) -> None:
            nonlocal transfer_start_s
            marks.parts.append((name, clock.mark()))
            if transfer_start_s is not None:
                if wait_for_copy:
                    clock.synchronize()
                marks.host_transfer_s = (marks.host_transfer_s or 0.0) + perf_counter() - transfer_start_s
            transfer_start_s = perf_counter() if name == "host_to_device" else None
            next_range(name)

        next_range("load_wait")
        load_start_s = perf_counter()
        batch = next(batches)
        marks.host_load_s = perf_counter() - load_start_s
        marks.output = step(batch, start_part)
        marks.end = clock.mark()
    marks.previous_step_done = clock.passed(start)
    return marks


def step_window(
    step: Step,
    batches: Iterator[Any],
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]],
    clock: Clock,
    barrier: Callable[[], None],
    annotate: Annotate | None = None,
) -> tuple[float, list[StepMarks]]:
    """Run one step per item of `contexts`, inside that context. Returns wall seconds and start and end marks.

    `annotate` creates a profiler range per part (None: the clock's ranges).
    """
    window_marks = []
    annotate = annotate or clock.annotate
    clock.synchronize()
    barrier()
    start_s = perf_counter()
    end_of_step = clock.mark()
    for context in contexts:
        marks = StepMarks(start=end_of_step)
        with annotate("step"), context(), ranges(annotate) as next_range:
            next_range("load_wait")
            batch = next(batches)
            marks.output = step(batch, next_range)
        end_of_step = marks.end = clock.mark()
        window_marks.append(marks)
    clock.synchronize()
    return perf_counter() - start_s, window_marks


def issue_window(step: Step, batches: Iterator[Any], steps: int, clock: Clock) -> list[StepMarks]:
    """Run single steps, each issued to an idle device. Host stamps measure the issue time, marks the device time.

    Without the pauses the launch queue fills up, and the issue time converges to the device time.
    """
    window_marks = []
    for _ in range(steps):
        batch = next(batches)
        clock.synchronize()
        window_marks.append(_issue_step(step, batch, clock))
    clock.synchronize()
    return window_marks


def _issue_step(step: Step, batch: Any, clock: Clock) -> StepMarks:
    marks = StepMarks()

    def start_part(name: str) -> None:
        marks.host_stamps_s.append(perf_counter())
        marks.parts.append((name, clock.mark()))

    marks.output = step(batch, start_part)
    marks.host_stamps_s.append(perf_counter())
    marks.start, marks.end = marks.parts[0][1], clock.mark()
    if marks.output.parts is not None:
        clock.synchronize()
        marks.graph_parts = marks.output.parts()
    return marks


def busy_window(step: Step, batches: Iterator[Any], steps: int, clock: CudaClock, hold_s: float) -> list[StepMarks]:
    """Run single steps and measure the pure device time of each part.

    The device is held until the host has issued a part, so that its kernels run without gaps. If issuing takes longer
    than `hold_s` (for example because the launch queue is full), the time would include host time, and the part's end
    is None.
    """
    return [_busy_step(step, next(batches), clock, hold_s) for _ in range(steps)]


def has_unknown_part(window_marks: Sequence[StepMarks]) -> bool:
    """Return True if a part after the copy has no device time in any step of a `busy_window`."""
    ends = [(name, end) for marks in window_marks for name, _, end in marks.busy if name != "host_to_device"]
    return bool({name for name, _ in ends} - {name for name, end in ends if end is not None})


def _busy_step(step: Step, batch: Any, clock: CudaClock, hold_s: float) -> StepMarks:
    marks = StepMarks()
    current: tuple[str, Mark] | None = None

    def finish() -> None:
        if current is not None:
            name, release = current
            still_held = not clock.passed(release)
            marks.busy.append((name, release, clock.mark() if still_held else None))
        clock.synchronize()

    def start_part(name: str) -> None:
        nonlocal current
        finish()
        current = (name, clock.hold(hold_s))

    marks.output = step(batch, start_part)
    finish()
    return marks
