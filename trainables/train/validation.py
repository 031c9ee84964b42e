"""Evaluate a model on the held-out samples, divided among the ranks so that each sample counts exactly once."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

from trainables.batch import to_device
from trainables.data.loader import loader, started
from trainables.step.correct import TOP_K, are_class_scores, count_correct
from trainables.step.precision import Precision, autocast, cast_floats
from trainables.trial import Trial
from trainables.workload import HeldOutSet, Workload, pair

BATCH_PIXELS = 512 * 32 * 32
"""minimum number of pixels in a validation batch, unless the workload is a user's own"""


@dataclass(frozen=True)
class EvaluationSums:
    """Sums of the loss and of correct predictions over samples. None if outputs are no scores of enough classes."""

    samples: int
    loss: float
    top1: float | None
    top5: float | None


def evaluate(
    trial: Trial, workload: Workload, held_out: HeldOutSet, precision: Precision, device: torch.device, rank: int
) -> EvaluationSums:
    """Evaluate this rank's share of the held-out samples: every `world_size`-th sample, starting from sample `rank`.

    The model runs in evaluation mode, with its current weights and running statistics.
    """
    model = workload.model
    training = model.training
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    samples, classes = 0, 0
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch, size in _batches(trial, workload, held_out, device, rank):
                samples += size
                with autocast(precision, device):
                    if held_out.step is not None:
                        batch = cast_floats(batch, precision.parameters)
                        sums[0] += held_out.step(model, batch).double() * size
                        continue
                    inputs, targets = pair(batch)
                    outputs = model(cast_floats(held_out.prepare(inputs), precision.parameters))
                outputs = cast_floats(outputs, torch.float32)
                assert held_out.loss is not None
                sums[0] += held_out.loss(outputs, targets).double() * size
                if are_class_scores(outputs, targets):
                    assert isinstance(targets, torch.Tensor)
                    classes = outputs.shape[1]
                    sums[1:] += count_correct(outputs, targets)
    finally:
        model.train(training)
    loss, top1, top5 = sums.tolist()
    return EvaluationSums(samples, loss, top1 if classes else None, top5 if classes > TOP_K else None)


def _batches(
    trial: Trial, workload: Workload, held_out: HeldOutSet, device: torch.device, rank: int
) -> Iterator[tuple[object, int]]:
    """Yield (batch, samples) of this rank's samples, on the device."""
    length = len(held_out.dataset)  # type: ignore[arg-type]
    size = trial.batch_per_gpu if trial.workload else max(trial.batch_per_gpu, BATCH_PIXELS // trial.image_size**2)
    rank_indices = torch.arange(length)[rank :: trial.world_size]
    if not len(rank_indices):
        return
    if workload.gathered:
        assert isinstance(held_out.dataset, TensorDataset)
        for indices in rank_indices.to(device).split(size):
            inputs, targets = held_out.dataset.tensors
            yield (inputs[indices], targets[indices]), len(indices)
        return
    index_batches = [part.tolist() for part in rank_indices.split(size)]
    batches = started(loader(trial, workload, held_out.dataset, index_batches, trial.seed))
    for batch, indices in zip(batches, index_batches, strict=True):
        yield to_device(batch, device, trial.non_blocking), len(indices)
