"""The training as a script with the one line of the loop door."""

import torch.distributed as dist
from training import joined, loader, parsed, train, wrapped_model  # type: ignore[import-not-found]

from trainables.probe import steps

arguments = parsed()
rank, device = joined()
batches = steps(loader(arguments, device))
for _ in train(batches, wrapped_model(arguments, device), device, rank, arguments.late_ms):
    pass
dist.destroy_process_group()
