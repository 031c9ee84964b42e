"""A training step in parts: from a batch on the host to updated weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainables.batch import byte_size, to_device
from trainables.step.context import RankContext
from trainables.step.correct import TOP_K, are_class_scores, count_correct
from trainables.step.noise_scale import NoiseScale
from trainables.step.precision import Updater, autocast, cast_floats
from trainables.step.timing import StartPart, Step, StepOutput
from trainables.trial import Trial


class ForwardResult(NamedTuple):
    """Result of a forward pass: the loss, the tensors it was computed from, and the bytes copied to the device."""

    loss: torch.Tensor
    outputs: Any
    targets: Any
    copied_bytes: int


class CorrectSamples:
    """Counts this rank's correctly classified samples since the last `read`, on the device."""

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(2, dtype=torch.float64, device=device)
        self.classes = 0

    def add(self, outputs: Any, targets: Any) -> None:
        """Count a batch. Does not synchronise, and can be captured in a CUDA graph."""
        if are_class_scores(outputs, targets):
            self.classes = outputs.shape[1]
            self.counts += count_correct(outputs.detach(), targets)

    def read(self) -> tuple[float | None, float | None]:
        """Return the top-1 and top-5 counts and reset them. None if outputs are no class scores of enough classes."""
        top1, top5 = self.counts.tolist()
        self.counts.zero_()
        return (top1 if self.classes else None), (top5 if self.classes > TOP_K else None)


@dataclass(frozen=True)
class Counters:
    """Statistics collected during training: correct samples, and the gradient noise scale (None: disabled)."""

    correct: CorrectSamples
    noise: NoiseScale | None = None


def updater_for(context: RankContext, model: nn.Module) -> Updater:
    """Return the optimizer part of a step of `model`, for the trial's strategy and precision."""
    make, strategy, group = context.workload.optimizer, context.strategy, context.group
    return Updater(
        context.precision,
        lambda parameters: strategy.optimizer(make, list(parameters), group),
        model.parameters(),
        context.device.type,
        context.workload.scheduler,
    )


def forward_pass(context: RankContext, model: nn.Module) -> Callable[[Any, StartPart], ForwardResult]:
    """Return the function that computes the loss of a host batch: copy, forward, loss. It does not synchronise.

    If the workload has a `step`, loss and forward pass are one part, and `ForwardResult` has no outputs and targets.
    """
    workload, precision, strategy = context.workload, context.precision, context.strategy
    device, copies, non_blocking = context.device, context.copies, context.trial.non_blocking

    def forward(batch: Any, start_part: StartPart) -> ForwardResult:
        copied_bytes = 0
        if copies:
            start_part("host_to_device")
            copied_bytes = byte_size(batch)
            batch = to_device(batch, device, non_blocking)
        if workload.step is not None:
            start_part("forward")
            with autocast(precision, device):
                loss = workload.step(model, cast_floats(batch, precision.parameters))
            return ForwardResult(loss.float() if precision.parameters else loss, None, None, copied_bytes)
        inputs, targets = workload.select(batch)
        assert workload.loss is not None
        with autocast(precision, device):
            outputs = strategy.forward(
                model, lambda raw: cast_floats(workload.prepare(raw), precision.parameters), inputs, start_part
            )
            start_part("loss")
            outputs = cast_floats(outputs, torch.float32) if precision.parameters else outputs
            return ForwardResult(workload.loss(outputs, targets), outputs, targets, copied_bytes)

    return forward


def training_step(
    context: RankContext, model: nn.Module, updater: Updater | None = None, counters: Counters | None = None
) -> Step:
    """Return the function that trains one step of `model`: copy, forward, loss, backward, optimizer.

    Without `counters` (timed windows), the step takes an item of `endless_batches`: a batch, or `accumulation_steps`
    batches. Its loss is the mean over the batches. With `counters` (training), the step takes a `StepBatch` and weighs
    its parts with `weighted_parts`. Its loss is the sum over the rank's samples, and the noise scale ignores short
    steps. Only the last backward pass communicates. The workload's `after_backward` follows, with gradients that are
    averaged and unscaled. The optimizer sets gradients to None. Nothing synchronises with the device, except with fp16
    and an optimizer that cannot unscale gradients itself.
    """
    trial, strategy, group = context.trial, context.strategy, context.group
    parts, copies = trial.accumulation_steps, context.copies
    single = counters is None and parts == 1
    updater = updater or updater_for(context, model)
    forward = forward_pass(context, model)
    backward = _equal_part(forward, updater, parts) if counters is None else _weighted_part(forward, updater, counters)
    noise = counters.noise if counters else None
    after_backward = context.workload.after_backward

    def step(batch: Any, start_part: StartPart) -> StepOutput:
        if single:
            loss, copied_bytes = backward(batch, start_part)
        else:
            passes = batch if counters is None else weighted_parts(trial, batch)
            with strategy.unsynchronised(model):
                results = [backward(part, start_part) for part in passes[:-1]]
            results.append(backward(passes[-1], start_part))
            loss = torch.stack([part_loss for part_loss, _ in results]).sum()
            copied_bytes = sum(part_bytes for _, part_bytes in results)
        if strategy.reduce is not None:
            start_part("reduce")
            strategy.reduce(model, group, trial)
        if noise is not None:
            if batch.complete:
                noise.finish_step(updater.scale)
            else:
                noise.skip_step()
        if after_backward is not None:
            start_part("after_backward")
            updater.unscale()
            after_backward(model)
        start_part("optimizer")
        scale = updater.update()
        return StepOutput(loss, copied_bytes if copies else None, scale)

    return step


Backward = Callable[[Any, StartPart], tuple[torch.Tensor, int]]
"""(part of a step, start_part) -> the part's contribution to the step's loss, and the bytes copied to the device"""


def _equal_part(forward: Callable[[Any, StartPart], ForwardResult], updater: Updater, parts: int) -> Backward:
    """Return the forward and backward pass of one of `parts` batches of equal size."""

    def backward(batch: Any, start_part: StartPart) -> tuple[torch.Tensor, int]:
        result = forward(batch, start_part)
        loss = result.loss / parts if parts > 1 else result.loss
        start_part("backward")
        updater.scaled(loss).backward()
        return loss.detach(), result.copied_bytes

    return backward


def _weighted_part(
    forward: Callable[[Any, StartPart], ForwardResult], updater: Updater, counters: Counters
) -> Backward:
    """Return the forward and backward pass of a (batch, samples, weight), which updates the counters."""

    def backward(part: tuple[Any, int, float], start_part: StartPart) -> tuple[torch.Tensor, int]:
        batch, size, weight = part
        result = forward(batch, start_part)
        counters.correct.add(result.outputs, result.targets)
        start_part("backward")
        updater.scaled(result.loss * weight if weight != 1.0 else result.loss).backward()
        if counters.noise:
            counters.noise.observe_part()
        return result.loss.detach().float() * size, result.copied_bytes

    return backward


@dataclass(frozen=True)
class StepBatch:
    """A rank's batches for one optimizer step.

    parts: one batch per backward pass. sizes: samples per batch. samples: samples of all ranks. complete: `samples` is
    the trial's `global_batch`; only the last step of an epoch may be short.
    """

    parts: list[Any]
    sizes: list[int]
    samples: int
    complete: bool


def weighted_parts(trial: Trial, batch: StepBatch) -> list[tuple[Any, int, float]]:
    """Return (batch, samples, weight) per part. A part's mean loss is multiplied by its weight.

    loss_mean "global" gives every sample of all ranks the same weight, 1 / samples (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 3); the weight includes a factor of the number of ranks, because averaging
    gradients divides by it. "rank" gives every sample the weight 1 / the rank's samples.
    """
    samples = batch.samples / trial.world_size if trial.loss_mean == "global" else sum(batch.sizes)
    return [(part, size, size / samples) for part, size in zip(batch.parts, batch.sizes, strict=True)]
