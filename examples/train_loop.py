"""A training loop with one changed line: `steps(loader)`. Without a study, it is a plain iterator.

python -m study.scaling run --script examples/train_loop.py --gpus 1,2 --vary=--batch-size=16,32
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainables.probe import steps

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
arguments = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(layers.to(device), device_ids=[device] if on_gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = TensorDataset(torch.randn(8192, 32), torch.randint(10, (8192,)))
sampler = DistributedSampler[TensorDataset](dataset)
loader = DataLoader(dataset, arguments.batch_size, sampler=sampler, drop_last=True)
for inputs, targets in steps(loader):
    loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
