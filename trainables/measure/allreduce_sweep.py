"""The ceiling: how fast the same ranks reduce a message of each size when they do nothing else."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from trainables.step.timing import Clock, Row

REPETITIONS = 3
WARMUP = 5
ROUND_S = 0.005
"""all-reduces run back to back for about so long, as in nccl-tests, for a single one is mostly its launch"""
MOST_IN_A_ROUND = 20


def sweep_sizes(largest_bytes: int, buckets: Iterable[int]) -> list[int]:
    """Message sizes in bytes of fp32: powers of four from 4 B to `largest_bytes`, that size itself, and the buckets'."""
    powers = {4**power for power in range(1, int(math.log(largest_bytes, 4) + 1e-9) + 1)}
    return sorted(powers | {largest_bytes // 4 * 4} | {size // 4 * 4 for size in buckets})


def all_reduce_sweep(
    sizes: Iterable[int],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    control: dist.ProcessGroup | None,
    clock: Clock,
) -> list[Row]:
    """Rows of sweep.parquet: for each size, seconds of one all-reduce in each of REPETITIONS rounds; every rank calls it.

    `control` is a gloo group of the same ranks. A round begins with all ranks together; its seconds are the device's.
    """
    sizes = list(sizes)
    buffer = torch.zeros(max(sizes) // 4, device=device)
    rows = []
    for size in sizes:
        message = buffer[: size // 4]

        def round_s(count: int) -> float:
            clock.synchronize()
            dist.barrier(control)
            dist.all_reduce(message, group=group)  # noqa: B023 - ranks leave the barrier apart, and this one together
            begin = clock.mark()
            for _ in range(count):
                dist.all_reduce(message, group=group)  # noqa: B023
            end = clock.mark()
            clock.synchronize()
            return clock.seconds(begin, end) / count

        count = _agreed(min(MOST_IN_A_ROUND, math.ceil(ROUND_S / max(round_s(1), 1e-6))), control)
        if count > 1:  # a message that fills a round alone is not bound by what a first call sets up
            round_s(min(WARMUP, count))
        rows += [
            {"rank": rank, "bytes": size, "repetition": repetition, "seconds": round_s(count)}
            for repetition in range(REPETITIONS)
        ]
    return rows


def _agreed(count: int, control: dist.ProcessGroup | None) -> int:
    """The smallest count of any rank: all must make equally many calls."""
    value = torch.tensor(count)
    dist.all_reduce(value, op=dist.ReduceOp.MIN, group=control)
    return int(value)
