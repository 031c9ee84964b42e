"""Ranks that share files in the temporary folder, and a name in shared memory that the script's end leaves behind."""

import os
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, shared = dist.get_rank(), Path(tempfile.gettempdir(), "prepared")
if rank == 0:
    assert not shared.exists(), "an earlier trial's file"
    shared.write_text(os.environ["TORCHELASTIC_RUN_ID"])
dist.barrier()
assert shared.read_text() == os.environ["TORCHELASTIC_RUN_ID"]
memory = shared_memory.SharedMemory(f"scaling-study-test-{rank}", create=True, size=8)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
