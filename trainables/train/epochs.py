"""Iterate over complete epochs: a rank's batches for every optimizer step, see `trainables.data.sampler`."""

from collections.abc import Iterator
from typing import Any

import torch

from trainables.data.loader import loader, sampler, with_prefetch
from trainables.data.sampler import Parts, rank_steps, seed_of, steps_per_epoch
from trainables.step.context import RankContext
from trainables.step.step import StepBatch
from trainables.trial import Trial
from trainables.workload import WorkloadError


def epochs_of(context: RankContext, first: int = 0) -> Iterator[Iterator[StepBatch]]:
    """Yield an iterator of steps per epoch, from epoch `first`. Exhaust it before asking for the next epoch.

    Raises DataError or WorkloadError if the data set has no epochs.
    """
    trial, workload = context.trial, context.workload
    if workload.batch_indices or workload.resident:
        raise WorkloadError(
            f"workload {trial.workload!r} has no epochs, because its batches are "
            f"{'resident' if workload.resident else 'endless'}; "
            "use epochs 0, or omit Workload.resident and Workload.batch_indices"
        )
    length = len(workload.dataset)  # type: ignore[arg-type]
    steps_per_epoch(trial, length)
    return (_resident if workload.gathered else _loaded)(context, length, first)


def _resident(context: RankContext, length: int, first: int) -> Iterator[Iterator[StepBatch]]:
    """Yield batches of indices on the device, to which they are copied once per epoch."""
    trial, rank, device = context.trial, context.rank, context.device
    for epoch in range(first, trial.epochs):
        steps = list(rank_steps(trial, length, epoch, rank))
        flat = torch.cat([part for parts, _ in steps for part in parts])
        flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        batches = iter(flat.split([len(part) for parts, _ in steps for part in parts]))
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in steps)


def _loaded(context: RankContext, length: int, first: int) -> Iterator[Iterator[StepBatch]]:
    """Yield batches from loaders, in processes or in the rank itself."""
    trial, workload, rank = context.trial, context.workload, context.rank
    indices = sampler(trial, workload, rank, first)
    loaded = loader(trial, workload, workload.dataset, indices, seed_of(trial, "loaders", first, rank))
    batches = with_prefetch(trial, workload, iter(loaded))
    for epoch in range(first, trial.epochs):
        steps = rank_steps(trial, length, epoch, rank)
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in steps)


def _step_batch(trial: Trial, parts: Parts, samples: int, batches: Iterator[Any]) -> StepBatch:
    complete = samples == trial.global_batch
    return StepBatch([next(batches) for _ in parts], [len(part) for part in parts], samples, complete)
