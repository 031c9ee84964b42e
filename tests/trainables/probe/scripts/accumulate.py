"""A loop as in minimal GPT trainers: accumulation, autocast, GradScaler, clipping, evaluation every k steps."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--slow-rank", type=int, default=-1)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--iterations", type=int, default=10_000)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
tokens = torch.randint(0, 64, (10_000,))
net = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
scaler = torch.amp.GradScaler("cpu", enabled=False)


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - 17, (4,))
    return torch.stack([tokens[i : i + 16] for i in starts]), torch.stack([tokens[i + 1 : i + 17] for i in starts])


def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate() -> None:
    model.eval()
    for _ in range(3):
        net(get_batch()[0])
    time.sleep(0.5)
    model.train()


for iteration in range(args.iterations):
    if iteration % 8 == 7 and rank == 0:
        evaluate()
    for part in range(2):
        model.require_backward_grad_sync = part == 1
        if rank == args.slow_rank and part == 1:
            time.sleep(args.delay)
        scaler.scale(loss_of(*get_batch()) / 2).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
