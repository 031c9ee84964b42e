"""The windows that measure communication: with and without it, with a hook per bucket, and under a profiler."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn
from torch.profiler import record_function

from trainables.measure.collectives import BOUNDARY, read_trace, trace_rows
from trainables.measure.communication import BucketRecorder, bucket_bytes, bucket_rows
from trainables.measure.profiler import kineto
from trainables.measure.rows import communication_row, step_row
from trainables.measure.trial_windows import CAPTURED_WARMUP, TrialWindows
from trainables.measure.windows import interleaved_blocks, step_window
from trainables.step.cuda_graph import GraphClock
from trainables.step.step import training_step
from trainables.step.timing import Annotate, Row, StartPart, Step, StepMarks, StepOutput
from trainables.trial import Trial

PROFILE_STEPS = 10

StepContext = Callable[[], contextlib.AbstractContextManager[Any]]
"""creates the context in which a step runs"""


def interleaved_window(windows: TrialWindows, model: nn.Module) -> None:
    """Run steps with and without gradient communication.

    Ranks drift apart in steps without communication, and a host runs ahead of a device that waits for gradients. A
    barrier therefore separates the blocks, and the first step after it is not counted. Otherwise a step would pay for
    the lateness of ranks in the block before.

    The ranks' weights diverge, so the wrapper must not be used afterwards.
    """
    context = windows.context
    step = training_step(context, model)
    no_sync = partial(context.strategy.unsynchronised, model)
    if context.trial.captured:
        step, contexts = _two_graphs(windows, step, no_sync)
    else:
        contexts = {True: contextlib.nullcontext, False: no_sync}
    for communicates, count in interleaved_blocks(windows.trial.communication_steps):
        block = [contexts[communicates]] * (1 + count)
        _, window_marks = step_window(step, windows.batches, block, windows.clock, context.barrier)
        windows.add("lead_in", None, window_marks[:1], step_row)
        windows.add("synchronised" if communicates else "no_sync", None, window_marks[1:], step_row)


def _two_graphs(windows: TrialWindows, step: Step, no_sync: StepContext) -> tuple[Step, dict[bool, StepContext]]:
    """Capture the step with and without communication.

    Returns a step that replays one of the two graphs, and the contexts that select the graph: with communication under
    True, without under False.
    """
    synchronised = windows.warm_up(step)
    graphs = {True: synchronised, False: windows.context.capture(step, next(windows.batches), no_sync)}
    selected = True

    @contextlib.contextmanager
    def select(communicates: bool) -> Iterator[None]:
        nonlocal selected
        selected = communicates
        yield

    def replay(batch: Any, start_part: StartPart) -> StepOutput:
        return graphs[selected](batch, start_part)

    return replay, {communicates: partial(select, communicates) for communicates in graphs}


@dataclass(frozen=True)
class Recorded:
    """What the recorded windows of a rank have measured: rows of buckets.parquet and collectives.parquet, its trace."""

    buckets: list[Row] = field(default_factory=list)
    collectives: list[Row] = field(default_factory=list)
    trace: bytes | None = None


def recorded_windows(windows: TrialWindows, sizes: list[int], is_traced: bool) -> Recorded:
    """Run the windows of a second wrapper, whose hook records every bucket; the last window is also profiled.

    `sizes`: bytes of the first wrapper's buckets; empty if ranks do not communicate, and no hook is registered.
    `is_traced`: the strategy also communicates outside of the buckets, so every rank reads its trace. Raises
    RuntimeError if the second wrapper has different buckets.

    The hook of a CUDA graph runs only during the capture. Its marks are events of the graph, which each replay
    overwrites. The steps of a graph therefore run one by one, each starting on an idle device.
    """
    context, clock = windows.context, windows.clock
    trial = windows.trial
    recorder = BucketRecorder(clock, context.group, context.strategy.gradient_type)
    model = windows.wrap_model(recorder if sizes else None)
    step_context: StepContext = recorder.step if sizes else contextlib.nullcontext
    step = training_step(context, model)
    buckets: list[Row] = []

    def run_window(name: str, steps: int, annotate: Annotate | None = None) -> None:
        contexts = [step_context] * steps
        window_s, window_marks = step_window(step, windows.batches, contexts, clock, context.barrier, annotate)
        add_rows(name, None if name == "communication_warmup" else window_s, window_marks)

    def add_rows(name: str, window_s: float | None, window_marks: list[StepMarks]) -> None:
        first = len(windows.steps)
        if not sizes:
            windows.add(name, window_s, window_marks, step_row)
            return
        for marks, last in zip(window_marks, recorder.last_gradients[-len(window_marks) :], strict=True):
            marks.last_gradient = last
        if not trial.captured:
            windows.add(name, window_s, window_marks, communication_row)
        elif name != "communication_warmup":
            [row] = [communication_row(marks, clock) for marks in window_marks]
            windows.add(name, None, window_marks, lambda *_: row)
        if name != "communication_warmup":
            buckets.extend(bucket_rows(recorder, window_marks, name, context.rank, first, clock.seconds))

    def run_recorded(name: str, steps: int, annotate: Annotate | None = None) -> None:
        count = steps if sizes and trial.captured else 1  # one window per replay, which overwrites the marks
        for _ in range(count):
            run_window(name, steps // count, annotate)

    run_window("communication_warmup", trial.settling_steps)
    if trial.captured:
        recorder.clock = GraphClock(context.device)
        step, step_context = context.capture(step, next(windows.batches), step_context), contextlib.nullcontext
        run_window("communication_warmup", CAPTURED_WARMUP)
    if sizes:
        run_recorded("communication", trial.communication_steps)
        if bucket_bytes(model) != sizes:
            raise RuntimeError(
                f"the recorded wrapper has buckets of {bucket_bytes(model)} bytes, but the plain wrapper {sizes}"
            )
    if not (is_traced or trial.profile_ranks):
        return Recorded(buckets)
    return replace(_profile_window(windows, run_recorded, is_traced), buckets=buckets)


def traced_window(windows: TrialWindows, model: nn.Module, is_traced: bool) -> Recorded:
    """Run the profile window of a model that is wrapped already. `is_traced`: every rank reads its trace."""
    gc.collect()  # the optimizer of earlier windows, as the collector is disabled
    step = training_step(windows.context, model)

    def run_window(name: str, steps: int, annotate: Annotate | None = None) -> None:
        contexts = [contextlib.nullcontext] * steps
        barrier = windows.context.barrier
        window_s, marks = step_window(step, windows.batches, contexts, windows.clock, barrier, annotate)
        windows.add(name, None if name == "communication_warmup" else window_s, marks, step_row)

    run_window("communication_warmup", windows.trial.settling_steps)
    return _profile_window(windows, run_window, is_traced)


def _profile_window(
    windows: TrialWindows, run_window: Callable[[str, int, Annotate], None], is_traced: bool
) -> Recorded:
    """Run the profile window. The trace is returned on the ranks that the trial names."""
    trial, context = windows.trial, windows.context
    first, keeps_trace = len(windows.steps), trial.profiles(context.rank)
    with kineto(is_traced or keeps_trace, context.device) as trace:
        run_window("profile", trial.communication_steps if is_traced else PROFILE_STEPS, _profiler_range)
        _mark_boundary()
    if not is_traced:
        return Recorded(trace=trace.content)
    assert trace.content is not None
    numbers = range(first, len(windows.steps))
    rows = trace_rows(read_trace(trace.content), context.rank, numbers, "profile")
    windows.add_columns(rows.totals)
    collectives = [row | {"group": row["group"] or _gloo_group(trial, context.rank, row)} for row in rows.collectives]
    return Recorded([], collectives, trace.content if keeps_trace else None)


def _profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range of the profiler. Before a step, mark the boundary that `trace_rows` looks for."""
    if name == "step":
        _mark_boundary()
    return record_function(name)


def _mark_boundary() -> None:
    with record_function(BOUNDARY):
        pass


def _gloo_group(trial: Trial, rank: int, row: Row) -> str | None:
    """Return which ranks take part in a collective of hybrid sharding, because a trace of gloo does not say so."""
    if trial.parallel != "hsdp":
        return None
    copy, place = divmod(rank, trial.shard_group_ranks)
    return f"place {place} of the copies" if row["operation"] == "all_reduce" else f"copy {copy}"
