"""Whole epochs: the batches that a rank takes in every optimizer step, see `trainables.data.sampler`."""

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
    """For each epoch from `first` its steps. An epoch's steps are to be taken before the next one is asked for.

    Raises DataError or WorkloadError where the data set has no epochs to train by.
    """
    trial, workload = context.trial, context.workload
    if workload.batch_indices or workload.resident:
        raise WorkloadError(
            f"workload {trial.workload!r} has no epochs: its batches are {'resident' if workload.resident else 'endless'}; "
            "use epochs 0, or leave out Workload.resident and Workload.batch_indices"
        )
    length = len(workload.dataset)  # type: ignore[arg-type]
    steps_per_epoch(trial, length)
    return (_resident if workload.gathered else _loaded)(context, length, first)


def _resident(context: RankContext, length: int, first: int) -> Iterator[Iterator[StepBatch]]:
    """Batches are indices on the device, which they reach once an epoch."""
    trial, rank, device = context.trial, context.rank, context.device
    for epoch in range(first, trial.epochs):
        planned = list(rank_steps(trial, length, epoch, rank))
        flat = torch.cat([part for parts, _ in planned for part in parts])
        flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        batches = iter(flat.split([len(part) for parts, _ in planned for part in parts]))
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in planned)


def _loaded(context: RankContext, length: int, first: int) -> Iterator[Iterator[StepBatch]]:
    """Batches come from loaders, in processes or in the rank itself, in pinned memory where the trial says so."""
    trial, workload, rank = context.trial, context.workload, context.rank
    indices = sampler(trial, workload, rank, first)
    loaded = loader(trial, workload, workload.dataset, indices, seed_of(trial, "loaders", first, rank))
    batches = with_prefetch(trial, workload, iter(loaded))
    for epoch in range(first, trial.epochs):
        planned = rank_steps(trial, length, epoch, rank)
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in planned)


def _step_batch(trial: Trial, parts: Parts, samples: int, batches: Iterator[Any]) -> StepBatch:
    whole = samples == trial.global_batch
    return StepBatch([next(batches) for _ in parts], [len(part) for part in parts], samples, whole)
