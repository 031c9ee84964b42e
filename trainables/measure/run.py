"""Measure a trial on one rank: build, warm up, run separate windows, return the raw samples."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from trainables.clock import unix_s
from trainables.data.loader import endless_batches, uses_prefetch
from trainables.measure.allreduce_sweep import all_reduce_sweep, sweep_sizes
from trainables.measure.communication import BucketRecorder, bucket_bytes, bucket_rows, record_buckets
from trainables.measure.matmul_limit import matmul_limits
from trainables.measure.profiler import kineto
from trainables.measure.rows import LabelledStep, busy_row, communication_row, issue_row, phase_row, step_row, step_rows
from trainables.measure.stopping import (
    block_lengths,
    blocks_between_checks,
    doubling_lengths,
    interval_is_narrow,
    loaders_kept_up,
)
from trainables.measure.windows import (
    HOLD_MARGIN_S,
    busy_window,
    interleaved_blocks,
    issue_window,
    phase_window,
    plain_and_phase_parts,
    plain_blocks,
    steady_blocks,
    step_window,
)
from trainables.registry import PRECISIONS, load
from trainables.step.context import RankContext, RankOutput, RankSetup, rank_context
from trainables.step.cuda_graph import GraphClock
from trainables.step.precision import Precision
from trainables.step.process import drop_buckets, reset_peak_memory, settings_for
from trainables.step.step import forward_pass, training_step
from trainables.step.timing import (
    Annotate,
    Clock,
    CudaClock,
    Row,
    StartPart,
    Step,
    StepMarks,
    StepOutput,
    clock_for,
    no_mark,
    without_garbage_collection,
)
from trainables.trial import Trial

ISSUE_STEPS, BUSY_STEPS, TRANSFER_STEPS, MIN_STEPS = 10, 5, 10, 3
PROFILE_STEPS = 10
CAPTURED_WARMUP = 3
"""untimed replays of a new CUDA graph; the first one uploads it to the device"""

StepContext = Callable[[], contextlib.AbstractContextManager[Any]]
"""creates the context in which a step runs"""


@dataclass
class _Windows:
    """State shared by the windows of a trial, and their results."""

    context: RankContext
    setup: RankSetup
    batches: Iterator[Any]
    delivered: list[torch.Tensor]
    """batches produced so far: per loader process, and by the prefetch thread; empty if there are neither"""

    clock: Clock
    trial: Trial
    """The trial; after the warm-up with the number of steps that its windows have."""

    steps: list[LabelledStep] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    device_peaks: list[int] | None = None
    energies: list[Any] = field(default_factory=list)

    def diagnostic_steps(self, maximum: int) -> int:
        """Return the steps of a diagnostic window: fewer than `maximum` if the trial itself has few steps."""
        return min(maximum, max(MIN_STEPS, self.trial.steps))

    def add(
        self, window: str, window_s: float | None, window_marks: list[StepMarks], row: Callable[[StepMarks, Clock], Row]
    ) -> None:
        for marks in window_marks:
            assert marks.output is not None
            self.steps.append(LabelledStep(window, window_s, marks.output, partial(row, marks, self.clock)))

    def wrap_model(self, recorder: BucketRecorder | None = None) -> nn.Module:
        """Wrap the model under the trial's parallel strategy, which broadcasts rank 0's weights."""
        context = self.context
        model = context.strategy.wrap_model(
            context.workload.model, context.trial, context.group, compression=recorder is None
        )
        if recorder is not None:
            record_buckets(model, recorder)
        return model

    def warm_up(self, step: Step) -> Step:
        """Run the untimed steps and return the step as the trial executes it, captured if it is a CUDA graph."""
        step_s = self._warm_up(step, self.trial.settling_steps)
        reset_peak_memory(self.context.devices)  # cuDNN's algorithm search uses workspaces that later steps do not need
        if self.trial.captured:
            step = self.context.capture(step, next(self.batches))
            step_s = self._warm_up(step, CAPTURED_WARMUP)
        if self.trial.window_limit_s:
            self.trial = self.context.broadcast(self.trial.shortened(step_s))
        return step

    def _warm_up(self, step: Step, steps: int) -> float:
        """Run at least two untimed steps and return the mean seconds of one in their second half."""
        _, marks = phase_window(step, self.batches, steps, self.clock, self.context.barrier)
        self.add("warmup", None, marks, phase_row)
        half = steps // 2
        return self.clock.seconds(marks[half - 1].end, marks[-1].end) / (steps - half)


def run(trial: Trial, setup: RankSetup) -> RankOutput:
    """Measure the trial's windows on this rank. Collective over the trial's ranks.

    Returns the rows of steps.parquet, buckets.parquet and sweep.parquet.
    """
    with rank_context(trial, setup) as context:
        communicates = context.strategy.buckets and trial.world_size > 1 and trial.communication_steps > 0
        distributed = context.distributed
        output = _timed_windows(context, setup, communicates)
        del context  # frees the loaders and the model before the next trial
        if distributed:
            drop_buckets(setup.group, setup.device)
        if communicates:
            output.tables["sweep"] = _sweep(trial, setup, output.tables["buckets"])
        output = replace(output, span=(output.span[0], unix_s()))
    if setup.device.type == "cuda" and trial.communication_steps > 0:
        output.evidence["matmul_flops_per_s"] = _matmul_limits(trial, setup)
    return output


def _timed_windows(context: RankContext, setup: RankSetup, communicates: bool) -> RankOutput:
    """Run all windows of steps. The span of the output ends with them."""
    trial, workload, device = context.trial, context.workload, context.device
    processes = 0 if workload.resident else trial.loader_workers
    delivered = torch.zeros(processes, dtype=torch.int64).share_memory_()
    prefetched = torch.zeros(int(uses_prefetch(trial, workload)), dtype=torch.int64)
    batches = endless_batches(trial, workload, context.rank, delivered, prefetched)
    sources = [counts for counts in (delivered, prefetched) if len(counts)]
    windows = _Windows(context, setup, batches, sources, clock_for(device), trial)
    buckets: list[Row] = []
    sizes: list[int] = []
    trace = None
    with without_garbage_collection():
        windows.observations.append(setup.observe())
        started_at = unix_s()
        model = windows.wrap_model()
        peaks = _plain_wrapper_windows(windows, model)
        if communicates:
            _interleaved_window(windows, model)
            sizes = bucket_bytes(model)
        del model
        gc.collect()  # the collector is disabled, and the first wrapper must be freed before the second is created
        if context.distributed:
            drop_buckets(context.group, device)  # two sets of buckets would need more memory than training does
        if communicates or trial.profile_ranks:
            buckets, trace = _recorded_windows(windows, sizes)
    rows = step_rows(windows.steps, trial, context.rank, peaks)
    before, after = windows.energies
    evidence = context.evidence(windows.observations, windows.device_peaks, _flops(windows))
    return RankOutput(
        {"steps": rows, "buckets": buckets, "sweep": []},
        evidence | {"plain_window": {"before": before, "after": after}},
        (started_at, unix_s()),
        trace,
    )


def _matmul_limits(trial: Trial, setup: RankSetup) -> dict[str, float]:
    """Return the matmul limit of this rank's device, after the trial has freed its memory."""
    precision: Precision = load(PRECISIONS[trial.precision])
    with settings_for(trial, precision), without_garbage_collection():
        return matmul_limits(setup.device, precision)


def _sweep(trial: Trial, setup: RankSetup, buckets: list[Row]) -> list[Row]:
    """Return the rows of sweep.parquet, for the trial's message sizes and its bucket sizes."""
    sizes = sweep_sizes(trial.sweep_bytes, list(dict.fromkeys(row["bytes"] for row in buckets)))
    control = setup.control or setup.group
    with without_garbage_collection():
        return all_reduce_sweep(sizes, setup.rank, setup.device, setup.group, control, clock_for(setup.device))


def _flops(windows: _Windows) -> float | None:
    """Return the operations of a step of this rank. None if unknown."""
    context = windows.context
    if context.device.type != "cuda":
        return None
    batch = next(windows.batches)
    forward = forward_pass(context, context.workload.model)
    part = batch[0] if context.trial.accumulation_steps > 1 else batch
    return context.step_flops(part, lambda part: forward(part, no_mark).loss)


def _plain_wrapper_windows(windows: _Windows, model: nn.Module) -> dict[str, int | None]:
    """Run the windows of the wrapper without recorder. Returns the columns of their peak memory, in bytes."""
    context, clock, batches = windows.context, windows.clock, windows.batches
    step = windows.warm_up(training_step(context, model))
    trial, devices = windows.trial, context.devices
    if context.device.type == "cpu" and not windows.delivered and not trial.median_width:
        _plain_and_phase_windows(windows, step)
    else:
        steps = _plain_window(windows, step)
        phases_s, phases = phase_window(step, batches, min(steps, trial.steps), clock, context.barrier)
        windows.add("phases", phases_s, phases, phase_row)
    windows.observations.append(windows.setup.observe())
    if not isinstance(clock, CudaClock):
        return {"peak_memory_bytes": None, "peak_reserved_bytes": None}
    issue_marks = issue_window(step, batches, windows.diagnostic_steps(ISSUE_STEPS), clock)
    windows.add("issue", None, issue_marks, issue_row)
    windows.device_peaks = [torch.cuda.max_memory_allocated(device) for device in devices]
    peaks: dict[str, int | None] = {
        "peak_memory_bytes": windows.device_peaks[0],
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(context.device),
    }
    longest_s = max(b - a for marks in issue_marks for a, b in pairwise(marks.host_stamps_s))
    hold_s = 2 * longest_s + HOLD_MARGIN_S
    if len(devices) == 1:  # only one device can be held; others would continue
        with contextlib.nullcontext() if trial.captured else context.strategy.unsynchronised(model):
            busy_marks = busy_window(step, batches, windows.diagnostic_steps(BUSY_STEPS), clock, hold_s)
            windows.add("busy", None, busy_marks, busy_row)
    if not context.workload.resident:
        synced_s, synced = phase_window(
            step, batches, windows.diagnostic_steps(TRANSFER_STEPS), clock, context.barrier, wait_for_copy=True
        )
        windows.add("transfer_synced", synced_s, synced, phase_row)
    return peaks


def _plain_and_phase_windows(windows: _Windows, step: Step) -> None:
    """Run the plain and the phases window in turn, in parts.

    Not on GPUs, whose energy counter is too coarse for parts, nor with loaders, which refill their queues meanwhile.
    """
    context, read_energy = windows.context, windows.setup.read_energy
    windows.energies.append(read_energy(context.devices))
    parts = plain_and_phase_parts(step, windows.batches, windows.trial.steps, windows.clock, context.barrier)
    windows.energies.append(read_energy(context.devices))
    plain_s = sum(part.seconds for part in parts if part.outputs)
    phases_s = sum(part.seconds for part in parts if part.marks)
    for part in parts:
        windows.steps += [LabelledStep("plain", plain_s, output, dict) for output in part.outputs]
        windows.add("phases", phases_s, list(part.marks), phase_row)


def _plain_window(windows: _Windows, step: Step) -> int:
    """Run the plain window in blocks until they are enough. Returns the number of steps.

    Energy is read once around all blocks, including lead-in steps. A counter that is updated every 100 ms is too coarse
    for a single block.
    """
    context, read_energy = windows.context, windows.setup.read_energy
    trial, width = windows.trial, windows.trial.median_width
    windows.clock.synchronize()
    windows.energies.append(read_energy(context.devices))
    if width:
        runs = blocks_between_checks(block_lengths(trial.min_window_steps, trial.window_steps))
        enough = partial(interval_is_narrow, width, context.control, trial.processes > 1)
        blocks = steady_blocks(step, windows.batches, runs, windows.clock, context.barrier, enough)
    else:
        lengths = doubling_lengths(trial.steps, trial.window_steps if windows.delivered else trial.steps)
        before = [int(counts.sum()) for counts in windows.delivered]
        consumed = [length * trial.accumulation_steps for length in lengths]
        enough = partial(loaders_kept_up, windows.delivered, before, consumed, context.control, trial.processes > 1)
        blocks = plain_blocks(step, windows.batches, lengths, windows.clock, context.barrier, enough)
    windows.energies.append(read_energy(context.devices))
    window_s = sum(block.seconds for block in blocks)
    for block in blocks:
        windows.steps += [LabelledStep("lead_in", None, output, dict) for output in block.lead_in]
        read_columns: Callable[[], Row] = partial(dict, block_s=block.seconds) if width else dict
        windows.steps += [LabelledStep("plain", window_s, output, read_columns) for output in block.outputs]
    return sum(len(block.outputs) for block in blocks)


def _interleaved_window(windows: _Windows, model: nn.Module) -> None:
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


def _two_graphs(windows: _Windows, step: Step, no_sync: StepContext) -> tuple[Step, dict[bool, StepContext]]:
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


def _recorded_windows(windows: _Windows, sizes: list[int]) -> tuple[list[Row], bytes | None]:
    """Run the windows of a second wrapper, whose hook records every bucket; the last window is also profiled.

    `sizes`: bytes of the first wrapper's buckets; empty if ranks do not communicate, and no hook is registered. Returns
    the rows of buckets.parquet and this rank's trace. Raises RuntimeError if the second wrapper has different buckets.

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
    if not trial.profile_ranks:
        return buckets, None
    with kineto(trial.profiles(context.rank), context.device) as trace:
        run_recorded("profile", PROFILE_STEPS, record_function)
    return buckets, trace.content
