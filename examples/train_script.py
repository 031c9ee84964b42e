"""A training script for torchrun, as people have it. Nothing in it knows about this project.

python -m study.scaling run --script examples/train_script.py --gpus 1,2 --vary=--batch-size=16,32 -- --hidden 256
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--epochs", type=int, default=100)
arguments = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
layers = nn.Sequential(nn.Linear(32, arguments.hidden), nn.ReLU(), nn.Linear(arguments.hidden, 10))
model = DistributedDataParallel(layers.to(device), device_ids=[device] if on_gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))
sampler = DistributedSampler[TensorDataset](dataset)
loader = DataLoader(dataset, arguments.batch_size, sampler=sampler, drop_last=True)
for epoch in range(arguments.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
