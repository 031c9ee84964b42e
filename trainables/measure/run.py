"""Measure a trial on one rank: build, warm up, run separate windows, return the raw samples."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from trainables.clock import unix_s
from trainables.data.loader import endless_batches, uses_prefetch
from trainables.measure.allreduce_sweep import all_reduce_sweep, sweep_sizes
from trainables.measure.collectives import kernel_seconds, read_trace
from trainables.measure.communication import bucket_bytes
from trainables.measure.communication_windows import Recorded, interleaved_window, recorded_windows, traced_window
from trainables.measure.matmul_limit import matmul_limits
from trainables.measure.profiler import kineto
from trainables.measure.rows import LabelledStep, busy_row, issue_row, phase_row, step_rows
from trainables.measure.stopping import (
    block_lengths,
    blocks_between_checks,
    doubling_lengths,
    interval_is_narrow,
    loaders_kept_up,
)
from trainables.measure.trial_windows import TrialWindows
from trainables.measure.windows import (
    HOLD_MARGIN_S,
    busy_window,
    has_unknown_part,
    issue_window,
    phase_window,
    plain_and_phase_parts,
    plain_blocks,
    steady_blocks,
)
from trainables.registry import PARALLEL, PRECISIONS, load
from trainables.step.context import RankContext, RankOutput, RankSetup, rank_context
from trainables.step.precision import Precision
from trainables.step.process import drop_buckets, settings_for
from trainables.step.step import forward_pass, training_step
from trainables.step.timing import CudaClock, Row, Step, clock_for, no_mark, without_garbage_collection
from trainables.trial import Trial

ISSUE_STEPS, BUSY_STEPS, TRANSFER_STEPS, KERNEL_STEPS = 10, 5, 10, 2
LOADER_ROUNDS = 10
"""Batches per loader process in a phases window after a plain window at least as long.

Loader processes deliver their batches in bursts, of which a window of few rounds sees a part.
"""


def run(trial: Trial, setup: RankSetup) -> RankOutput:
    """Measure the trial's windows on this rank. Collective over the trial's ranks.

    Returns the rows of steps.parquet, buckets.parquet, collectives.parquet and sweep.parquet.
    """
    with rank_context(trial, setup) as context:
        distributed, has_buckets = context.distributed, context.strategy.buckets and _communicates(trial)
        output = _timed_windows(context, setup)
        del context  # frees the loaders and the model before the next trial
        if distributed:
            drop_buckets(setup.group, setup.device)
        if has_buckets:
            output.tables["sweep"] = _sweep(trial, setup, output.tables["buckets"])
        output = replace(output, span=(output.span[0], unix_s()))
    if setup.device.type == "cuda" and trial.communication_steps > 0:
        output.evidence["matmul_flops_per_s"] = _matmul_limits(trial, setup)
    return output


def _communicates(trial: Trial) -> bool:
    """Return True if the trial's communication is measured."""
    return trial.world_size > 1 and trial.communication_steps > 0


def _timed_windows(context: RankContext, setup: RankSetup) -> RankOutput:
    """Run all windows of steps. The span of the output ends with them."""
    trial, workload, device = context.trial, context.workload, context.device
    processes = 0 if workload.resident else trial.loader_workers
    delivered = torch.zeros(processes, dtype=torch.int64).share_memory_()
    prefetched = torch.zeros(int(uses_prefetch(trial, workload)), dtype=torch.int64)
    batches = endless_batches(trial, workload, context.rank, delivered, prefetched)
    sources = [counts for counts in (delivered, prefetched) if len(counts)]
    windows = TrialWindows(context, setup, batches, sources, clock_for(device), trial)
    communicates, facts = _communicates(trial), PARALLEL[trial.parallel]
    recorded = Recorded()
    sizes: list[int] = []
    with without_garbage_collection():
        windows.observations.append(setup.observe())
        started_at = unix_s()
        model = windows.wrap_model()
        peaks = _plain_wrapper_windows(windows, model)
        if communicates and context.strategy.buckets:
            interleaved_window(windows, model)
            sizes = bucket_bytes(model)
        if facts.sharded and (communicates or trial.profile_ranks):
            recorded = traced_window(windows, model, communicates)  # a sharded model cannot be wrapped a second time
        del model
        gc.collect()  # the collector is disabled, and the first wrapper must be freed before the second is created
        if context.distributed:
            drop_buckets(context.group, device)  # two sets of buckets would need more memory than training does
        if not facts.sharded and (sizes or trial.profile_ranks):
            recorded = recorded_windows(windows, sizes, communicates and facts.traced)
    rows = step_rows(windows.steps, trial, context.rank, peaks)
    before, after = windows.energies
    evidence = context.evidence(windows.observations, windows.device_peaks, _flops(windows))
    return RankOutput(
        {"steps": rows, "buckets": recorded.buckets, "collectives": recorded.collectives, "sweep": []},
        evidence | {"plain_window": {"before": before, "after": after}},
        (started_at, unix_s()),
        recorded.trace,
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


def _flops(windows: TrialWindows) -> float | None:
    """Return the operations of a step of this rank. None if unknown."""
    context = windows.context
    if context.device.type != "cuda":
        return None
    batch = next(windows.batches)
    forward = forward_pass(context, context.workload.model)
    part = batch[0] if context.trial.accumulation_steps > 1 else batch
    return context.step_flops(part, lambda part: forward(part, no_mark).loss)


def _plain_wrapper_windows(windows: TrialWindows, model: nn.Module) -> dict[str, int | None]:
    """Run the windows of the wrapper without recorder. Returns the columns of their peak memory, in bytes."""
    context, clock, batches = windows.context, windows.clock, windows.batches
    step = windows.warm_up(training_step(context, model))
    trial, devices = windows.trial, context.devices
    if context.device.type == "cpu" and not windows.delivered and not trial.median_width:
        _plain_and_phase_windows(windows, step)
    else:
        steps = min(_plain_window(windows, step), max(trial.steps, LOADER_ROUNDS * trial.loader_workers))
        phases_s, phases = phase_window(step, batches, steps, clock, context.barrier)
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
    # Only one device can be held; others would continue. Traced strategies wait for other ranks in every phase.
    if len(devices) == 1 and not (PARALLEL[trial.parallel].traced and _communicates(trial)):
        with contextlib.nullcontext() if trial.captured else context.strategy.unsynchronised(model):
            busy_marks = busy_window(step, batches, windows.diagnostic_steps(BUSY_STEPS), clock, hold_s)
            windows.add("busy", None, busy_marks, busy_row)
            if context.broadcast(has_unknown_part(busy_marks)):
                _add_traced_kernels(windows, step)
    if not context.workload.resident:
        synced_s, synced = phase_window(
            step, batches, windows.diagnostic_steps(TRANSFER_STEPS), clock, context.barrier, wait_for_copy=True
        )
        windows.add("transfer_synced", synced_s, synced, phase_row)
    return peaks


def _add_traced_kernels(windows: TrialWindows, step: Step) -> None:
    """Add steps to the busy window, whose kernels a trace times. It does not record the host, to be short."""
    context, count = windows.context, windows.diagnostic_steps(KERNEL_STEPS)
    with kineto(True, context.device, host=False) as trace:
        outputs = [step(next(windows.batches), no_mark) for _ in range(count)]
        windows.clock.synchronize()
    assert trace.content is not None
    seconds = kernel_seconds(read_trace(trace.content))
    row = {} if seconds is None else {"kernels_s": seconds / count}
    windows.steps += [LabelledStep("busy", None, output, lambda: row) for output in outputs]


def _produced(windows: TrialWindows) -> list[int]:
    """Return the batches that each source has produced, including those that its loader processes are working on.

    Loader processes that start together also finish together: in the first rounds, many batches arrive at once.
    """
    trial, produced = windows.trial, [int(counts.sum()) for counts in windows.delivered]
    if trial.loader_workers and produced:
        taken = produced[1] if len(produced) > 1 else len(windows.steps) * trial.accumulation_steps
        unfinished = trial.loader_workers * trial.prefetch_batches - (produced[0] - taken)
        produced[0] += min(max(unfinished, 0), trial.loader_workers)
    return produced


def _plain_and_phase_windows(windows: TrialWindows, step: Step) -> None:
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


def _plain_window(windows: TrialWindows, step: Step) -> int:
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
        before = _produced(windows)
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
