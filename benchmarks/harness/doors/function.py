"""The training as a Ray Train function."""

from typing import Any

import ray.train
import torch
from ray.train.torch import get_device

from benchmarks.harness.doors.training import loader, parsed, settings, train, wrapped_model


def train_func(config: dict[str, Any]) -> None:
    """Train with the arguments in config["arguments"], separated by blanks, on the device that Ray Train assigns."""
    arguments = parsed(str(config["arguments"]).split())
    device = get_device() if torch.cuda.is_available() else torch.device("cpu")
    settings()
    rank = ray.train.get_context().get_world_rank()
    for _ in train(loader(arguments, device), wrapped_model(arguments, device), device, rank):
        pass
