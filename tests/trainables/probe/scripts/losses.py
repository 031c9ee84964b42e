"""A loop that prints its losses: --scale them, and split each step into --parts."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--scale", action="store_true")
parser.add_argument("--parts", type=int, default=1)
options = parser.parse_args()

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=options.scale)

for _ in range(100):
    values = []
    for _ in range(options.parts):
        inputs = torch.randn(16, 4)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        values.append(loss.item())
    print("loss", sum(values) / len(values), flush=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
