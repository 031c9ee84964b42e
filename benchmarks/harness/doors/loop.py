"""The training as a script with the one line of the loop door."""

import os

import torch
import torch.distributed as dist
from training import loader, parsed, settings, train, wrapped_model  # type: ignore[import-not-found]

from trainables.probe import steps

arguments = parsed()
rank = int(os.environ["RANK"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
settings()
dist.init_process_group("nccl" if on_gpu else "gloo")
model = wrapped_model(arguments, device)
for _ in train(steps(loader(arguments, device)), model, device, rank, arguments.late_ms):
    pass
dist.destroy_process_group()
