"""The reference of `overhead.py`: a plain training loop for torchrun, without Ray or any code of the study.

Torchrun starts it once. It sleeps until `DIR/go-<k>.json` exists ({"model", "batch", "precision", "image_size", "ddp",
"warmup_steps", "steps"}; {} stops it). Then it builds a new model, warms up and times the steps. Rank 0 writes the
slowest rank's wall seconds to `DIR/done-<k>.json`. A job with "blocks" times that many blocks as one "side" of the
turns in the folder "turns" (`turns.py`); side "A" takes the place of the study.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.turns import LEAD_STEPS, Turns


def measure(job: dict[str, Any], device: torch.device) -> float:
    """Return the wall seconds of the timed steps on this rank, with the device synchronised at both ends."""
    step = training(job, device)
    for _ in range(job["warmup_steps"]):
        step()
    return in_blocks(step, job, device) if "blocks" in job else timed_s(step, job["steps"], device)


def in_blocks(step: Callable[[], None], job: dict[str, Any], device: torch.device) -> float:
    """Time a block of steps at each turn of this side. Write the seconds to this rank's file and return their sum."""
    seconds = []
    folder, side = Path(job["turns"]), job["side"]
    turns = Turns(folder / "turns", side, dist.get_rank())
    for _ in range(job["blocks"]):
        turns.start()
        for _ in range(LEAD_STEPS):
            step()
        seconds.append(timed_s(step, job["steps"], device))
        turns.end()
    (folder / f"{'bare' if side == 'B' else 'ours'}-{dist.get_rank()}.json").write_text(json.dumps(seconds))
    return sum(seconds)


def timed_s(step: Callable[[], None], steps: int, device: torch.device, group: Any = None) -> float:
    """Return the wall seconds of `steps` steps on this rank.

    The device is synchronised at both ends, and the ranks of `group` start together.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    synchronize()
    dist.barrier(group)
    synchronize()
    started_s = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - started_s


def training(job: dict[str, Any], device: torch.device, group: Any = None) -> Callable[[], None]:
    """Return a step of a new model, under DDP with the options in "ddp", or without DDP if they are None.

    "execution" is eager (the default), compile, graph or compile_graph, as in PyTorch's documentation.
    """
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    if "graph" not in job.get("execution", ""):
        return _eager(job, device, group)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return captured(_eager(job, device, group))


def _eager(job: dict[str, Any], device: torch.device, group: Any) -> Callable[[], None]:
    options = job.get("ddp", {})
    import torchvision  # takes as long as torch, which those who only read results do not need

    model = getattr(torchvision.models, job["model"])(num_classes=1000).to(device, memory_format=torch.channels_last)
    if options is not None:
        ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    size = job["image_size"]
    images = torch.randn(job["batch"], 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (job["batch"],), device=device)
    amp = torch.bfloat16 if job["precision"] == "bf16" else None

    def loss_of() -> torch.Tensor:
        with torch.autocast(device.type, amp) if amp else contextlib.nullcontext():
            return torch.nn.functional.cross_entropy(model(images), labels)

    forward = torch.compile(loss_of) if "compile" in job.get("execution", "") else loss_of

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


SETTLING_STEPS = 11
"""Steps before a capture, as PyTorch's "CUDA semantics" requires under DDP."""


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Capture the step as a CUDA graph. The current stream must be the one of its model, and not the default stream."""
    for _ in range(SETTLING_STEPS):
        step()
    torch.cuda.synchronize()
    gc.collect()  # freeing an event or graph during a capture would abort it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        step()
    return partial(_replay, graph, step)


def _replay(graph: torch.cuda.CUDAGraph, writes_to: Callable[[], None]) -> None:
    """Replay the graph. `writes_to` keeps the optimizer's memory alive, which the graph uses."""
    graph.replay()


def main(folder: Path) -> None:
    on_gpu = os.environ.get("BARE_DEVICE", "cuda") == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    for k in itertools.count():
        order = folder / f"go-{k}.json"
        while not order.exists():
            time.sleep(0.01)
        job = json.loads(order.read_text())
        if not job:
            break
        seconds = torch.tensor([measure(job, device)], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            temporary = folder / f"done-{k}.tmp"
            temporary.write_text(json.dumps({"wall_s": seconds.item()}))
            temporary.rename(folder / f"done-{k}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
