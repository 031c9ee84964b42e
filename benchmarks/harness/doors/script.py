"""The training as a script for torchrun, which knows nothing about this project."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from training import bare_seconds, loader, parsed, settings, train, wrapped_model  # type: ignore[import-not-found]

arguments = parsed()
rank = int(os.environ["RANK"])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
settings()
dist.init_process_group("nccl" if on_gpu else "gloo")
steps = train(loader(arguments, device), wrapped_model(arguments, device), device, rank, arguments.late_ms)
if arguments.bare_steps:
    seconds = bare_seconds(steps, arguments.bare_steps, device)
    Path(f"{arguments.bare_file}-{rank}.json").write_text(json.dumps(seconds))
else:
    for _ in steps:
        pass
dist.destroy_process_group()
