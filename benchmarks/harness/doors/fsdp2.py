"""A script for torchrun, which knows nothing about this project: blocks of linear layers, sharded by FSDP2."""

import argparse
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import delay, joined  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4096, help="vectors per rank")
    parser.add_argument("--late-ms", type=float, default=0.0, help="delay of the device of rank 1 before each backward")
    options = parser.parse_args()
    rank, device = joined()
    model = sharded(options.width, options.blocks, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(options.batch_size, options.width, device=device)
    train(model, optimizer, batch, lambda: delay(rank, options.late_ms, device))
    dist.destroy_process_group()


def sharded(width: int, blocks: int, device: torch.device) -> nn.Module:
    """Return the model on the device, in bf16 on GPUs, with each block sharded. Needs the default process group."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
    model = nn.Sequential(*layers).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16) if device.type == "cuda" else MixedPrecisionPolicy()
    for layer in (*layers, model):
        fully_shard(layer, mp_policy=policy)
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, before_backward: Callable[[], None]
) -> None:
    """Train without end on one batch, to return its negative."""
    for _ in itertools.count():
        loss = (model(batch).float() + batch).square().mean()
        before_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
