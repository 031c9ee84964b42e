"""When a window has seen enough: the interval of its step time, from block means, corrected for every look at it.

A window that may stop early runs in blocks. Whoever looks often at an interval sees a lucky one sooner or later: the
chance to be wrong is divided among all looks that there can be (Bonferroni's spending of alpha; Jennison and Turnbull,
"Group Sequential Methods", 2000, chapter 7), so that the interval at which a window stops still covers in at least 95
of 100 cases. Neighbouring blocks may be alike, and their mean then knows less than as many independent ones: the
interval is wider by what their correlation says. `benchmarks/truth/stopping.py` tells what it covers.
Logarithms: a step time has a factor, not a term, by which it may be off.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from scipy.special import stdtrit

LOOKS = (5, 7, 10, 14, 20)
"""numbers of blocks after which the interval is looked at; few, for each look widens it"""

MOST_BLOCKS = LOOKS[-1]
CONFIDENCE = 0.95

MOST_CORRELATION = 0.8
"""more is not told from a few blocks; it makes an interval three times as wide"""

KEPT_UP = 0.9
"""the part of a window's batches that loaders must have made within it for the window to end; see `Trial.window_steps`"""


def block_lengths(least: int, most: int) -> list[int]:
    """Steps of each block of a window of `most` steps. The first block is longer where `least` steps would else not
    have passed at the first look."""
    length = math.ceil(most / MOST_BLOCKS)
    first = min(most, max(length, least - (LOOKS[0] - 1) * length))
    whole, rest = divmod(most - first, length)
    return [first, *[length] * whole, *([rest] if rest else [])]


def between_looks(lengths: Sequence[int]) -> list[Sequence[int]]:
    """The blocks of these lengths in runs, each of which ends with a look."""
    ends = [0, *(look for look in LOOKS if look < len(lengths)), len(lengths)]
    return [lengths[first:end] for first, end in pairwise(ends)]


def doubling_lengths(first: int, most: int) -> list[int]:
    """Steps of blocks that each double what has been seen, from `first` to `most` steps in all."""
    lengths = [min(first, most)]
    while (seen := sum(lengths)) < most:
        lengths.append(min(seen, most - seen))
    return lengths


def all_agree(verdict: bool, control: dist.ProcessGroup | None, shared: bool) -> bool:
    """Whether every rank of `control` says yes; `shared`: there are others, and all call this."""
    votes = torch.tensor([int(verdict)])
    if shared:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=control)
    return bool(votes)


def relative_width(block_step_s: Sequence[float]) -> float:
    """Width of the interval of the mean step time, relative to it: Student's t on the logarithms of block means.

    `block_step_s`: seconds of a step in each block. Its confidence of 0.95 is for all `LOOKS` together. Infinite before
    the first of them. The mean of a first-order autoregressive series has (1 + r) / (1 - r) times the variance that its
    values have as independent ones (Bartlett 1946).
    """
    seen = len(block_step_s)
    if seen < LOOKS[0]:
        return math.inf
    logs = [math.log(step_s) for step_s in block_step_s]
    correlation = block_correlation(logs)
    quantile = float(stdtrit(seen - 1, 1 - (1 - CONFIDENCE) / (2 * len(LOOKS))))
    half = quantile * statistics.stdev(logs) * math.sqrt((1 + correlation) / (1 - correlation) / seen)
    return 2 * math.sinh(half)


def block_correlation(values: Sequence[float]) -> float:
    """Correlation of neighbours, from 0 to `MOST_CORRELATION`; its estimate from n values is low by (1 + 3 r) / n, which is
    put right (Marriott and Pope 1954, Kendall 1954). Needs more than 3 values; 0 where all are equal."""
    seen, mean = len(values), statistics.fmean(values)
    apart = [value - mean for value in values]
    squares = math.fsum(value * value for value in apart)
    if squares == 0:
        return 0.0
    found = math.fsum(a * b for a, b in pairwise(apart)) / squares
    return min(max((found + 1 / seen) / (1 - 3 / seen), 0.0), MOST_CORRELATION)


def seen_enough(width: float, control: dist.ProcessGroup | None, shared: bool, block_step_s: Sequence[float]) -> bool:
    """Whether a window may end: its interval is narrower than `width`, as the first rank of `control` sees it.

    `shared`: other ranks, which call this after the same blocks, learn it from that one.
    """
    verdict = torch.tensor([relative_width(block_step_s) <= width])
    if shared:
        dist.broadcast(verdict, group=control, group_src=0)
    return bool(verdict)


def loaders_kept_up(
    delivered: Sequence[torch.Tensor],
    before: Sequence[int],
    batches: Sequence[int],
    control: dist.ProcessGroup | None,
    shared: bool,
    block_step_s: Sequence[float],
) -> bool:
    """Whether on every rank of `control` loaders, and what works ahead, made nine tenths of the `batches` that the blocks so
    far took each, since they had made `before`; at once where there can be no second block.

    `delivered`: batches made so far, by each kind. `shared`: there are other ranks, and all call this. Then less than a
    tenth of the batches was ready beforehand, and the throughput is at most that much above what can last; and the window
    need not last as long as it must where nothing is known of the loaders (`Trial.window_steps`).
    """
    if len(batches) == 1:
        return True
    taken = sum(batches[: len(block_step_s)])
    made = [int(each.sum()) - already for each, already in zip(delivered, before, strict=True)]
    return all_agree(min(made) >= KEPT_UP * taken, control, shared)
