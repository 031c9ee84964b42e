"""Accuracy: counting what a model gets right, and validation that is exact over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

from trainables.batch import to_device
from trainables.data.loader import loader
from trainables.step.correct import IMAGE_PIXELS, SMALL_IMAGES, TOP, countable, right, sample_count
from trainables.step.precision import Precision, autocast, cast_floats
from trainables.trial import Trial
from trainables.workload import HeldOutSet, Workload


@dataclass(frozen=True)
class EvaluationSums:
    """Sums over samples: their loss, and how many are right within the first one and five classes (None: not countable)."""

    samples: int
    loss: float
    top1: float | None
    top5: float | None


def judge(
    trial: Trial, workload: Workload, held: HeldOutSet, precision: Precision, device: torch.device, rank: int
) -> EvaluationSums:
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
    return EvaluationSums(samples, loss, first if classes else None, fifth if classes > TOP else None)


def _batches(
    trial: Trial, workload: Workload, held: HeldOutSet, device: torch.device, rank: int
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
