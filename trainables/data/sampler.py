"""Choose the samples of each rank: endless batches for timed windows, one list per optimizer step for trainings.

An epoch of a training is one shuffle of the data set. Each optimizer step takes its next `global_batch` samples,
whatever the number of ranks and of accumulated parts. So one rank and many, or one batch and several accumulated ones,
train on the same samples.
"""

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from trainables.data.source import DataError
from trainables.trial import Trial

Parts = list[torch.Tensor]
"""sample indices of one rank's optimizer step, one tensor per backward pass"""


class RankSampler(Sampler[list[int]]):
    """Index batches of one rank. Epochs follow without a pause, so that loader processes survive them.

    A timed trial never ends. All ranks share one order per epoch: a shuffle, or the data set's own order if
    `order="in_order"`. The shuffle's seed is seed + epoch, as with DistributedSampler's set_epoch; with
    `set_epoch=False` it is the seed alone, and every epoch repeats the first. Rank r takes every world_size-th index,
    starting at r; the remainder is dropped. Batches continue across the end of an epoch, so that loaders never drain
    and all batches have the same size.

    A training has the epochs from `first_epoch` to the trial's last one, with the batches of `rank_steps`.

    With `numbered=True`, indices encode the epoch: epoch * length + index.
    """

    def __init__(self, trial: Trial, length: int, rank: int, *, first_epoch: int = 0, numbered: bool = False):
        if length < trial.processes:
            raise DataError(
                f"the data set has {length} samples, fewer than its {trial.processes} ranks; "
                "use a larger data set or fewer ranks"
            )
        self.trial, self.length, self.rank = trial, length, rank
        self.first_epoch, self.numbered = first_epoch, numbered

    def __iter__(self) -> Iterator[list[int]]:
        return self._training_batches() if self.trial.epochs else self._endless_batches()

    def _training_batches(self) -> Iterator[list[int]]:
        for epoch in range(self.first_epoch, self.trial.epochs):
            for parts, _ in rank_steps(self.trial, self.length, epoch, self.rank):
                yield from (self._numbers(part, epoch) for part in parts)

    def _endless_batches(self) -> Iterator[list[int]]:
        ranks = self.trial.processes
        divisible_length = self.length - self.length % ranks
        shares = (
            self._numbers(
                epoch_order(self.trial, self.length, epoch, self.rank)[self.rank : divisible_length : ranks], epoch
            )
            for epoch in itertools.count(self.first_epoch)
        )
        return batched(itertools.chain.from_iterable(shares), self.trial.batch_per_process)

    def _numbers(self, indices: torch.Tensor, epoch: int) -> list[int]:
        return (indices + epoch * self.length if self.numbered else indices).tolist()


def batched(indices: Iterable[int], size: int) -> Iterator[list[int]]:
    """Yield lists of `size` indices. An incomplete last list is dropped."""
    numbers = iter(indices)
    while len(batch := list(itertools.islice(numbers, size))) == size:
        yield batch


def epoch_order(trial: Trial, length: int, epoch: int, rank: int) -> torch.Tensor:
    """Return all indices, int64 [length], in the order of an epoch.

    In a training without `shared_shuffle`, every rank has its own shuffle. In all other trials the ranks share one.
    """
    if trial.order == "in_order":
        return torch.arange(length)
    epoch = epoch if trial.set_epoch else 0
    seed = (
        seed_of(trial, "shuffle", epoch, 0 if trial.shared_shuffle else 1 + rank)
        if trial.epochs
        else trial.seed + epoch
    )
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


def seed_of(trial: Trial, use: str, epoch: int, rank: int) -> int:
    """Return a 63-bit seed, statistically independent for each use, epoch, rank, repeat and trial seed."""
    number = 1 + ("shuffle", "epoch", "loaders").index(use)
    [seed] = np.random.SeedSequence([trial.seed, trial.repeat, epoch, rank, number]).generate_state(1, np.uint64)
    return int(seed >> np.uint64(1))


def steps_per_epoch(trial: Trial, length: int) -> int:
    """Return the number of optimizer steps in an epoch of `length` samples.

    A short last batch counts, unless it leaves any rank fewer than two samples: batch normalisation needs more than
    one, and averaging needs samples on every rank. Raises DataError if the data set is smaller than one global batch.
    """
    if length < trial.global_batch:
        raise DataError(
            f"the data set has {length} samples, fewer than one global batch of {trial.global_batch} "
            f"({trial.world_size} ranks x {trial.batch_per_gpu} x {trial.accumulation_steps}); use a smaller batch"
        )
    full_steps, remainder = divmod(length, trial.global_batch)
    return full_steps + (remainder >= 2 * trial.world_size)


def rank_steps(trial: Trial, length: int, epoch: int, rank: int) -> Iterator[tuple[Parts, int]]:
    """Yield (parts of this rank, samples of all ranks) for each step of an epoch. Epochs are counted from 0.

    With `shared_shuffle`, the ranks divide one shuffle, and no sample occurs twice in an epoch (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 3). Without it, each rank takes its share of its own shuffle.
    """
    order = epoch_order(trial, length, epoch, rank)
    for batch in order.split(trial.global_batch)[: steps_per_epoch(trial, length)]:
        share = batch[rank :: trial.world_size]
        # A part may communicate, so all ranks need as many parts as the largest share.
        largest_share = math.ceil(len(batch) / trial.world_size)
        parts = min(math.ceil(largest_share / trial.batch_per_gpu), max(1, len(share)))
        yield list(share.tensor_split(parts)), len(batch)
