"""One rank's part of a trial: build, warm up, measure in separate windows, return every sample."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from trainables.data.loader import endless_batches, uses_prefetch
from trainables.measure.allreduce_sweep import all_reduce_sweep, sweep_sizes
from trainables.measure.communication import Account, bucket_bytes, bucket_rows, with_account
from trainables.measure.profiler import kineto
from trainables.measure.rows import Labelled, account_row, busy_row, issue_row, phase_row, step_row, step_rows
from trainables.measure.stopping import between_looks, block_lengths, doubling_lengths, loaders_kept_up, seen_enough
from trainables.measure.windows import (
    HOLD_MARGIN_S,
    busy_window,
    issue_window,
    phase_window,
    plain_blocks,
    steady_blocks,
    step_window,
)
from trainables.step.context import RankContext, RankOutput, RankSetup, rank_context
from trainables.step.cuda_graph import GraphClock
from trainables.step.process import drop_buckets, forget_peaks
from trainables.step.step import training_step
from trainables.step.timing import (
    Annotate,
    Begin,
    Clock,
    CudaClock,
    Row,
    Step,
    StepMarks,
    StepOutput,
    clock_for,
    without_garbage_collection,
)
from trainables.trial import Trial

ISSUE_STEPS, BUSY_STEPS, TRANSFER_STEPS, LEAST_STEPS = 10, 5, 10, 3
PROFILE_STEPS = 10
CAPTURED_WARMUP = 3
"""replays of a new CUDA graph before it is timed: the first one sends it to the device"""

INTERLEAVED = (True, False, False, True)
"""with and without communication, in an order that cancels a steady drift"""


Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""makes the context in which a step runs"""


@dataclass
class _Windows:
    """What the windows of a trial need beside the rank's context, and what they leave behind."""

    context: RankContext
    setup: RankSetup
    batches: Iterator[Any]
    delivered: list[torch.Tensor]
    """batches made so far by each of its loader processes, and by what works ahead; what there is none of is left out"""

    clock: Clock
    labelled: list[Labelled] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    device_peaks: list[int] | None = None
    energies: list[Any] = field(default_factory=list)

    def few(self, most: int) -> int:
        """Steps of a window that explains others: a trial of few long steps is not to spend its time in such windows."""
        return min(most, max(LEAST_STEPS, self.context.trial.steps))

    def keep(
        self, window: str, window_s: float | None, taken: list[StepMarks], row: Callable[[StepMarks, Clock], Row]
    ) -> None:
        for marks in taken:
            assert marks.given is not None
            self.labelled.append((window, window_s, marks.given, partial(row, marks, self.clock)))

    def wrapped(self, account: Account | None = None) -> nn.Module:
        """The model under the trial's parallel strategy, whose buckets `account` notes; made anew, it gives every rank
        rank 0's weights."""
        context = self.context
        model = context.strategy.wrapped(context.workload.model, context.trial, context.group, bare=account is not None)
        return model if account is None else with_account(model, account)

    def settled(self, step: Step, window: str) -> Step:
        """The step as the trial executes it, after the steps that it needs before it is timed."""
        trial, barrier = self.context.trial, self.context.barrier
        _, warmup = phase_window(step, self.batches, trial.settling_steps, self.clock, barrier)
        self.keep(window, None, warmup, phase_row)
        forget_peaks(self.context.devices)  # to choose, cuDNN ran its algorithms in workspaces that no later step needs
        if not trial.captured:
            return step
        captured = self.context.capture(step, next(self.batches))
        _, warmup = phase_window(captured, self.batches, CAPTURED_WARMUP, self.clock, barrier)
        self.keep(window, None, warmup, phase_row)
        return captured


def run(trial: Trial, setup: RankSetup) -> RankOutput:
    """Measure the trial's windows on this rank; every rank of the trial calls it.

    Returns the rows of steps.parquet, buckets.parquet and sweep.parquet.
    """
    with rank_context(trial, setup) as context:
        communicates = context.strategy.buckets and trial.world_size > 1 and trial.account_steps > 0
        distributed = context.distributed
        output = _timed_windows(context, setup, communicates)
        del context  # what its loaders and model hold must not reach into the next trial
        if distributed:
            drop_buckets(setup.group, setup.device)
        if communicates:
            output.tables["sweep"] = _sweep(trial, setup, output.tables["buckets"])
        return replace(output, span=(output.span[0], time.time()))


def _timed_windows(context: RankContext, setup: RankSetup, communicates: bool) -> RankOutput:
    """All windows of steps; the span ends with them."""
    trial, workload, device = context.trial, context.workload, context.device
    processes = 0 if workload.resident else trial.loader_workers
    delivered = torch.zeros(processes, dtype=torch.int64).share_memory_()
    made = torch.zeros(int(uses_prefetch(trial, workload)), dtype=torch.int64)
    batches = endless_batches(trial, workload, context.rank, delivered, made)
    ready = [each for each in (delivered, made) if len(each)]
    windows = _Windows(context, setup, batches, ready, clock_for(device))
    buckets: list[Row] = []
    sizes: list[int] = []
    trace = None
    with without_garbage_collection():
        windows.observations.append(setup.observe())
        began_at = time.time()
        model = windows.wrapped()
        peaks = _bare_windows(windows, model)
        if communicates:
            _interleaved_window(windows, model)
            sizes = bucket_bytes(model)
        del model
        gc.collect()  # the collector is off, and the second wrapper is made when the first is gone
        if context.distributed:
            drop_buckets(context.group, device)  # two sets of them would be memory that training does not need
        if communicates or trial.profile_ranks:
            buckets, trace = _explaining_windows(windows, sizes)
    rows = step_rows(windows.labelled, trial, context.rank, peaks)
    before, after = windows.energies
    evidence = context.evidence(windows.observations, windows.device_peaks, _flops(windows))
    return RankOutput(
        {"steps": rows, "buckets": buckets, "sweep": []},
        evidence | {"plain_window": {"before": before, "after": after}},
        (began_at, time.time()),
        trace,
    )


def _sweep(trial: Trial, setup: RankSetup, buckets: list[Row]) -> list[Row]:
    """The rows of sweep.parquet: all-reduces of the trial's sizes and of its buckets'."""
    sizes = sweep_sizes(trial.sweep_bytes, list(dict.fromkeys(row["bytes"] for row in buckets)))
    control = setup.control or setup.group
    with without_garbage_collection():
        return all_reduce_sweep(sizes, setup.rank, setup.device, setup.group, control, clock_for(setup.device))


def _flops(windows: _Windows) -> float | None:
    """Operations of a step of this rank."""
    if windows.context.device.type != "cuda":
        return None
    batch = next(windows.batches)
    inputs, _ = batch[0] if windows.context.trial.accumulation_steps > 1 else batch
    return windows.context.step_flops(inputs)


def _bare_windows(here: _Windows, model: nn.Module) -> dict[str, int | None]:
    """The windows of the wrapper that trains as a user's would; gives the peak memory of them, in bytes."""
    context, clock, batches = here.context, here.clock, here.batches
    trial, devices = context.trial, context.devices
    step = here.settled(training_step(context, model), "warmup")
    steps = _plain(here, step)
    phases_s, phases = phase_window(step, batches, min(steps, trial.steps), clock, context.barrier)
    here.observations.append(here.setup.observe())
    here.keep("phases", phases_s, phases, phase_row)
    peaks: dict[str, int | None] = {"peak_memory_bytes": None, "peak_reserved_bytes": None}
    if isinstance(clock, CudaClock):
        issued = issue_window(step, batches, here.few(ISSUE_STEPS), clock)
        here.keep("issue", None, issued, issue_row)
        here.device_peaks = [torch.cuda.max_memory_allocated(device) for device in devices]
        peaks = {
            "peak_memory_bytes": here.device_peaks[0],
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(context.device),
        }
        longest_s = max(b - a for taken in issued for a, b in pairwise(taken.host_stamps_s))
        hold_s = 2 * longest_s + HOLD_MARGIN_S
        if len(devices) == 1:  # one device is held, and others would run on
            with contextlib.nullcontext() if trial.captured else context.strategy.unsynchronised(model):
                here.keep("busy", None, busy_window(step, batches, here.few(BUSY_STEPS), clock, hold_s), busy_row)
        if not context.workload.resident:
            synced_s, synced = phase_window(
                step, batches, here.few(TRANSFER_STEPS), clock, context.barrier, wait_for_copy=True
            )
            here.keep("transfer_synced", synced_s, synced, phase_row)
    return peaks


def _plain(here: _Windows, step: Step) -> int:
    """The plain window, in blocks until they are enough; gives how many steps it had.

    Energy is read around all blocks together, with steps that lead in to some: a counter that moves every 100 ms tells one
    block's energy badly.
    """
    context, read_energy = here.context, here.setup.read_energy
    trial, width = context.trial, context.trial.median_width
    here.clock.synchronize()
    here.energies.append(read_energy(context.devices))
    if width:
        runs = between_looks(block_lengths(trial.least_window_steps, trial.window_steps))
        enough = partial(seen_enough, width, context.control, trial.processes > 1)
        blocks = steady_blocks(step, here.batches, runs, here.clock, context.barrier, enough)
    else:
        lengths = doubling_lengths(trial.steps, trial.window_steps if here.delivered else trial.steps)
        before = [int(each.sum()) for each in here.delivered]
        taken = [length * trial.accumulation_steps for length in lengths]
        enough = partial(loaders_kept_up, here.delivered, before, taken, context.control, trial.processes > 1)
        blocks = plain_blocks(step, here.batches, lengths, here.clock, context.barrier, enough)
    here.energies.append(read_energy(context.devices))
    window_s = sum(block.seconds for block in blocks)
    for block in blocks:
        here.labelled += [("lead_in", None, each, dict) for each in block.lead_in]
        read: Callable[[], Row] = partial(dict, block_s=block.seconds) if width else dict
        here.labelled += [("plain", window_s, each, read) for each in block.given]
    return sum(len(block.given) for block in blocks)


def _interleaved_window(here: _Windows, model: nn.Module) -> None:
    """Steps with and without gradient communication. The ranks' weights drift apart: nothing of this wrapper may follow."""
    context = here.context
    step = training_step(context, model)
    with_communication = list(islice(cycle(INTERLEAVED), 2 * context.trial.account_steps))
    apart = partial(context.strategy.unsynchronised, model)
    if context.trial.captured:
        step, around = _two_graphs(here, step, apart)
    else:
        around = {True: contextlib.nullcontext, False: apart}
    _, taken = step_window(
        step, here.batches, [around[kept] for kept in with_communication], here.clock, context.barrier
    )
    for marks, kept in zip(taken, with_communication, strict=True):
        here.keep("synchronised" if kept else "no_sync", None, [marks], step_row)


def _two_graphs(here: _Windows, step: Step, apart: Around) -> tuple[Step, dict[bool, Around]]:
    """A step that replays one of two graphs, and the contexts that choose the one with and the one without communication."""
    together = here.settled(step, "warmup")
    graphs = {True: together, False: here.context.capture(step, next(here.batches), apart)}
    chosen = True

    @contextlib.contextmanager
    def choose(kept: bool) -> Iterator[None]:
        nonlocal chosen
        chosen = kept
        yield

    def replay(batch: Any, begin: Begin) -> StepOutput:
        return graphs[chosen](batch, begin)

    return replay, {kept: partial(choose, kept) for kept in graphs}


def _explaining_windows(here: _Windows, sizes: list[int]) -> tuple[list[Row], bytes | None]:
    """The windows of a second wrapper: its hook notes every bucket, and a profiler watches the last of them.

    `sizes` are the first wrapper's buckets in bytes (empty: ranks do not communicate, and there is no hook). Gives the
    rows of buckets.parquet, and this rank's trace. Raises RuntimeError where the second wrapper has other buckets.

    A CUDA graph's hook ran when it was captured, and its marks are events of the graph: each replay overwrites them, so
    that here the steps of a graph run one by one, and each begins on an idle device.
    """
    context, clock = here.context, here.clock
    trial = context.trial
    account = Account(clock, context.group, context.strategy.gradient_type)
    model = here.wrapped(account if sizes else None)
    around: Around = account.step if sizes else contextlib.nullcontext
    step = training_step(context, model)
    buckets: list[Row] = []

    def window(name: str, steps: int, annotate: Annotate | None = None) -> None:
        window_s, taken = step_window(step, here.batches, [around] * steps, clock, context.barrier, annotate)
        timed_s = None if name == "account_warmup" else window_s
        noted(name, timed_s, taken)

    def noted(name: str, timed_s: float | None, taken: list[StepMarks]) -> None:
        first = len(here.labelled)
        if not sizes:
            here.keep(name, timed_s, taken, step_row)
            return
        for marks, last in zip(taken, account.last_gradients[-len(taken) :], strict=True):
            marks.last_gradient = last
        if not trial.captured:
            here.keep(name, timed_s, taken, account_row)
        elif name != "account_warmup":
            [row] = [account_row(marks, clock) for marks in taken]
            here.keep(name, None, taken, lambda *_: row)
        if name != "account_warmup":
            buckets.extend(bucket_rows(account, taken, name, context.rank, first, clock.seconds))

    def one_by_one(name: str, steps: int, annotate: Annotate | None = None) -> None:
        apart = steps if sizes and trial.captured else 1  # a replay of a graph overwrites what the one before left
        for _ in range(apart):
            window(name, steps // apart, annotate)

    window("account_warmup", trial.settling_steps)
    if trial.captured:
        account.clock = GraphClock(context.device)
        step, around = context.capture(step, next(here.batches), around), contextlib.nullcontext
        window("account_warmup", CAPTURED_WARMUP)
    if sizes:
        one_by_one("communication", trial.account_steps)
        if bucket_bytes(model) != sizes:
            raise RuntimeError(
                f"the account's wrapper has buckets of {bucket_bytes(model)} bytes, the plain one {sizes}"
            )
    if not trial.profile_ranks:
        return buckets, None
    with kineto(trial.profiles(context.rank), context.device) as trace:
        one_by_one("profile", PROFILE_STEPS, record_function)
    return buckets, trace.content
