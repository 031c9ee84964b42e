"""Measure the all-reduce limit: the time of an all-reduce by message size, when the ranks do nothing else."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from trainables.step.timing import Clock, Row

REPETITIONS = 3
WARMUP = 5
ROUND_S = 0.005
"""approximate duration of a round of back-to-back all-reduces, as in nccl-tests; a single one is mostly launch time"""
MAX_CALLS_PER_ROUND = 20


def sweep_sizes(largest_bytes: int, buckets: Iterable[int]) -> list[int]:
    """Return message sizes in bytes of fp32: powers of four from 4 B to `largest_bytes`, `largest_bytes`, buckets.

    A bucket may be smaller than one number of fp32, as a flag that ranks of DeepSpeed agree on is.
    """
    powers = {4**power for power in range(1, int(math.log(largest_bytes, 4) + 1e-9) + 1)}
    return sorted(powers | {max(4, size // 4 * 4) for size in (largest_bytes, *buckets)})


def all_reduce_sweep(
    sizes: Iterable[int],
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    control: dist.ProcessGroup | None,
    clock: Clock,
) -> list[Row]:
    """Return the rows of sweep.parquet: seconds per all-reduce, per size and round, on this rank. Collective.

    There are REPETITIONS rounds per size. All ranks start a round together; its seconds are device time. `control` is a
    gloo group of the same ranks.
    """
    sizes = list(sizes)
    buffer = torch.zeros(max(sizes) // 4, device=device)
    rows = []
    for size in sizes:
        message = buffer[: size // 4]

        def round_s(count: int) -> float:
            clock.synchronize()
            dist.barrier(control)
            dist.all_reduce(message, group=group)  # noqa: B023 - aligns the ranks, which leave the barrier apart
            start = clock.mark()
            for _ in range(count):
                dist.all_reduce(message, group=group)  # noqa: B023
            end = clock.mark()
            clock.synchronize()
            return clock.seconds(start, end) / count

        count = _min_over_ranks(min(MAX_CALLS_PER_ROUND, math.ceil(ROUND_S / max(round_s(1), 1e-6))), control)
        if count > 1:  # a single message that fills a round needs no warm-up
            round_s(min(WARMUP, count))
        rows += [
            {"rank": rank, "bytes": size, "repetition": repetition, "seconds": round_s(count)}
            for repetition in range(REPETITIONS)
        ]
    return rows


def _min_over_ranks(count: int, control: dist.ProcessGroup | None) -> int:
    """Return the smallest count of any rank, because all ranks must make the same number of calls."""
    value = torch.tensor(count)
    dist.all_reduce(value, op=dist.ReduceOp.MIN, group=control)
    return int(value)
