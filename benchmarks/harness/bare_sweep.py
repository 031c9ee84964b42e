"""The reference of a study's all-reduce sweep: a plain one for torchrun, without Ray or any code of this project.

    torchrun --standalone --nproc-per-node 4 benchmarks/harness/bare_sweep.py cuda 1048576,1073741824 sweep.json

Sizes are bytes of fp32. As in nccl-tests, a warm-up precedes rounds of all-reduces back to back, each timed as a whole.
Rank 0 writes a list of {"rank", "bytes", "repetition", "seconds"}, where seconds are per all-reduce.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WARMUP = 5
REPETITIONS = 5
ITERATIONS = 20
ROUND_S = 0.1
"""Target duration of a round: slow all-reduces get fewer iterations."""


def sweep(sizes: list[int], device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of this rank."""
    buffer = torch.zeros(max(sizes) // 4, device=device)
    rows = []
    for size in sizes:
        message = buffer[: size // 4]
        round_s(message, 1)
        slowest_s = torch.tensor([round_s(message, WARMUP)], device=device)
        dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
        count = max(3, min(ITERATIONS, int(ROUND_S / slowest_s.item())))
        rows += [
            {"rank": dist.get_rank(), "bytes": size, "repetition": repetition, "seconds": round_s(message, count)}
            for repetition in range(REPETITIONS)
        ]
    return rows


def round_s(message: torch.Tensor, count: int) -> float:
    """Return the mean seconds per all-reduce over `count` of them."""
    dist.barrier()
    if message.device.type == "cpu":
        start_s = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(message)
        return (time.perf_counter() - start_s) / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        dist.all_reduce(message)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def main(device_type: str, sizes: list[int], out: Path) -> None:
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sweep(sizes, device))
    if dist.get_rank() == 0:
        out.write_text(json.dumps([row for rows in everyone for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2].split(",")], Path(sys.argv[3]))
