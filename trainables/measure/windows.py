"""The windows of a trial: each runs some steps and keeps the marks that its instruments set, and no others."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

from trainables.step.timing import Annotate, Clock, CudaClock, Mark, Step, StepMarks, StepOutput, no_mark, ranges

HOLD_MARGIN_S = 5e-3
"""how much longer than the host took to issue a phase before the device is held, at the least"""


def plain_window(
    step: Step, batches: Iterator[Any], steps: int, clock: Clock, barrier: Callable[[], None]
) -> tuple[float, list[StepOutput]]:
    """Wall seconds of `steps` bare steps, the device synchronised at both ends, and what each gave, still unread."""
    given = []
    clock.synchronize()
    barrier()
    begin_s = time.perf_counter()
    for _ in range(steps):
        given.append(step(next(batches), no_mark))
    clock.synchronize()
    return time.perf_counter() - begin_s, given


class Block(NamedTuple):
    """A part of a plain window: its seconds, what its steps gave, and what untimed steps right before it gave."""

    seconds: float
    given: Sequence[StepOutput]
    lead_in: Sequence[StepOutput] = ()

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.given)


def plain_blocks(
    step: Step,
    batches: Iterator[Any],
    lengths: Sequence[int],
    clock: Clock,
    barrier: Callable[[], None],
    enough: Callable[[Sequence[float]], bool],
) -> list[Block]:
    """Blocks of bare steps, each a plain window.

    After each block `enough` is asked, with the seconds of a step in each block so far, whether to end. Between blocks the
    device is idle and nothing is timed; loaders go on.
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
    """Blocks of bare steps, each timed between two marks of the clock.

    `runs`: steps of each block, by the runs in which they follow one another without a pause; after each run `enough` is
    asked, with the seconds of a step in each block so far, whether to end. Only then is the device idle. A step that is not
    timed comes before each run: its first mark lies where the device is as busy as at all others, and no block pays for a
    start, as a `plain_window` does.
    """
    blocks: list[Block] = []
    for lengths in runs:
        clock.synchronize()
        barrier()
        lead_in = [step(next(batches), no_mark)]
        marks, given = [clock.mark()], []
        for length in lengths:
            given.append([step(next(batches), no_mark) for _ in range(length)])
            marks.append(clock.mark())
        clock.synchronize()
        spans_s = [clock.seconds(first, second) for first, second in pairwise(marks)]
        before = [lead_in, *[[]] * (len(lengths) - 1)]
        blocks += map(Block, spans_s, given, before)
        if enough([block.step_s for block in blocks]):
            break
    return blocks


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
        kept.append(_phase_step(step, batches, clock, end_of_step, wait_for_copy))
        end_of_step = kept[-1].end
    clock.synchronize()
    return time.perf_counter() - begin_s, kept


def _phase_step(step: Step, batches: Iterator[Any], clock: Clock, began: Mark, wait_for_copy: bool) -> StepMarks:
    taken = StepMarks(begin=began, parts=[("load_wait", began)])
    transfer_began_s: float | None = None
    with ranges(clock.annotate) as next_range:

        def begin(name: str) -> None:
            nonlocal transfer_began_s
            taken.parts.append((name, clock.mark()))
            if transfer_began_s is not None:
                if wait_for_copy:
                    clock.synchronize()
                taken.host_transfer_s = (taken.host_transfer_s or 0.0) + time.perf_counter() - transfer_began_s
            transfer_began_s = time.perf_counter() if name == "host_to_device" else None
            next_range(name)

        next_range("load_wait")
        load_began_s = time.perf_counter()
        batch = next(batches)
        taken.host_load_s = time.perf_counter() - load_began_s
        taken.given = step(batch, begin)
        taken.end = clock.mark()
    taken.previous_step_done = clock.passed(began)
    return taken


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
        taken = StepMarks(begin=end_of_step)
        with annotate("step"), context(), ranges(annotate) as next_range:
            next_range("load_wait")
            batch = next(batches)
            taken.given = step(batch, next_range)
        end_of_step = taken.end = clock.mark()
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
        batch = next(batches)
        clock.synchronize()
        kept.append(_issued_step(step, batch, clock))
    clock.synchronize()
    return kept


def _issued_step(step: Step, batch: Any, clock: Clock) -> StepMarks:
    taken = StepMarks()

    def begin(name: str) -> None:
        taken.host_stamps_s.append(time.perf_counter())
        taken.parts.append((name, clock.mark()))

    taken.given = step(batch, begin)
    taken.host_stamps_s.append(time.perf_counter())
    taken.begin, taken.end = taken.parts[0][1], clock.mark()
    if taken.given.parts is not None:
        clock.synchronize()
        taken.graph_parts = taken.given.parts()
    return taken


def busy_window(step: Step, batches: Iterator[Any], steps: int, clock: CudaClock, hold_s: float) -> list[StepMarks]:
    """Single steps, each part issued onto a device that is held until the host is done, so that its kernels then run
    without a gap: what the device itself needs.

    A part that the host did not finish issuing within `hold_s` (too many kernels for the launch queue, say) would
    contain the host's time: its end is None.
    """
    return [_busy_step(step, next(batches), clock, hold_s) for _ in range(steps)]


def _busy_step(step: Step, batch: Any, clock: CudaClock, hold_s: float) -> StepMarks:
    taken = StepMarks()
    held: tuple[str, Mark] | None = None

    def finish() -> None:
        if held is not None:
            name, until = held
            still_held = not clock.passed(until)
            taken.busy.append((name, until, clock.mark() if still_held else None))
        clock.synchronize()

    def begin(name: str) -> None:
        nonlocal held
        finish()
        held = (name, clock.hold(hold_s))

    taken.given = step(batch, begin)
    finish()
    return taken
