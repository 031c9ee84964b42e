"""One training step, from a batch on the host to updated weights, part by part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainables.batch import byte_size, to_device
from trainables.parallel import Strategy
from trainables.precision import Precision, Updater, autocast, cast_floats
from trainables.timing import Begin, Step, Stepped
from trainables.trial import Trial
from trainables.workload import Workload


@dataclass(frozen=True)
class Passed:
    """A batch that has come through the model: its loss, what that was computed from, and the bytes that were copied."""

    loss: torch.Tensor
    outputs: Any
    targets: Any
    moved_bytes: int


def forward_pass(
    trial: Trial, workload: Workload, model: nn.Module, precision: Precision, strategy: Strategy
) -> Callable[[Any, Begin], Passed]:
    """The function that takes a batch from the host to its loss: copy, forward, loss. Nothing in it waits for the device."""
    device = next(model.parameters()).device
    copies = not workload.resident and device.type == "cuda"

    def forward(batch: Any, begin: Begin) -> Passed:
        moved_bytes = 0
        if copies:
            begin("host_to_device")
            moved_bytes = byte_size(batch)
            batch = to_device(batch, device, trial.non_blocking)
        inputs, targets = workload.select(batch)
        with autocast(precision, device):
            outputs = strategy.forward(
                model, lambda given: cast_floats(workload.prepare(given), precision.parameters), inputs, begin
            )
            begin("loss")
            outputs = cast_floats(outputs, torch.float32) if precision.parameters else outputs
            return Passed(workload.loss(outputs, targets), outputs, targets, moved_bytes)

    return forward


def training_step(
    trial: Trial,
    workload: Workload,
    model: nn.Module,
    precision: Precision,
    strategy: Strategy,
    group: dist.ProcessGroup | None = None,
) -> Step:
    """The function that trains one step of `model`: copy, forward, loss, backward, optimizer.

    A batch is a list of `accumulation_steps` batches where these are more than one: only the last one's backward pass
    communicates, and the loss is their mean. The optimizer's part ends with gradients set to None. Nothing in it waits
    for the device.
    """
    device = next(model.parameters()).device
    parts = trial.accumulation_steps
    updater = updater_for(workload, model, precision, strategy, group)
    forward = forward_pass(trial, workload, model, precision, strategy)
    copies = not workload.resident and device.type == "cuda"

    def accumulate(batch: Any, begin: Begin) -> tuple[torch.Tensor, int]:
        passed = forward(batch, begin)
        loss = passed.loss / parts if parts > 1 else passed.loss
        begin("backward")
        updater.scaled(loss).backward()
        return loss.detach(), passed.moved_bytes

    def step(batch: Any, begin: Begin) -> Stepped:
        if parts == 1:
            loss, moved_bytes = accumulate(batch, begin)
        else:
            with strategy.unsynchronised(model):
                taken = [accumulate(part, begin) for part in batch[:-1]]
            taken.append(accumulate(batch[-1], begin))
            loss = torch.stack([part_loss for part_loss, _ in taken]).sum()
            moved_bytes = sum(moved for _, moved in taken)
        if strategy.reduce is not None:
            begin("reduce")
            strategy.reduce(model, group, trial)
        begin("optimizer")
        scale = updater.update()
        return Stepped(loss, moved_bytes if copies else None, scale)

    return step


def updater_for(
    workload: Workload, model: nn.Module, precision: Precision, strategy: Strategy, group: dist.ProcessGroup | None
) -> Updater:
    """The optimizer's part of a step of `model`, under its strategy and in its precision."""
    return Updater(
        precision,
        lambda parameters: strategy.optimizer(workload.optimizer, list(parameters), group),
        model.parameters(),
        next(model.parameters()).device.type,
    )
