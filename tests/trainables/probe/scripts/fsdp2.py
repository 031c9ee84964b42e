"""FSDP2: parameters are gathered and gradients reduced and scattered.

usage: fsdp2.py [DELAY_S]; each step of four lasts DELAY_S longer than the one before
"""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
delay_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
for step in itertools.count():
    time.sleep(step % 4 * delay_s)
    model(torch.randn(4, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
