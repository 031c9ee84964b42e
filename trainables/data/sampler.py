"""Which samples a rank takes: endless batches of timed windows, and the batches of each optimizer step of an epoch.

An epoch of a training is a shuffle of the data set, and each optimizer step takes the next `global_batch` of it, whatever
the number of ranks and of parts: so one rank and many, or one batch and several accumulated ones, train on the same samples.
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
"""indices of the samples of a rank's step, one tensor for each backward pass"""


class RankSampler(Sampler[list[int]]):
    """Index batches of one rank, epoch after epoch without a pause, so that loader processes live through all of them.

    A timed trial has no end of epochs. Each is one order shared by all ranks: a shuffle (seed + epoch, as
    DistributedSampler's set_epoch does; seed alone if `set_epoch` is False, so that every epoch repeats the first), or the
    data set's own order with `order="in_order"`. Rank r takes each world_size-th index from r, and the few left over are
    dropped. Batches run on across the end of an epoch, so that loaders never drain and every batch has the same size.

    A training has the epochs from `first_epoch` to the trial's last, and the batches are those of `rank_steps`.

    With `numbered` the epoch is encoded too: epoch * length + index in place of the index.
    """

    def __init__(self, trial: Trial, length: int, rank: int, *, first_epoch: int = 0, numbered: bool = False):
        if length < trial.processes:
            raise DataError(
                f"the data set has {length} samples, fewer than its {trial.processes} ranks; "
                "use a larger one or fewer ranks"
            )
        self.trial, self.length, self.rank = trial, length, rank
        self.first_epoch, self.numbered = first_epoch, numbered

    def __iter__(self) -> Iterator[list[int]]:
        return self._of_epochs() if self.trial.epochs else self._endless()

    def _of_epochs(self) -> Iterator[list[int]]:
        for epoch in range(self.first_epoch, self.trial.epochs):
            for parts, _ in rank_steps(self.trial, self.length, epoch, self.rank):
                yield from (self._numbers(part, epoch) for part in parts)

    def _endless(self) -> Iterator[list[int]]:
        ranks, even = self.trial.processes, self.length - self.length % self.trial.processes
        shares = (
            self._numbers(epoch_order(self.trial, self.length, epoch, self.rank)[self.rank : even : ranks], epoch)
            for epoch in itertools.count(self.first_epoch)
        )
        return batched(itertools.chain.from_iterable(shares), self.trial.batch_per_process)

    def _numbers(self, indices: torch.Tensor, epoch: int) -> list[int]:
        return (indices + epoch * self.length if self.numbered else indices).tolist()


def batched(indices: Iterable[int], size: int) -> Iterator[list[int]]:
    """Lists of `size` indices each; the last ones that do not fill one are dropped."""
    numbers = iter(indices)
    while len(batch := list(itertools.islice(numbers, size))) == size:
        yield batch


def epoch_order(trial: Trial, length: int, epoch: int, rank: int) -> torch.Tensor:
    """All indices, int64 [length], in the order of an epoch.

    The ranks of a training without `shared_shuffle` have a shuffle each; in all other trials they share one.
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
    """A seed of 63 bits; for unlike uses, epochs, ranks, repeats or seeds of trials what follows from it is unrelated."""
    number = 1 + ("shuffle", "epoch", "loaders").index(use)
    [seed] = np.random.SeedSequence([trial.seed, trial.repeat, epoch, rank, number]).generate_state(1, np.uint64)
    return int(seed >> np.uint64(1))


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


def rank_steps(trial: Trial, length: int, epoch: int, rank: int) -> Iterator[tuple[Parts, int]]:
    """(parts of the rank, samples of all ranks) for each step of an epoch, counted from 0.

    With `shared_shuffle` the ranks divide one shuffle, and no sample of an epoch comes twice (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 3); else each takes its share of a shuffle of its own.
    """
    order = epoch_order(trial, length, epoch, rank)
    for batch in order.split(trial.global_batch)[: steps_per_epoch(trial, length)]:
        mine = batch[rank :: trial.world_size]
        # as many parts on all ranks as the largest share needs, for a part may communicate
        largest = math.ceil(len(batch) / trial.world_size)
        parts = min(math.ceil(largest / trial.batch_per_gpu), max(1, len(mine)))
        yield list(mine.tensor_split(parts)), len(batch)
