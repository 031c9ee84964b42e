"""The training as a script for torchrun, which knows nothing about this project."""

import json
from pathlib import Path

import torch.distributed as dist
from training import bare_seconds, joined, loader, parsed, train, wrapped_model  # type: ignore[import-not-found]

arguments = parsed()
rank, device = joined()
steps = train(loader(arguments, device), wrapped_model(arguments, device), device, rank, arguments.late_ms)
if arguments.bare_steps:
    seconds = bare_seconds(steps, arguments.bare_steps, device)
    Path(f"{arguments.bare_file}-{rank}.json").write_text(json.dumps(seconds))
else:
    for _ in steps:
        pass
dist.destroy_process_group()
