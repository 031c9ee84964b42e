"""Windows and rows, on a fake clock that only the test advances."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import pytest
import torch

from trainables.measure import windows
from trainables.measure.rows import busy_row, issue_row, phase_row, step_row
from trainables.measure.windows import (
    busy_window,
    has_unknown_part,
    issue_window,
    phase_window,
    plain_window,
    step_window,
)
from trainables.step import timing
from trainables.step.timing import PHASES, CpuClock, StartPart, Step, StepOutput, without_garbage_collection

PARTS = ("host_to_device", "forward", "loss", "backward", "optimizer")

LOAD_S, COPY_S, FORWARD_S, LOSS_S, BACKWARD_S, OPTIMIZER_S = 0.5, 0.25, 2.0, 0.125, 4.0, 1.0
STEP_S = COPY_S + FORWARD_S + LOSS_S + BACKWARD_S + OPTIMIZER_S
LAUNCH_S = 0.125
SYNCHRONIZE_S = 64.0
"""powers of two, so that their sums are exact"""


class Host:
    """A host clock that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 1024.0

    def perf_counter(self) -> float:
        return self.now_s


class DeviceClock:
    """A device that runs asynchronously to its host. A mark is the device's time."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.device_s = 0.0
        self.passed_marks: list[float] = []
        self.synchronizations = 0
        self.ranges: list[str] = []

    def mark(self) -> float:
        return self.device_s

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def passed(self, mark: float) -> bool:
        self.passed_marks.append(mark)
        return len(self.passed_marks) % 2 == 0

    def synchronize(self) -> None:
        self.synchronizations += 1
        self.host.now_s += SYNCHRONIZE_S

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return self._range(name)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self.ranges.append(f"{name} starts")
        yield
        self.ranges.append(f"{name} ends")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(windows, "perf_counter", host.perf_counter)
    return host


@pytest.fixture
def clock(host: Host) -> DeviceClock:
    return DeviceClock(host)


def step_on(clock: DeviceClock, copied_bytes: int | None = 512, times: int = 1) -> Step:
    """Return a step whose parts take known times on the device; the host issues each in LAUNCH_S.

    All parts but the optimizer run `times` times, as with gradient accumulation.
    """

    def step(batch: Any, start_part: StartPart) -> StepOutput:
        spans = dict(zip(PARTS, (COPY_S, FORWARD_S, LOSS_S, BACKWARD_S, OPTIMIZER_S), strict=True))
        names = [*PARTS[:-1]] * times + ["optimizer"]
        for name in names if copied_bytes else [name for name in names if name != "host_to_device"]:
            start_part(name)
            clock.device_s += spans[name]
            clock.host.now_s += LAUNCH_S
        return StepOutput(torch.tensor(float(batch)), copied_bytes)

    return step


def batches_on(clock: DeviceClock) -> Iterator[int]:
    """Yield batches 0, 1, 2 ... Each takes LOAD_S, during which the device is idle."""
    for number in range(1_000_000):
        clock.host.now_s += LOAD_S
        clock.device_s += LOAD_S
        yield number


def no_barrier() -> None: ...


# ------------------------------------------------------------------------------------------------------- windows


def test_a_plain_window_is_wall_time_between_two_synchronisations(host: Host, clock: DeviceClock) -> None:
    at_barrier: list[tuple[float, int]] = []
    wall_s, outputs = plain_window(
        step_on(clock), batches_on(clock), 5, clock, lambda: at_barrier.append((host.now_s, clock.synchronizations))
    )
    assert wall_s == 5 * (LOAD_S + 5 * LAUNCH_S) + SYNCHRONIZE_S
    assert [output.loss.item() for output in outputs] == [0, 1, 2, 3, 4]
    assert at_barrier == [(1024.0 + SYNCHRONIZE_S, 1)], "one barrier, before the window, with an idle device"
    assert clock.synchronizations == 2


def test_a_plain_window_records_no_marks(clock: DeviceClock) -> None:
    clock.mark = None  # type: ignore[assignment, method-assign]
    plain_window(step_on(clock), batches_on(clock), 2, clock, no_barrier)
    assert clock.passed_marks == []


def test_phases_are_exact_and_add_up_to_the_step(clock: DeviceClock) -> None:
    wall_s, window_marks = phase_window(step_on(clock), batches_on(clock), 3, clock, no_barrier)
    assert wall_s == 3 * (LOAD_S + 5 * LAUNCH_S) + SYNCHRONIZE_S
    assert clock.synchronizations == 2, "nothing synchronises inside the window"
    for number, marks in enumerate(window_marks):
        row = phase_row(marks, clock)
        assert row == {
            "load_wait_s": LOAD_S,
            "host_to_device_s": COPY_S,
            "forward_s": FORWARD_S,
            "loss_s": LOSS_S,
            "backward_s": BACKWARD_S,
            "optimizer_s": OPTIMIZER_S,
            "step_s": LOAD_S + STEP_S,
            "host_load_s": LOAD_S,
            "host_transfer_s": LAUNCH_S,
            "host_to_device_bytes": 512,
            "previous_step_done": number % 2 == 1,
        }
        assert marks.output is not None
        assert marks.output.loss.item() == number


def test_each_step_checks_whether_the_previous_one_was_done(clock: DeviceClock) -> None:
    phase_window(step_on(clock), batches_on(clock), 3, clock, no_barrier)
    ends = [number * (LOAD_S + STEP_S) for number in range(3)]
    assert clock.passed_marks == ends


def test_steps_of_a_phase_window_are_contiguous(clock: DeviceClock) -> None:
    _, window_marks = phase_window(step_on(clock), batches_on(clock), 4, clock, no_barrier)
    assert all(first.end == second.start for first, second in pairwise(window_marks))


def test_an_issue_window_separates_host_and_device_time(clock: DeviceClock) -> None:
    window_marks = issue_window(step_on(clock), batches_on(clock), 3, clock)
    assert clock.synchronizations == 4, "each step starts on an idle device, and rows are read from one"
    for marks in window_marks:
        assert issue_row(marks, clock) == {
            "host_to_device_s": COPY_S,
            "forward_s": FORWARD_S,
            "loss_s": LOSS_S,
            "backward_s": BACKWARD_S,
            "optimizer_s": OPTIMIZER_S,
            "step_s": STEP_S,
            "forward_launch_s": LAUNCH_S,
            "loss_launch_s": LAUNCH_S,
            "backward_launch_s": LAUNCH_S,
            "optimizer_launch_s": LAUNCH_S,
            "step_launch_s": 5 * LAUNCH_S,
            "host_to_device_bytes": 512,
        }


def test_waiting_for_the_copy_synchronises_once_per_step(clock: DeviceClock) -> None:
    _, window_marks = phase_window(step_on(clock), batches_on(clock), 3, clock, no_barrier, wait_for_copy=True)
    assert clock.synchronizations == 2 + 3
    assert {phase_row(marks, clock)["host_transfer_s"] for marks in window_marks} == {LAUNCH_S + SYNCHRONIZE_S}
    assert {phase_row(marks, clock)["host_to_device_s"] for marks in window_marks} == {COPY_S}


def test_profiler_ranges_are_the_parts_of_a_step_in_order(clock: DeviceClock) -> None:
    phase_window(step_on(clock), batches_on(clock), 1, clock, no_barrier)
    parts = [f"{name} {what}" for name in ("load_wait", *PARTS) for what in ("starts", "ends")]
    assert clock.ranges == parts
    clock.ranges.clear()
    step_window(step_on(clock), batches_on(clock), [nullcontext], clock, no_barrier)
    assert clock.ranges == ["step starts", *parts, "step ends"]


def test_a_step_window_times_each_step_in_its_context(clock: DeviceClock) -> None:
    seen: list[str] = []

    @contextmanager
    def context(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    contexts = [partial(context, name) for name in "abc"]
    wall_s, window_marks = step_window(step_on(clock), batches_on(clock), contexts, clock, no_barrier)
    assert seen == ["a", "b", "c"]
    assert wall_s == 3 * (LOAD_S + 5 * LAUNCH_S) + SYNCHRONIZE_S
    assert [step_row(marks, clock) for marks in window_marks] == 3 * [{"step_s": LOAD_S + STEP_S}]


class HoldingClock(DeviceClock):
    """A device that can be held, so that issued work waits for the end of the hold."""

    def __init__(self, host: Host, issued_in_time: Sequence[bool]) -> None:
        super().__init__(host)
        self.issued_in_time = iter(issued_in_time)
        self.held_s: list[float] = []

    def hold(self, seconds: float) -> float:
        self.held_s.append(seconds)
        self.device_s += seconds
        return self.mark()

    def passed(self, mark: float) -> bool:
        return not next(self.issued_in_time)


def test_busy_time_is_device_time_and_unknown_if_the_host_was_late(host: Host) -> None:
    in_time = [True, True, True, True, True] + [True, True, True, False, True]
    clock: Any = HoldingClock(host, in_time)
    window_marks = busy_window(step_on(clock), batches_on(clock), 2, clock, 8.0)
    expected = {"forward_s": FORWARD_S, "loss_s": LOSS_S, "backward_s": BACKWARD_S, "optimizer_s": OPTIMIZER_S}
    assert busy_row(window_marks[0], clock) == expected
    del expected["backward_s"]
    assert busy_row(window_marks[1], clock) == expected
    assert set(clock.held_s) == {8.0}
    assert not has_unknown_part(window_marks), "one of the two steps has it"
    assert has_unknown_part(window_marks[1:])


def test_repeated_parts_add_up(clock: DeviceClock) -> None:
    _, [marks] = phase_window(step_on(clock, times=3), batches_on(clock), 1, clock, no_barrier)
    [issued] = issue_window(step_on(clock, times=3), batches_on(clock), 1, clock)
    for row in (phase_row(marks, clock), issue_row(issued, clock)):
        assert row["forward_s"] == 3 * FORWARD_S
        assert row["optimizer_s"] == OPTIMIZER_S
        assert row["step_s"] == sum(row.get(name) or 0 for name in PHASES)
    assert phase_row(marks, clock)["host_transfer_s"] == 3 * LAUNCH_S
    assert issue_row(issued, clock)["backward_launch_s"] == 3 * LAUNCH_S


def test_parts_inside_a_graph_are_read_before_the_next_replay_overwrites_them(clock: DeviceClock) -> None:
    seconds = iter([1.0, 2.0])

    def replay(batch: Any, start_part: StartPart) -> StepOutput:
        start_part("graph")
        clock.device_s += STEP_S
        return StepOutput(torch.zeros(()), parts=lambda: {"forward_s": next(seconds)})

    rows = [issue_row(marks, clock) for marks in issue_window(replay, batches_on(clock), 2, clock)]
    assert [(row["graph_s"], row["forward_s"]) for row in rows] == [(STEP_S, 1.0), (STEP_S, 2.0)]
    _, window_marks = phase_window(replay, batches_on(clock), 3, clock, no_barrier)
    assert all("forward_s" not in phase_row(marks, clock) for marks in window_marks), (
        "in free running they cannot be read"
    )


def test_without_a_copy_its_columns_are_null(clock: DeviceClock) -> None:
    _, window_marks = phase_window(step_on(clock, None), batches_on(clock), 1, clock, no_barrier)
    issued = issue_window(step_on(clock, None), batches_on(clock), 1, clock)
    for row in (phase_row(window_marks[0], clock), issue_row(issued[0], clock)):
        assert row.get("host_to_device_s") is None
        assert row["host_to_device_bytes"] is None
        assert row["forward_s"] == FORWARD_S
        assert row.get("host_transfer_s") is None
        assert row["step_s"] == sum(row.get(name) or 0 for name in PHASES)


def test_cpu_marks_are_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter(range(1000))
    for module in (timing, windows):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(stamps)))
    clock = CpuClock()

    def step(batch: Any, start_part: StartPart) -> StepOutput:
        for name in PARTS[1:]:
            start_part(name)
        return StepOutput(torch.zeros(()))

    wall_s, [marks] = phase_window(step, repeat(None), 1, clock, no_barrier)
    # stamps: window start 0, step start 1, load 2 to 3, forward 4, loss 5, backward 6, optimizer 7, end 8
    assert wall_s == 9
    assert phase_row(marks, clock) == {
        "load_wait_s": 3,
        "forward_s": 1,
        "loss_s": 1,
        "backward_s": 1,
        "optimizer_s": 1,
        "step_s": 7,
        "host_load_s": 1,
        "host_transfer_s": None,
        "host_to_device_bytes": None,
        "previous_step_done": None,
    }


def test_parts_started_on_another_thread_have_marks_but_no_profiler_range(clock: DeviceClock) -> None:
    def step(batch: Any, start_part: StartPart) -> StepOutput:
        start_part("backward")
        other = threading.Thread(target=start_part, args=("reduce",))
        other.start()
        other.join()
        return StepOutput(torch.zeros(()))

    _, [marks] = phase_window(step, batches_on(clock), 1, clock, no_barrier)
    assert [name for name, _ in marks.parts] == ["load_wait", "backward", "reduce"]
    assert clock.ranges == ["load_wait starts", "load_wait ends", "backward starts", "backward ends"]


# ---------------------------------------------------------------------------------------------- garbage collector


def test_the_garbage_collector_is_disabled_only_in_a_window() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_garbage_collector_is_enabled_after_a_step_that_raises(clock: DeviceClock) -> None:
    def step(batch: Any, start_part: StartPart) -> StepOutput:
        assert not gc.isenabled()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), without_garbage_collection():
        plain_window(step, batches_on(clock), 1, clock, no_barrier)
    assert gc.isenabled()


def test_garbage_is_collected_before_a_window() -> None:
    class Kept:
        pass

    first = Kept()
    first.itself = first  # type: ignore[attr-defined]
    alive: list[int] = []
    left = weakref.ref(first, lambda _: alive.append(1))
    del first
    with without_garbage_collection():
        assert left() is None
    assert alive == [1]
