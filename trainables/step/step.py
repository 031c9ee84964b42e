"""One training step, from a batch on the host to updated weights, part by part."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainables.batch import byte_size, to_device
from trainables.step.context import RankContext
from trainables.step.correct import TOP, countable, right
from trainables.step.noise_scale import NoiseScale
from trainables.step.precision import Updater, autocast, cast_floats
from trainables.step.timing import Begin, Step, StepOutput
from trainables.trial import Trial


class ForwardResult(NamedTuple):
    """A batch that has come through the model: its loss, what that was computed from, and the bytes that were copied."""

    loss: torch.Tensor
    outputs: Any
    targets: Any
    moved_bytes: int


class CorrectSamples:
    """Samples of this rank that were right since the last reading, kept on the device."""

    def __init__(self, device: torch.device):
        self.right = torch.zeros(2, dtype=torch.float64, device=device)
        self.classes = 0

    def add(self, outputs: Any, targets: Any) -> None:
        """Waits for nothing, and may be captured."""
        if countable(outputs, targets):
            self.classes = outputs.shape[1]
            self.right += right(outputs.detach(), targets)

    def read(self) -> tuple[float | None, float | None]:
        """Samples right within the first one and five classes (None: not countable); counting begins anew."""
        first, fifth = self.right.tolist()
        self.right.zero_()
        return (first if self.classes else None), (fifth if self.classes > TOP else None)


@dataclass(frozen=True)
class Counters:
    """What a training counts in its steps: correct samples, and the gradient noise scale (None: it does not)."""

    correct: CorrectSamples
    noise: NoiseScale | None = None


def updater_for(context: RankContext, model: nn.Module) -> Updater:
    """Return the optimizer's part of a step of `model`, under its strategy and in its precision."""
    make, strategy, group = context.workload.optimizer, context.strategy, context.group
    return Updater(
        context.precision,
        lambda parameters: strategy.optimizer(make, list(parameters), group),
        model.parameters(),
        context.device.type,
    )


def forward_pass(context: RankContext, model: nn.Module) -> Callable[[Any, Begin], ForwardResult]:
    """The function that takes a batch from the host to its loss: copy, forward, loss. Nothing in it waits for the device."""
    workload, precision, strategy = context.workload, context.precision, context.strategy
    device, copies, non_blocking = context.device, context.copies, context.trial.non_blocking

    def forward(batch: Any, begin: Begin) -> ForwardResult:
        moved_bytes = 0
        if copies:
            begin("host_to_device")
            moved_bytes = byte_size(batch)
            batch = to_device(batch, device, non_blocking)
        inputs, targets = workload.select(batch)
        with autocast(precision, device):
            outputs = strategy.forward(
                model, lambda given: cast_floats(workload.prepare(given), precision.parameters), inputs, begin
            )
            begin("loss")
            outputs = cast_floats(outputs, torch.float32) if precision.parameters else outputs
            return ForwardResult(workload.loss(outputs, targets), outputs, targets, moved_bytes)

    return forward


def training_step(
    context: RankContext, model: nn.Module, updater: Updater | None = None, counters: Counters | None = None
) -> Step:
    """Return the function that trains one step of `model`: copy, forward, loss, backward, optimizer.

    Without `counters` it takes what `endless_batches` yields: a batch, or `accumulation_steps` of them, whose losses'
    mean is the step's loss. With `counters` it takes a `StepBatch`, weighs its parts as the trial says, and the step's
    loss is the sum over the rank's samples; the noise scale leaves out a step that is short. Only the last part's
    backward pass communicates. The optimizer's part ends with gradients set to None. Nothing waits for the device.
    """
    trial, strategy, group = context.trial, context.strategy, context.group
    parts, copies = trial.accumulation_steps, context.copies
    single = counters is None and parts == 1
    updater = updater or updater_for(context, model)
    forward = forward_pass(context, model)
    backward = _backward(forward, updater, parts) if counters is None else _counted(forward, updater, counters)
    noise = counters.noise if counters else None

    def step(batch: Any, begin: Begin) -> StepOutput:
        if single:
            loss, moved_bytes = backward(batch, begin)
        else:
            passes = batch if counters is None else weighted_parts(trial, batch)
            with strategy.unsynchronised(model):
                done = [backward(part, begin) for part in passes[:-1]]
            done.append(backward(passes[-1], begin))
            loss = torch.stack([part_loss for part_loss, _ in done]).sum()
            moved_bytes = sum(moved for _, moved in done)
        if strategy.reduce is not None:
            begin("reduce")
            strategy.reduce(model, group, trial)
        if noise is not None:
            if batch.whole:
                noise.finish_step(updater.scale)
            else:
                noise.skip_step()
        begin("optimizer")
        scale = updater.update()
        return StepOutput(loss, moved_bytes if copies else None, scale)

    return step


Backward = Callable[[Any, Begin], tuple[torch.Tensor, int]]
"""(part of a step, begin) -> its share of the step's loss, and the bytes that were copied"""


def _backward(forward: Callable[[Any, Begin], ForwardResult], updater: Updater, parts: int) -> Backward:
    """The passes of one batch of `parts` equal ones."""

    def backward(batch: Any, begin: Begin) -> tuple[torch.Tensor, int]:
        passed = forward(batch, begin)
        loss = passed.loss / parts if parts > 1 else passed.loss
        begin("backward")
        updater.scaled(loss).backward()
        return loss.detach(), passed.moved_bytes

    return backward


def _counted(forward: Callable[[Any, Begin], ForwardResult], updater: Updater, counters: Counters) -> Backward:
    """The passes of a (batch, its samples, its weight), with what a training counts."""

    def backward(part: tuple[Any, int, float], begin: Begin) -> tuple[torch.Tensor, int]:
        batch, size, weight = part
        passed = forward(batch, begin)
        counters.correct.add(passed.outputs, passed.targets)
        begin("backward")
        updater.scaled(passed.loss * weight if weight != 1.0 else passed.loss).backward()
        if counters.noise:
            counters.noise.observe_part()
        return passed.loss.detach().float() * size, passed.moved_bytes

    return backward


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of one optimizer step.

    parts: one batch for each backward pass. sizes: their samples. samples: those of all ranks. whole: the step has
    `global_batch` of them, as all but an epoch's last have.
    """

    parts: list[Any]
    sizes: list[int]
    samples: int
    whole: bool


def weighted_parts(trial: Trial, batch: StepBatch) -> list[tuple[Any, int, float]]:
    """Return (batch, samples, weight) of each part; a part's mean loss is multiplied with its weight, before the ranks'
    gradients are averaged.

    "global": every sample of all ranks weighs the same, 1 / samples (Goyal et al. 2017, https://arxiv.org/abs/1706.02677,
    section 3); the ranks' average divides by their number, which is multiplied in here. "rank": 1 / the rank's own.
    """
    samples = batch.samples / trial.world_size if trial.loss_mean == "global" else sum(batch.sizes)
    return [(part, size, size / samples) for part, size in zip(batch.parts, batch.sizes, strict=True)]
