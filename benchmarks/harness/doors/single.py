"""The training as a script for one GPU, which knows nothing about ranks."""

import torch
from training import loader, parsed, plain_model, settings, train  # type: ignore[import-not-found]

arguments = parsed()
settings()
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
for _ in train(loader(arguments, device), plain_model(arguments, device), device, rank=0):
    pass
