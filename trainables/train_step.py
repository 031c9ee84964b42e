"""One optimizer step of training by epochs: parts of any size, what they count, and the loss averaged as the trial says."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainables.epochs import Taken
from trainables.noise_scale import NoiseScale
from trainables.parallel import Strategy
from trainables.precision import Precision, Updater
from trainables.step import forward_pass
from trainables.timing import Begin, Stepped
from trainables.trial import Trial
from trainables.validation import TOP, countable, right
from trainables.workload import Workload


class Counts:
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


def weights(trial: Trial, taken: Taken) -> list[float]:
    """What each part's mean loss is multiplied with, before the ranks' gradients are averaged.

    "global": every sample of all ranks weighs the same, 1 / samples (Goyal et al. 2017, https://arxiv.org/abs/1706.02677,
    section 3); the ranks' average divides by their number, which is multiplied in here. "rank": 1 / the rank's own.
    """
    whole = taken.samples / trial.world_size if trial.loss_mean == "global" else sum(taken.sizes)
    return [size / whole for size in taken.sizes]


def train_step(
    trial: Trial,
    workload: Workload,
    model: nn.Module,
    precision: Precision,
    strategy: Strategy,
    updater: Updater,
    counts: Counts,
    noise: NoiseScale | None,
    group: dist.ProcessGroup | None = None,
) -> Callable[[Taken, Begin], Stepped]:
    """The function that trains one step of `model`; its loss is the sum over the rank's samples.

    Only the last part's backward pass communicates. The noise scale leaves out a step that is short. Nothing in it waits
    for the device.
    """
    forward = forward_pass(trial, workload, model, precision, strategy)

    def backward(batch: Any, size: int, weight: float, begin: Begin) -> torch.Tensor:
        passed = forward(batch, begin)
        counts.add(passed.outputs, passed.targets)
        begin("backward")
        updater.scaled(passed.loss * weight if weight != 1.0 else passed.loss).backward()
        if noise:
            noise.observe_part()
        return passed.loss.detach().float() * size

    def step(taken: Taken, begin: Begin) -> Stepped:
        each = list(zip(taken.parts, taken.sizes, weights(trial, taken), strict=True))
        with strategy.unsynchronised(model):
            losses = [backward(*part, begin) for part in each[:-1]]
        losses.append(backward(*each[-1], begin))
        if strategy.reduce is not None:
            begin("reduce")
            strategy.reduce(model, group, trial)
        if noise and taken.whole:
            noise.finish_step(updater.scale)
        elif noise:
            noise.skip_step()
        begin("optimizer")
        scale = updater.update()
        return Stepped(torch.stack(losses).sum(), None, scale)

    return step
