"""One rank's part of a trial: build, warm up, measure in separate windows, return every sample."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from trainables.communication import Account, bucket_bytes, bucket_rows, with_account
from trainables.data.loader import endless_batches
from trainables.precision import Precision
from trainables.process import drop_buckets, settings_for
from trainables.profile import kineto
from trainables.registry import PARALLEL, PRECISIONS, load
from trainables.sweep import all_reduce_sweep, sweep_sizes
from trainables.timing import (
    HOLD_MARGIN_S,
    Annotate,
    Clock,
    CudaClock,
    Row,
    Step,
    StepMarks,
    account_row,
    busy_row,
    busy_window,
    clock_for,
    issue_row,
    issue_window,
    phase_row,
    phase_window,
    plain_window,
    step_row,
    step_window,
    without_garbage_collection,
)
from trainables.trial import Trial
from trainables.workload import Workload, build_workload

ISSUE_STEPS = 10
BUSY_STEPS = 5
TRANSFER_STEPS = 10
PROFILE_STEPS = 10
INTERLEAVED = (True, False, False, True)
"""with and without communication, in an order that cancels a steady drift"""


@dataclass(frozen=True)
class Measurement:
    """One rank's raw samples, and when its windows lay (unix seconds).

    `rows`, `buckets` and `sweep` are those of steps.parquet, buckets.parquet and sweep.parquet; `trace` is gzip'd
    Chrome trace JSON; `observations` are what `observe` gave before the warm-up and after the phases window.
    """

    rank: int
    rows: list[Row]
    warmup_began_at: float
    windows_ended_at: float
    buckets: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    trace: bytes | None = None
    observations: list[Any] = field(default_factory=list)


@dataclass
class _Rank:
    """What all windows of a trial need on this rank, and what they leave behind."""

    trial: Trial
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    precision: Precision
    workload: Workload
    batches: Iterator[Any]
    clock: Clock
    labelled: list[tuple[str, float | None, torch.Tensor | None, Callable[[], Row]]] = field(default_factory=list)
    """window, its seconds, a step's loss, and what reads the step's other columns from its marks"""

    def barrier(self) -> None:
        if self.trial.world_size > 1:
            dist.barrier(self.control)

    def keep(
        self, window: str, window_s: float | None, taken: list[StepMarks], row: Callable[[StepMarks, Clock], Row]
    ) -> None:
        self.labelled += [(window, window_s, marks.loss, partial(row, marks, self.clock)) for marks in taken]

    def wrapped(self) -> nn.Module:
        """The model under the trial's parallel strategy. Made anew, it gives every rank rank 0's weights."""
        return load(PARALLEL[self.trial.parallel])(self.workload.model, self.group)

    def step_of(self, model: nn.Module) -> Step:
        return training_step(self.trial, self.workload, model, self.precision.autocast)


def run(
    trial: Trial,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    control: dist.ProcessGroup | None = None,
    source: str | None = None,
    observe: Callable[[], Any] = lambda: None,
) -> Measurement:
    """Measures the trial on this rank; every rank of the trial calls it.

    `group` averages gradients (NCCL or gloo; None: the default group), `control` is a gloo group of the same ranks for
    barriers (None: `group`), `source` the text of a user's workload file where the file is not on this host. `observe`
    is called before the warm-up, and when the device has just finished the phases window.
    """
    precision = load(PRECISIONS[trial.precision])
    communicates = trial.parallel == "ddp" and trial.world_size > 1 and trial.account_steps > 0
    clock = clock_for(device)
    buckets: list[Row] = []
    sizes: list[int] = []
    sweep: list[Row] = []
    trace = None
    with settings_for(trial, precision):
        workload = on_device(build_workload(trial, device, source), trial, device)
        batches = endless_batches(trial, workload, rank)
        here = _Rank(trial, rank, device, group, control or group, precision, workload, batches, clock)
        try:
            with without_garbage_collection():
                observations = [observe()]
                warmup_began_at = time.time()
                model = here.wrapped()
                peaks = _bare_windows(here, model, lambda: observations.append(observe()))
                if communicates:
                    _interleaved_window(here, model)
                    sizes = bucket_bytes(model)
                del model
                gc.collect()  # the collector is off, and the second wrapper is made when the first is gone
                if trial.parallel != "none":
                    drop_buckets(group, device)  # two sets of them would be memory that training does not need
                if communicates or trial.profile_ranks:
                    buckets, trace = _explaining_windows(here, sizes)
            rows = _rows(here, peaks)
        finally:
            # loader processes end when their iterator does; what they hold must not reach into the next trial
            del batches, workload, here
        if trial.parallel != "none":
            drop_buckets(group, device)
        if communicates:
            every = sweep_sizes(trial.sweep_bytes, sizes)
            with without_garbage_collection():
                sweep = all_reduce_sweep(every, rank, device, group, control or group, clock)
        windows_ended_at = time.time()
    return Measurement(rank, rows, warmup_began_at, windows_ended_at, buckets, sweep, trace, observations)


def on_device(workload: Workload, trial: Trial, device: torch.device) -> Workload:
    """The workload with its model on the device, in training mode and in the trial's memory format."""
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    model = workload.model.to(device)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)
    return replace(workload, model=model.train())


def training_step(trial: Trial, workload: Workload, model: nn.Module, autocast: torch.dtype | None) -> Step:
    """The function that trains one step of `model`: copy, forward, loss, backward, optimizer.

    The optimizer's part ends with gradients set to None. Nothing in it waits for the device.
    """
    device = next(model.parameters()).device
    optimizer = workload.optimizer(model.parameters())
    copies = not workload.resident and device.type == "cuda"

    def step(batch: Any, mark: Callable[[], None]) -> tuple[torch.Tensor, int | None]:
        moved_bytes = None
        if copies:
            moved_bytes = byte_size(batch)
            batch = to_device(batch, device, trial.non_blocking)
        inputs, targets = batch
        mark()
        with torch.autocast(device.type, autocast) if autocast else contextlib.nullcontext():
            outputs = model(workload.prepare(inputs))
            mark()
            loss = workload.loss(outputs, targets)
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()
        return loss.detach(), moved_bytes

    return step


def to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """A batch (a tensor, or tuples, lists and dicts of tensors) on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, dict):
        return {key: to_device(item, device, non_blocking) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_device(item, device, non_blocking) for item in value]
    return value


def byte_size(value: Any) -> int:
    """Bytes of all tensors in a batch."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(byte_size(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(byte_size(item) for item in value)
    return 0


def _bare_windows(here: _Rank, model: nn.Module, observe: Callable[[], None]) -> dict[str, int | None]:
    """The windows of the wrapper that trains as a user's would; gives the peak memory of them, in bytes."""
    trial, clock, batches = here.trial, here.clock, here.batches
    step = here.step_of(model)
    _, warmup = phase_window(step, batches, trial.settling_steps, clock, here.barrier)
    plain_s, losses = plain_window(step, batches, trial.window_steps, clock, here.barrier)
    phases_s, phases = phase_window(step, batches, trial.steps, clock, here.barrier)
    observe()
    here.keep("warmup", None, warmup, phase_row)
    here.labelled += [("plain", plain_s, loss, dict) for loss in losses]
    here.keep("phases", phases_s, phases, phase_row)
    peaks: dict[str, int | None] = {"peak_memory_bytes": None, "peak_reserved_bytes": None}
    if isinstance(clock, CudaClock):
        issued = issue_window(step, batches, ISSUE_STEPS, clock)
        here.keep("issue", None, issued, issue_row)
        peaks = {
            "peak_memory_bytes": torch.cuda.max_memory_allocated(here.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(here.device),
        }
        longest_s = max(b - a for taken in issued for a, b in pairwise(taken.host_stamps_s))
        with _no_sync(model):
            here.keep(
                "busy", None, busy_window(step, batches, BUSY_STEPS, clock, 2 * longest_s + HOLD_MARGIN_S), busy_row
            )
        if not here.workload.resident:
            synced_s, synced = phase_window(step, batches, TRANSFER_STEPS, clock, here.barrier, wait_for_copy=True)
            here.keep("transfer_synced", synced_s, synced, phase_row)
    return peaks


def _no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """DDP's own way to leave the all-reduce out; nothing for a model that has none."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


def _interleaved_window(here: _Rank, model: nn.Module) -> None:
    """Steps with and without gradient communication. The ranks' weights drift apart: nothing of this wrapper may follow."""
    step = here.step_of(model)
    with_communication = list(islice(cycle(INTERLEAVED), 2 * here.trial.account_steps))
    around = [contextlib.nullcontext if kept else partial(_no_sync, model) for kept in with_communication]
    _, taken = step_window(step, here.batches, around, here.clock, here.barrier)
    for marks, kept in zip(taken, with_communication, strict=True):
        here.keep("synchronised" if kept else "no_sync", None, [marks], step_row)


def _explaining_windows(here: _Rank, sizes: list[int]) -> tuple[list[Row], bytes | None]:
    """The windows of a second wrapper: its hook notes every bucket, and a profiler watches the last of them.

    `sizes` are the first wrapper's buckets in bytes (empty: ranks do not communicate, and there is no hook). Gives the
    rows of buckets.parquet, and this rank's trace. Raises RuntimeError where the second wrapper has other buckets.
    """
    trial, clock = here.trial, here.clock
    account = Account(clock, here.group)
    model = here.wrapped()
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if sizes:
        model, around = with_account(model, account), account.step
    step = here.step_of(model)
    buckets: list[Row] = []

    def window(name: str, steps: int, annotate: Annotate | None = None) -> None:
        window_s, taken = step_window(step, here.batches, [around] * steps, clock, here.barrier, annotate)
        first = len(here.labelled)
        timed_s = None if name == "account_warmup" else window_s
        if not sizes:
            here.keep(name, timed_s, taken, step_row)
            return
        last_gradients = account.last_gradients[-steps:]
        for marks, last in zip(taken, last_gradients, strict=True):
            marks.marks.append(last)
        here.keep(name, timed_s, taken, account_row)
        if timed_s is not None:
            buckets.extend(bucket_rows(account, taken, name, here.rank, first, clock.seconds))

    window("account_warmup", trial.settling_steps)
    if sizes:
        window("communication", trial.account_steps)
        if bucket_bytes(model) != sizes:
            raise RuntimeError(
                f"the account's wrapper has buckets of {bucket_bytes(model)} bytes, the plain one {sizes}"
            )
    if not trial.profile_ranks:
        return buckets, None
    with kineto(trial.profiles(here.rank), here.device) as trace:
        window("profile", PROFILE_STEPS, record_function)
    return buckets, trace.content


def _rows(here: _Rank, peaks: dict[str, int | None]) -> list[Row]:
    """The rows of steps.parquet, their marks read and their steps numbered in the order in which they ran."""
    losses = _finite([loss for _, _, loss, _ in here.labelled])
    return [
        {
            "rank": here.rank,
            "window": window,
            "step": number,
            "samples": here.trial.batch_per_gpu,
            "window_s": window_s,
            "loss": loss,
            **peaks,
            **read(),
        }
        for number, ((window, window_s, _, read), loss) in enumerate(zip(here.labelled, losses, strict=True))
    ]


def _finite(losses: list[torch.Tensor | None]) -> list[float | None]:
    """Losses as numbers, read from the device in one copy; None where not finite."""
    values = torch.stack([loss.float().reshape(()) for loss in losses if loss is not None]).cpu().tolist()
    return [value if math.isfinite(value) else None for value in values]
