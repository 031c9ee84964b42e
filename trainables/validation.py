"""Accuracy: counting what a model gets right, and validation that is exact over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

from trainables.batch import to_device
from trainables.data.loader import loader
from trainables.precision import Precision, autocast, cast_floats
from trainables.trial import Trial
from trainables.workload import Held, Workload

TOP = 5
IMAGE_PIXELS = 32 * 32
SMALL_IMAGES = 512
"""a batch of validation has as many pixels as so many images of 32 x 32, or the trial's own number of samples"""


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many samples have their class among the first 1 and 5 outputs: float64 [2].

    Of equal outputs the one of the lower class comes first, as argmax takes it; outputs that are not numbers are never
    right. outputs [n, classes], targets int64 [n]. Waits for nothing.
    """
    own = outputs.gather(1, targets[:, None])
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    behind = (outputs < own) | ((outputs == own) & (classes >= targets[:, None]))
    before = (~behind).sum(1)
    return torch.stack([(before < 1).sum(), (before < TOP).sum()]).double()


def countable(outputs: object, targets: object) -> bool:
    """Whether these are class scores [n, classes] and class numbers [n]."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and len(outputs) == len(targets)
        and targets.dtype == torch.int64
    )


@dataclass(frozen=True)
class Judged:
    """Sums over samples: their loss, and how many are right within the first one and five classes (None: not countable)."""

    samples: int
    loss: float
    top1: float | None
    top5: float | None


def judge(
    trial: Trial, workload: Workload, held: Held, precision: Precision, device: torch.device, rank: int
) -> Judged:
    """This rank's share of a validation: every `world_size`-th sample from its rank on, so that all ranks together take
    each sample once, whatever the number of samples.

    The model is judged in evaluation mode with the weights and the running statistics that it holds.
    """
    model = workload.model
    training = model.training
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    samples, classes = 0, 0
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for inputs, targets in _batches(trial, workload, held, device, rank):
                with autocast(precision, device):
                    outputs = model(cast_floats(held.prepare(inputs), precision.parameters))
                outputs = cast_floats(outputs, torch.float32)
                size = sample_count(targets)
                samples += size
                sums[0] += held.loss(outputs, targets).double() * size
                if countable(outputs, targets):
                    assert isinstance(targets, torch.Tensor)
                    classes = outputs.shape[1]
                    sums[1:] += right(outputs, targets)
    finally:
        model.train(training)
    loss, first, fifth = sums.tolist()
    return Judged(samples, loss, first if classes else None, fifth if classes > TOP else None)


def _batches(
    trial: Trial, workload: Workload, held: Held, device: torch.device, rank: int
) -> Iterator[tuple[object, object]]:
    """(inputs, targets) on the device."""
    length = len(held.dataset)  # type: ignore[arg-type]
    pixels = SMALL_IMAGES * IMAGE_PIXELS // trial.image_size**2
    size = trial.batch_per_gpu if trial.workload else max(trial.batch_per_gpu, pixels)
    mine = torch.arange(length)[rank :: trial.world_size]
    if not len(mine):
        return
    if workload.gathered:
        assert isinstance(held.dataset, TensorDataset)
        for indices in mine.to(device).split(size):
            inputs, targets = held.dataset.tensors
            yield inputs[indices], targets[indices]
        return
    for batch in loader(trial, workload, held.dataset, [part.tolist() for part in mine.split(size)], trial.seed):
        inputs, targets = to_device(batch, device, trial.non_blocking)
        yield inputs, targets


def sample_count(targets: object) -> int:
    """Samples of a batch, from its targets."""
    while not isinstance(targets, torch.Tensor):
        targets = next(iter(targets.values())) if isinstance(targets, dict) else targets[0]  # type: ignore[index]
    return len(targets)
