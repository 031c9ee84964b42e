"""One rank's part of a trial: build, warm up, measure in separate windows, return every sample."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from trainables.communication import Account, bucket_bytes, bucket_rows, with_account
from trainables.data.loader import endless_batches, works_ahead
from trainables.execution import GraphClock, capture, stream_for
from trainables.flops import step_flops
from trainables.parallel import Strategy
from trainables.precision import Precision
from trainables.process import drop_buckets, forget_peaks, settings_for
from trainables.profile import kineto
from trainables.registry import PARALLEL, PRECISIONS, TEXT_MODELS, load
from trainables.rows import Labelled, step_rows
from trainables.step import training_step
from trainables.stopping import between_looks, block_lengths, doubling_lengths, loaders_kept_up, seen_enough
from trainables.sweep import all_reduce_sweep, sweep_sizes
from trainables.timing import (
    Annotate,
    Begin,
    Clock,
    CudaClock,
    Row,
    Step,
    StepMarks,
    Stepped,
    account_row,
    busy_row,
    clock_for,
    issue_row,
    phase_row,
    step_row,
    without_garbage_collection,
)
from trainables.trial import Trial
from trainables.windows import (
    HOLD_MARGIN_S,
    busy_window,
    issue_window,
    phase_window,
    plain_blocks,
    steady_blocks,
    step_window,
)
from trainables.workload import Workload, build_workload, on_device

ISSUE_STEPS, BUSY_STEPS, TRANSFER_STEPS, LEAST_STEPS = 10, 5, 10, 3
PROFILE_STEPS = 10
CAPTURED_WARMUP = 3
"""replays of a new CUDA graph before it is timed: the first one sends it to the device"""

INTERLEAVED = (True, False, False, True)
"""with and without communication, in an order that cancels a steady drift"""


@dataclass(frozen=True)
class Measurement:
    """One rank's raw samples, and when its windows lay (unix seconds).

    `rows`, `buckets` and `sweep` are those of steps.parquet, buckets.parquet and sweep.parquet; `trace` is gzip'd
    Chrome trace JSON; `observations` are what `observe` gave before the warm-up and after the phases window, and `energies`
    what `read_energy` gave before and after the plain window.
    """

    rank: int
    rows: list[Row]
    warmup_began_at: float
    windows_ended_at: float
    buckets: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    trace: bytes | None = None
    observations: list[Any] = field(default_factory=list)
    energies: list[Any] = field(default_factory=list)
    peak_memory_by_device_bytes: list[int] | None = None
    """of each GPU that the rank drives, its own first; None on CPUs"""
    step_flops: float | None = None
    """see `trainables.flops`; counted on CUDA only, where a device's peak may be known"""
    dataset_samples: int | None = None
    """samples of an epoch of all ranks; None for data that have no end"""


ReadEnergy = Callable[[list[torch.device]], Any]

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""makes the context in which a step runs"""


@dataclass
class _Rank:
    """What all windows of a trial need on this rank, and what they leave behind."""

    trial: Trial
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    precision: Precision
    strategy: Strategy
    workload: Workload
    batches: Iterator[Any]
    delivered: list[torch.Tensor]
    """batches made so far by each of its loader processes, and by what works ahead; what there is none of is left out"""

    clock: Clock
    labelled: list[Labelled] = field(default_factory=list)
    device_peaks: list[int] | None = None
    energies: list[Any] = field(default_factory=list)

    @property
    def devices(self) -> list[torch.device]:
        """The GPUs that this rank drives, its own first; on CPUs its device."""
        if self.device.type == "cpu":
            return [self.device]
        count = self.trial.world_size // self.trial.processes
        return [torch.device("cuda", self.device.index + number) for number in range(count)]

    def few(self, most: int) -> int:
        """Steps of a window that explains others: a trial of few long steps is not to spend its time in such windows."""
        return min(most, max(LEAST_STEPS, self.trial.steps))

    def barrier(self) -> None:
        if self.trial.processes > 1:
            dist.barrier(self.control)

    def keep(
        self, window: str, window_s: float | None, taken: list[StepMarks], row: Callable[[StepMarks, Clock], Row]
    ) -> None:
        for marks in taken:
            assert marks.given is not None
            self.labelled.append((window, window_s, marks.given, partial(row, marks, self.clock)))

    def wrapped(self, account: Account | None = None) -> nn.Module:
        """The model under the trial's parallel strategy, whose buckets `account` notes; made anew, it gives every rank
        rank 0's weights."""
        model = self.strategy.wrapped(self.workload.model, self.trial, self.group, bare=account is not None)
        return model if account is None else with_account(model, account)

    def step_of(self, model: nn.Module) -> Step:
        return training_step(self.trial, self.workload, model, self.precision, self.strategy, self.group)

    def settled(self, step: Step, window: str) -> Step:
        """The step as the trial executes it, after the steps that it needs before it is timed."""
        _, warmup = phase_window(step, self.batches, self.trial.settling_steps, self.clock, self.barrier)
        self.keep(window, None, warmup, phase_row)
        forget_peaks(self.devices)  # to choose, cuDNN ran its algorithms in workspaces that no later step needs
        if not self.trial.captured:
            return step
        captured = self.captured(step)
        _, warmup = phase_window(captured, self.batches, CAPTURED_WARMUP, self.clock, self.barrier)
        self.keep(window, None, warmup, phase_row)
        return captured

    def captured(
        self, step: Step, context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    ) -> Step:
        return capture(step, next(self.batches), self.device, self.workload.resident, self.trial.non_blocking, context)


def run(
    trial: Trial,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    control: dist.ProcessGroup | None = None,
    source: str | None = None,
    observe: Callable[[], Any] = lambda: None,
    read_energy: ReadEnergy = lambda devices: None,
) -> Measurement:
    """Measures the trial on this rank; every taking-part rank of the trial calls it.

    `group` averages gradients (NCCL or gloo; None: the default group), `control` is a gloo group of the same ranks for
    barriers (None: `group`), `source` the text of a user's workload file where the file is not on this host. `observe`
    is called before the warm-up, and when the device has just finished the phases window; `read_energy`, with the devices
    that this rank drives, while they are idle right before and right after the plain window, outside its time.
    """
    precision: Precision = load(PRECISIONS[trial.precision])
    strategy: Strategy = load(PARALLEL[trial.parallel])
    communicates = strategy.buckets and trial.world_size > 1 and trial.account_steps > 0
    distributed = trial.parallel not in ("none", "dp")
    clock = clock_for(device)
    buckets: list[Row] = []
    sizes: list[int] = []
    sweep: list[Row] = []
    trace = None
    with settings_for(trial, precision), stream_for(trial, device):
        workload = on_device(build_workload(trial, device, source), trial, precision, device)
        processes = 0 if workload.resident else trial.loader_workers
        delivered = torch.zeros(processes, dtype=torch.int64).share_memory_()
        made = torch.zeros(int(works_ahead(trial, workload)), dtype=torch.int64)
        batches = endless_batches(trial, workload, rank, delivered, made)
        ready = [each for each in (delivered, made) if len(each)]
        here = _Rank(trial, rank, device, group, control or group, precision, strategy, workload, batches, ready, clock)
        try:
            with without_garbage_collection():
                observations = [observe()]
                warmup_began_at = time.time()
                model = here.wrapped()
                peaks = _bare_windows(here, model, lambda: observations.append(observe()), read_energy)
                if communicates:
                    _interleaved_window(here, model)
                    sizes = bucket_bytes(model)
                del model
                gc.collect()  # the collector is off, and the second wrapper is made when the first is gone
                if distributed:
                    drop_buckets(group, device)  # two sets of them would be memory that training does not need
                if communicates or trial.profile_ranks:
                    buckets, trace = _explaining_windows(here, sizes)
            rows = step_rows(here.labelled, trial, rank, peaks)
            energies, device_peaks, known = here.energies, here.device_peaks, _facts(here)
        finally:
            # loader processes end when their iterator does; what they hold must not reach into the next trial
            del batches, workload, here, delivered, ready
        if distributed:
            drop_buckets(group, device)
        if communicates:
            every = sweep_sizes(trial.sweep_bytes, list(dict.fromkeys(row["bytes"] for row in buckets)))
            with without_garbage_collection():
                sweep = all_reduce_sweep(every, rank, device, group, control or group, clock)
        windows_ended_at = time.time()
    measured = rank, rows, warmup_began_at, windows_ended_at, buckets, sweep, trace
    return Measurement(*measured, observations, energies, device_peaks, *known)


def _facts(here: _Rank) -> tuple[float | None, int | None]:
    """Operations of a step of this rank, and samples of the data set."""
    workload, trial = here.workload, here.trial
    samples = None if workload.resident else len(workload.dataset)  # type: ignore[arg-type]
    if samples is not None and not trial.workload and trial.model in TEXT_MODELS:
        samples //= trial.sequence_length  # its length is in bytes
    if here.device.type != "cuda":
        return None, samples
    batch = next(here.batches)
    inputs, _ = batch[0] if trial.accumulation_steps > 1 else batch
    flops = step_flops(workload.blueprint, inputs, trial.model, trial.image_size)
    return None if flops is None else flops * trial.accumulation_steps, samples


def _bare_windows(
    here: _Rank, model: nn.Module, observe: Callable[[], None], read_energy: ReadEnergy
) -> dict[str, int | None]:
    """The windows of the wrapper that trains as a user's would; gives the peak memory of them, in bytes."""
    trial, clock, batches = here.trial, here.clock, here.batches
    step = here.settled(here.step_of(model), "warmup")
    steps = _plain(here, step, read_energy)
    phases_s, phases = phase_window(step, batches, min(steps, trial.steps), clock, here.barrier)
    observe()
    here.keep("phases", phases_s, phases, phase_row)
    peaks: dict[str, int | None] = {"peak_memory_bytes": None, "peak_reserved_bytes": None}
    if isinstance(clock, CudaClock):
        issued = issue_window(step, batches, here.few(ISSUE_STEPS), clock)
        here.keep("issue", None, issued, issue_row)
        here.device_peaks = [torch.cuda.max_memory_allocated(device) for device in here.devices]
        peaks = {
            "peak_memory_bytes": here.device_peaks[0],
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(here.device),
        }
        longest_s = max(b - a for taken in issued for a, b in pairwise(taken.host_stamps_s))
        hold_s = 2 * longest_s + HOLD_MARGIN_S
        if len(here.devices) == 1:  # one device is held, and others would run on
            with contextlib.nullcontext() if trial.captured else here.strategy.unsynchronised(model):
                here.keep("busy", None, busy_window(step, batches, here.few(BUSY_STEPS), clock, hold_s), busy_row)
        if not here.workload.resident:
            synced_s, synced = phase_window(
                step, batches, here.few(TRANSFER_STEPS), clock, here.barrier, wait_for_copy=True
            )
            here.keep("transfer_synced", synced_s, synced, phase_row)
    return peaks


def _plain(here: _Rank, step: Step, read_energy: ReadEnergy) -> int:
    """The plain window, in blocks until they are enough; gives how many steps it had.

    Energy is read around all blocks together, with steps that lead in to some: a counter that moves every 100 ms tells one
    block's energy badly.
    """
    trial, width = here.trial, here.trial.median_width
    here.clock.synchronize()
    here.energies.append(read_energy(here.devices))
    if width:
        runs = between_looks(block_lengths(trial.least_window_steps, trial.window_steps))
        enough = partial(seen_enough, width, here.control, trial.processes > 1)
        blocks = steady_blocks(step, here.batches, runs, here.clock, here.barrier, enough)
    else:
        lengths = doubling_lengths(trial.steps, trial.window_steps if here.delivered else trial.steps)
        before = [int(each.sum()) for each in here.delivered]
        taken = [length * trial.accumulation_steps for length in lengths]
        enough = partial(loaders_kept_up, here.delivered, before, taken, here.control, trial.processes > 1)
        blocks = plain_blocks(step, here.batches, lengths, here.clock, here.barrier, enough)
    here.energies.append(read_energy(here.devices))
    window_s = sum(block.seconds for block in blocks)
    for block in blocks:
        here.labelled += [("lead_in", None, each, dict) for each in block.lead_in]
        read: Callable[[], Row] = partial(dict, block_s=block.seconds) if width else dict
        here.labelled += [("plain", window_s, each, read) for each in block.given]
    return sum(len(block.given) for block in blocks)


def _interleaved_window(here: _Rank, model: nn.Module) -> None:
    """Steps with and without gradient communication. The ranks' weights drift apart: nothing of this wrapper may follow."""
    step = here.step_of(model)
    with_communication = list(islice(cycle(INTERLEAVED), 2 * here.trial.account_steps))
    apart = partial(here.strategy.unsynchronised, model)
    if here.trial.captured:
        step, around = _two_graphs(here, step, apart)
    else:
        around = {True: contextlib.nullcontext, False: apart}
    _, taken = step_window(step, here.batches, [around[kept] for kept in with_communication], here.clock, here.barrier)
    for marks, kept in zip(taken, with_communication, strict=True):
        here.keep("synchronised" if kept else "no_sync", None, [marks], step_row)


def _two_graphs(here: _Rank, step: Step, apart: Around) -> tuple[Step, dict[bool, Around]]:
    """A step that replays one of two graphs, and the contexts that choose the one with and the one without communication."""
    together = here.settled(step, "warmup")
    graphs = {True: together, False: here.captured(step, apart)}
    chosen = True

    @contextlib.contextmanager
    def choose(kept: bool) -> Iterator[None]:
        nonlocal chosen
        chosen = kept
        yield

    def replay(batch: Any, begin: Begin) -> Stepped:
        return graphs[chosen](batch, begin)

    return replay, {kept: partial(choose, kept) for kept in graphs}


def _explaining_windows(here: _Rank, sizes: list[int]) -> tuple[list[Row], bytes | None]:
    """The windows of a second wrapper: its hook notes every bucket, and a profiler watches the last of them.

    `sizes` are the first wrapper's buckets in bytes (empty: ranks do not communicate, and there is no hook). Gives the
    rows of buckets.parquet, and this rank's trace. Raises RuntimeError where the second wrapper has other buckets.

    A CUDA graph's hook ran when it was captured, and its marks are events of the graph: each replay overwrites them, so
    that here the steps of a graph run one by one, and each begins on an idle device.
    """
    trial, clock = here.trial, here.clock
    account = Account(clock, here.group, here.strategy.gradient_type)
    model = here.wrapped(account if sizes else None)
    around: Around = account.step if sizes else contextlib.nullcontext
    step = here.step_of(model)
    buckets: list[Row] = []

    def window(name: str, steps: int, annotate: Annotate | None = None) -> None:
        window_s, taken = step_window(step, here.batches, [around] * steps, clock, here.barrier, annotate)
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
            buckets.extend(bucket_rows(account, taken, name, here.rank, first, clock.seconds))

    def one_by_one(name: str, steps: int, annotate: Annotate | None = None) -> None:
        apart = steps if sizes and trial.captured else 1  # a replay of a graph overwrites what the one before left
        for _ in range(apart):
            window(name, steps // apart, annotate)

    window("account_warmup", trial.settling_steps)
    if trial.captured:
        account.clock = GraphClock(here.device)
        step, around = here.captured(step, around), contextlib.nullcontext
        window("account_warmup", CAPTURED_WARMUP)
    if sizes:
        one_by_one("communication", trial.account_steps)
        if bucket_bytes(model) != sizes:
            raise RuntimeError(
                f"the account's wrapper has buckets of {bucket_bytes(model)} bytes, the plain one {sizes}"
            )
    if not trial.profile_ranks:
        return buckets, None
    with kineto(trial.profiles(here.rank), here.device) as trace:
        one_by_one("profile", PROFILE_STEPS, record_function)
    return buckets, trace.content
