"""Whole data sets on a rank's device: a batch is then a gather there, without loaders or copies."""

import torch
from torch.utils.data import TensorDataset

from trainables.data import ImageDataset
from trainables.trial import Trial

CHUNK = 4096
"""images that are resized at a time"""


def device_of(trial: Trial) -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


def all_on_device(dataset: ImageDataset, device: torch.device) -> TensorDataset:
    """All images uint8 [N, c, edge, edge] and labels int64 [N] of a data set. Raises its DataError."""
    parts = [dataset.__getitems__(indices.tolist()) for indices in torch.arange(len(dataset)).split(CHUNK)]
    return TensorDataset(*(torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True)))
