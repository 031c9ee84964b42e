"""One rank's part of a trial: build, warm up, measure in separate windows, return every sample."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainables.data.loader import endless_batches
from trainables.process import drop_buckets, settings_for
from trainables.registry import PARALLEL, PRECISIONS, load
from trainables.timing import (
    Clock,
    Row,
    Step,
    clock_for,
    issue_row,
    issue_window,
    phase_row,
    phase_window,
    plain_window,
    without_garbage_collection,
)
from trainables.trial import Trial
from trainables.workload import Workload, build_workload

ISSUE_STEPS = 10


@dataclass(frozen=True)
class Measurement:
    """One rank's raw samples, and when its windows lay (unix seconds)."""

    rank: int
    rows: list[Row]
    warmup_began_at: float
    windows_ended_at: float


def run(
    trial: Trial,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    control: dist.ProcessGroup | None = None,
    source: str | None = None,
) -> Measurement:
    """Measures the trial on this rank; every rank of the trial calls it.

    `group` averages gradients (NCCL or gloo; None: the default group), `control` is a gloo group of the same ranks for
    barriers (None: `group`), `source` the text of a user's workload file where the file is not on this host.
    """
    precision = load(PRECISIONS[trial.precision])
    clock = clock_for(device)

    def barrier() -> None:
        if trial.world_size > 1:
            dist.barrier(control or group)

    with settings_for(trial, precision):
        workload = build_workload(trial, device, source)
        step = training_step(trial, workload, precision.autocast, device, group)
        batches = endless_batches(trial, workload, rank)
        try:
            measurement = _windows(trial, rank, step, batches, clock, barrier)
        finally:
            # loader processes end when their iterator does; what they hold must not reach into the next trial
            del batches, step, workload
        if trial.parallel != "none":
            drop_buckets(group, device)
    return measurement


def training_step(
    trial: Trial,
    workload: Workload,
    autocast: torch.dtype | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Step:
    """The function that trains one step: copy, forward and loss, backward, optimizer.

    The optimizer's part ends with gradients set to None. Nothing in it waits for the device.
    """
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    bare = workload.model.to(device)
    if any(parameter.dim() == 4 for parameter in bare.parameters()):
        bare = bare.to(memory_format=layout)
    model: nn.Module = load(PARALLEL[trial.parallel])(bare.train(), group)
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
            loss = workload.loss(model(workload.prepare(inputs)), targets)
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


def _windows(
    trial: Trial, rank: int, step: Step, batches: Iterator[Any], clock: Clock, barrier: Callable[[], None]
) -> Measurement:
    """All windows of a trial, one after another on the same stream of batches; rows are made after the last."""
    with without_garbage_collection():
        warmup_began_at = time.time()
        _, warmup = phase_window(step, batches, trial.warmup_steps, clock, barrier)
        plain_s, losses = plain_window(step, batches, trial.window_steps, clock, barrier)
        phases_s, phases = phase_window(step, batches, trial.window_steps, clock, barrier)
        issued = issue_window(step, batches, ISSUE_STEPS, clock) if trial.device == "cuda" else []
        windows_ended_at = time.time()

    labelled: list[tuple[str, float | None, torch.Tensor | None, Row]] = [
        *(("warmup", None, taken.loss, phase_row(taken, clock)) for taken in warmup),
        *(("plain", plain_s, loss, {}) for loss in losses),
        *(("phases", phases_s, taken.loss, phase_row(taken, clock)) for taken in phases),
        *(("issue", None, taken.loss, issue_row(taken, clock)) for taken in issued),
    ]
    finite_losses = _finite([loss for _, _, loss, _ in labelled])
    peak_bytes = torch.cuda.max_memory_allocated() if trial.device == "cuda" else None
    rows = [
        {
            "rank": rank,
            "window": window,
            "step": number,
            "samples": trial.batch_per_gpu,
            "window_s": window_s,
            "loss": loss,
            "peak_memory_bytes": peak_bytes,
            **row,
        }
        for number, ((window, window_s, _, row), loss) in enumerate(zip(labelled, finite_losses, strict=True))
    ]
    return Measurement(rank, rows, warmup_began_at, windows_ended_at)


def _finite(losses: list[torch.Tensor | None]) -> list[float | None]:
    """Losses as numbers, read from the device in one copy; None where not finite."""
    values = torch.stack([loss.float().reshape(()) for loss in losses if loss is not None]).cpu().tolist()
    return [value if math.isfinite(value) else None for value in values]
