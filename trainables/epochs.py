"""Whole epochs: which samples every rank takes in every optimizer step, and the batches themselves.

An epoch is a shuffle of the data set, and each optimizer step takes the next `global_batch` of it, whatever the number of
ranks and of parts: so one rank and many, or one batch and several accumulated ones, train on the same samples.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from trainables.data import DataError
from trainables.data.loader import beside_the_step, loader
from trainables.trial import Trial
from trainables.workload import Workload, WorkloadError

Parts = list[torch.Tensor]
"""indices of the samples of a rank's step, one tensor for each backward pass"""


@dataclass(frozen=True)
class Taken:
    """A rank's part of one optimizer step.

    parts: one batch for each backward pass. sizes: their samples. samples: those of all ranks. whole: the step has
    `global_batch` of them, as all but an epoch's last have.
    """

    parts: list[Any]
    sizes: list[int]
    samples: int
    whole: bool


def steps_per_epoch(trial: Trial, length: int) -> int:
    """Optimizer steps of an epoch of `length` samples.

    A last batch that is short is taken as it is, unless it leaves a rank with fewer than two samples: batch
    normalisation cannot do with one, and averaging needs some of every rank. Raises DataError where the data set has
    fewer samples than one global batch.
    """
    if length < trial.global_batch:
        raise DataError(
            f"the data set has {length} samples, fewer than one global batch of {trial.global_batch} "
            f"({trial.world_size} ranks x {trial.batch_per_gpu} x {trial.accumulation_steps}): use a smaller batch"
        )
    whole, left = divmod(length, trial.global_batch)
    return whole + (left >= 2 * trial.world_size)


def seed_of(trial: Trial, use: str, epoch: int, rank: int) -> int:
    """A seed of 63 bits; for unlike uses, epochs, ranks, repeats or seeds of trials what follows from it is unrelated."""
    number = 1 + ("shuffle", "epoch", "loaders").index(use)
    [seed] = np.random.SeedSequence([trial.seed, trial.repeat, epoch, rank, number]).generate_state(1, np.uint64)
    return int(seed >> np.uint64(1))


def rank_steps(trial: Trial, length: int, epoch: int, rank: int) -> Iterator[tuple[Parts, int]]:
    """(parts of the rank, samples of all ranks) for each step of an epoch, counted from 0.

    With `shared_shuffle` the ranks divide one shuffle, and no sample of an epoch comes twice (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 3); else each takes its share of a shuffle of its own.
    """
    order = _order(trial, length, epoch if trial.set_epoch else 0, rank)
    for batch in order.split(trial.global_batch)[: steps_per_epoch(trial, length)]:
        mine = batch[rank :: trial.world_size]
        # as many parts on all ranks as the largest share needs, for a part may communicate
        largest = math.ceil(len(batch) / trial.world_size)
        parts = min(math.ceil(largest / trial.batch_per_gpu), max(1, len(mine)))
        yield list(mine.tensor_split(parts)), len(batch)


def _order(trial: Trial, length: int, epoch: int, rank: int) -> torch.Tensor:
    """All indices, int64 [length], in the order of an epoch."""
    if trial.order == "in_order":
        return torch.arange(length)
    seed = seed_of(trial, "shuffle", epoch, 0 if trial.shared_shuffle else 1 + rank)
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


class EpochBatches(Sampler[list[int]]):
    """Index lists of all batches of a rank from one epoch to another, so that loader processes live through all of them.

    With `numbered` the epoch is told too: epoch * length + index in place of the index.
    """

    def __init__(self, trial: Trial, length: int, rank: int, first: int, numbered: bool):
        self.trial, self.length, self.rank, self.first, self.numbered = trial, length, rank, first, numbered

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in range(self.first, self.trial.epochs):
            offset = epoch * self.length if self.numbered else 0
            for parts, _ in rank_steps(self.trial, self.length, epoch, self.rank):
                for part in parts:
                    yield (part + offset).tolist()


def epochs_of(
    trial: Trial, workload: Workload, rank: int, device: torch.device, first: int = 0
) -> Iterator[Iterator[Taken]]:
    """For each epoch from `first` its steps. An epoch's steps are to be taken before the next one is asked for.

    Raises DataError or WorkloadError where the data set has no epochs to train by.
    """
    if workload.batch_indices or workload.resident:
        raise WorkloadError(
            f"workload {trial.workload!r} has no epochs: its batches are {'resident' if workload.resident else 'endless'}; "
            "use epochs 0, or leave out Workload.resident and Workload.batch_indices"
        )
    length = len(workload.dataset)  # type: ignore[arg-type]
    steps_per_epoch(trial, length)
    return (_resident if workload.gathered else _loaded)(trial, workload, length, rank, device, first)


def _resident(
    trial: Trial, workload: Workload, length: int, rank: int, device: torch.device, first: int
) -> Iterator[Iterator[Taken]]:
    """Batches are indices on the device, which they reach once an epoch."""
    for epoch in range(first, trial.epochs):
        planned = list(rank_steps(trial, length, epoch, rank))
        flat = torch.cat([part for parts, _ in planned for part in parts])
        flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
        batches = iter(flat.split([len(part) for parts, _ in planned for part in parts]))
        yield (_taken(trial, parts, samples, batches) for parts, samples in planned)


def _loaded(
    trial: Trial, workload: Workload, length: int, rank: int, device: torch.device, first: int
) -> Iterator[Iterator[Taken]]:
    """Batches come from loaders, in processes or in the rank itself, in pinned memory where the trial says so."""
    numbered = getattr(workload.dataset, "numbers_epochs", False)
    indices = EpochBatches(trial, length, rank, first, numbered)
    loaded = loader(trial, workload, workload.dataset, indices, seed_of(trial, "loaders", first, rank))
    batches = beside_the_step(trial, workload, iter(loaded))
    for epoch in range(first, trial.epochs):
        planned = rank_steps(trial, length, epoch, rank)
        yield (_taken(trial, parts, samples, batches) for parts, samples in planned)


def _taken(trial: Trial, parts: Parts, samples: int, batches: Iterator[Any]) -> Taken:
    whole = samples == trial.global_batch
    return Taken([next(batches) for _ in parts], [len(part) for part in parts], samples, whole)
