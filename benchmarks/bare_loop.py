"""The peer of `overhead.py`: a bare training loop, as one writes it for torchrun. No Ray, none of this project.

Started once by torchrun, it waits for `DIR/go-<k>.json` ({"model", "batch", "precision", "image_size", "device",
"channels", "warmup_steps", "steps"}; {} ends it), builds the model anew, warms up, times, and rank 0 writes
`DIR/done-<k>.json` with the slowest rank's wall seconds. While it waits it sleeps.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel


def measure(job: dict[str, Any], device: torch.device) -> float:
    """Wall seconds of the timed steps on this rank, the device synchronised at both ends."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = getattr(torchvision.models, job["model"])(num_classes=1000).to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=device.type == "cuda"
    )
    size = job["image_size"]
    images = torch.randn(job["batch"], 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (job["batch"],), device=device)
    amp = torch.bfloat16 if job["precision"] == "bf16" else None

    def step() -> None:
        with torch.autocast(device.type, amp) if amp else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(job["warmup_steps"]):
        step()
    synchronize()
    dist.barrier()
    synchronize()
    begin_s = time.perf_counter()
    for _ in range(job["steps"]):
        step()
    synchronize()
    return time.perf_counter() - begin_s


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
            beside = folder / f"done-{k}.tmp"
            beside.write_text(json.dumps({"wall_s": seconds.item()}))
            beside.rename(folder / f"done-{k}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
