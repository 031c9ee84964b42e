"""Decide when a window may end: from the confidence interval of its step time, and from the progress of its loaders.

A window that may end early runs in blocks. Its interval is computed from block means and corrected for repeated checks.
Without correction, frequent checks of an interval sooner or later find a narrow one by chance. The error probability
is therefore divided among all possible checks (Bonferroni's spending of alpha; Jennison and Turnbull, "Group Sequential
Methods", 2000, chapter 7), so that the interval at which a window ends still covers the mean in at least 95 of 100
cases. Correlated blocks carry less information than independent ones, so the interval is widened according to their
correlation. `benchmarks/truth/stopping.py` measures the coverage. Intervals are computed on logarithms, because a step
time is off by a factor rather than by an additive term.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from scipy.special import stdtrit

CHECKS = (5, 7, 10, 14, 20)
"""numbers of blocks after which the interval is checked; few, because each check widens it"""

MAX_BLOCKS = CHECKS[-1]
CONFIDENCE = 0.95

MAX_CORRELATION = 0.8
"""A few blocks cannot establish a higher correlation. It makes the interval three times as wide."""

MIN_PRODUCED = 0.9
"""share of the consumed batches that loaders must have produced within a window; see `Trial.window_steps`"""


def block_lengths(min_steps: int, max_steps: int) -> list[int]:
    """Return the steps per block of a window of `max_steps` steps.

    The first block is longer if the first check would otherwise come before `min_steps` steps.
    """
    length = math.ceil(max_steps / MAX_BLOCKS)
    first = min(max_steps, max(length, min_steps - (CHECKS[0] - 1) * length))
    full, rest = divmod(max_steps - first, length)
    return [first, *[length] * full, *([rest] if rest else [])]


def blocks_between_checks(lengths: Sequence[int]) -> list[Sequence[int]]:
    """Split the block lengths into runs, with a check after each run."""
    ends = [0, *(check for check in CHECKS if check < len(lengths)), len(lengths)]
    return [lengths[first:end] for first, end in pairwise(ends)]


def doubling_lengths(first: int, max_steps: int) -> list[int]:
    """Return the steps per block, `max_steps` in total. Each block after the first doubles the steps so far."""
    lengths = [min(first, max_steps)]
    while (steps := sum(lengths)) < max_steps:
        lengths.append(min(steps, max_steps - steps))
    return lengths


def all_agree(vote: bool, control: dist.ProcessGroup | None, distributed: bool) -> bool:
    """Return True if every rank of `control` votes True. Collective if `distributed`."""
    votes = torch.tensor([int(vote)])
    if distributed:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=control)
    return bool(votes)


def relative_width(block_step_s: Sequence[float]) -> float:
    """Return the width of the confidence interval of the mean step time, relative to the mean.

    Student's t interval of the logarithms of the block means, `block_step_s`, in seconds per step. The confidence of
    0.95 holds for all `CHECKS` together. Infinite before the first check. The mean of a first-order autoregressive
    series has (1 + r) / (1 - r) times the variance of the mean of independent values (Bartlett 1946).
    """
    blocks = len(block_step_s)
    if blocks < CHECKS[0]:
        return math.inf
    logs = [math.log(step_s) for step_s in block_step_s]
    correlation = block_correlation(logs)
    quantile = float(stdtrit(blocks - 1, 1 - (1 - CONFIDENCE) / (2 * len(CHECKS))))
    half = quantile * statistics.stdev(logs) * math.sqrt((1 + correlation) / (1 - correlation) / blocks)
    return 2 * math.sinh(half)


def block_correlation(values: Sequence[float]) -> float:
    """Return the correlation of neighbouring values, from 0 to `MAX_CORRELATION`. 0 if all values are equal.

    Requires more than 3 values. Corrects the estimate from n values, which is too low by (1 + 3 r) / n (Marriott and
    Pope 1954, Kendall 1954).
    """
    count, mean = len(values), statistics.fmean(values)
    deviations = [value - mean for value in values]
    squares = math.fsum(value * value for value in deviations)
    if squares == 0:
        return 0.0
    estimate = math.fsum(a * b for a, b in pairwise(deviations)) / squares
    return min(max((estimate + 1 / count) / (1 - 3 / count), 0.0), MAX_CORRELATION)


def interval_is_narrow(
    width: float, control: dist.ProcessGroup | None, distributed: bool, block_step_s: Sequence[float]
) -> bool:
    """Return True if the first rank of `control` finds its interval narrower than `width`, so that the window may end.

    Collective if `distributed`: the other ranks receive the first rank's result.
    """
    narrow = torch.tensor([relative_width(block_step_s) <= width])
    if distributed:
        dist.broadcast(narrow, group=control, group_src=0)
    return bool(narrow)


def loaders_kept_up(
    delivered: Sequence[torch.Tensor],
    before: Sequence[int],
    batches: Sequence[int],
    control: dist.ProcessGroup | None,
    distributed: bool,
    block_step_s: Sequence[float],
) -> bool:
    """Return True if, on every rank, loaders and prefetch thread have produced enough batches for the window to end.

    Enough is at least `MIN_PRODUCED` of the batches consumed since `before`. Always True if there is only one block.
    Then at most 10 % of the batches were ready beforehand, the throughput exceeds the sustainable one by at most that
    share, and the window may end before `Trial.window_steps`.

    delivered: batches produced so far, per source. before: the same at the start of the window, with the batches that
    were then in work. batches: consumed per block. Collective over `control` if `distributed`.
    """
    if len(batches) == 1:
        return True
    consumed = sum(batches[: len(block_step_s)])
    produced = [int(counts.sum()) - start for counts, start in zip(delivered, before, strict=True)]
    return all_agree(min(produced) >= MIN_PRODUCED * consumed, control, distributed)
