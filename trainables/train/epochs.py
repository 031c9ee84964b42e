"""Iterate over complete epochs: a rank's batches for every optimizer step, see `trainables.data.sampler`."""

from collections.abc import Iterator, Sized
from typing import Any

import torch

from trainables.data.loader import loader, repeated, sampler, started, with_prefetch
from trainables.data.sampler import Parts, rank_steps, seed_of, steps_per_epoch
from trainables.step.context import RankContext
from trainables.step.step import StepBatch
from trainables.trial import Trial
from trainables.workload import WorkloadError

Epochs = Iterator[Iterator[StepBatch]]


def epoch_steps(context: RankContext) -> int:
    """Return the number of optimizer steps per epoch. Collective.

    With a loader of the workload's own: as many as the shortest loader of a rank allows. Raises DataError or
    WorkloadError if there are no epochs.
    """
    trial, workload = context.trial, context.workload
    if workload.loader is None:
        return steps_per_epoch(trial, _length(context))
    batches = context.custom_loader
    counts = context.gather(len(batches) if isinstance(batches, Sized) else None)
    if None in counts:
        raise WorkloadError(
            f"workload {trial.workload!r} has no epochs, because its loader has no length; use epochs 0, or return a "
            "loader with __len__"
        )
    if min(counts) < trial.accumulation_steps:
        raise WorkloadError(
            f"workload {trial.workload!r}: its loader has {min(counts)} batches per epoch, fewer than a step of "
            f"{trial.accumulation_steps}; use a smaller batch"
        )
    return min(counts) // trial.accumulation_steps


def epochs_of(context: RankContext, first: int = 0) -> Epochs:
    """Yield an iterator of steps per epoch, from epoch `first`. Exhaust it before asking for the next epoch.

    Collective with a loader of the workload's own. Raises DataError or WorkloadError if there are no epochs.
    """
    if context.workload.loader is not None:
        return _custom(context, epoch_steps(context), first)
    length = _length(context)
    steps_per_epoch(context.trial, length)
    return (_resident if context.workload.gathered else _loaded)(context, length, first)


def _length(context: RankContext) -> int:
    """Return the number of samples per epoch. Raises WorkloadError if there are no epochs."""
    workload = context.workload
    if workload.samples is None or workload.batch_indices:
        kind, fix = "a stream", "give a map-style data set or a loader that has a length"
        if workload.resident:
            kind, fix = "resident", "omit Workload.resident"
        elif workload.batch_indices:
            kind, fix = "endless", "omit Workload.batch_indices"
        raise WorkloadError(
            f"workload {context.trial.workload!r} has no epochs, because its batches are {kind}; use epochs 0, or {fix}"
        )
    return workload.samples


def _custom(context: RankContext, steps: int, first: int) -> Epochs:
    """Yield the batches of a workload's own loader, one pass per epoch."""
    trial = context.trial
    sizes = [trial.batch_per_process] * trial.accumulation_steps
    for epoch in range(first, trial.epochs):
        batches = with_prefetch(trial, context.workload, repeated(trial, context.custom_loader, "loader", epoch))
        yield (
            StepBatch([next(batches) for _ in sizes], sizes, trial.global_batch, complete=True) for _ in range(steps)
        )


def _resident(context: RankContext, length: int, first: int) -> Epochs:
    """Yield batches of indices on the device, to which they are copied once per epoch."""
    trial, rank, device = context.trial, context.rank, context.device
    for epoch in range(first, trial.epochs):
        steps = list(rank_steps(trial, length, epoch, rank))
        flat = torch.cat([part for parts, _ in steps for part in parts])
        flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        batches = iter(flat.split([len(part) for parts, _ in steps for part in parts]))
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in steps)


def _loaded(context: RankContext, length: int, first: int) -> Epochs:
    """Yield batches from loaders, in processes or in the rank itself."""
    trial, workload, rank = context.trial, context.workload, context.rank
    indices = sampler(trial, workload, rank, first)
    loaded = loader(trial, workload, workload.dataset, indices, seed_of(trial, "loaders", first, rank))
    batches = with_prefetch(trial, workload, started(loaded))
    for epoch in range(first, trial.epochs):
        steps = rank_steps(trial, length, epoch, rank)
        yield (_step_batch(trial, parts, samples, batches) for parts, samples in steps)


def _step_batch(trial: Trial, parts: Parts, samples: int, batches: Iterator[Any]) -> StepBatch:
    complete = samples == trial.global_batch
    return StepBatch([next(batches) for _ in parts], [len(part) for part in parts], samples, complete)
