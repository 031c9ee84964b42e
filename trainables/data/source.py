"""Data sources: a function from a trial to a `DataSource`, one file or format a module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

ImageArrays = tuple[np.ndarray, np.ndarray]
"""Images uint8 [N, C, H, W] and labels int64 [N]."""


class DataError(Exception):
    """Data files are missing or unreadable. One line: what was looked for, where, and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class DataSource:
    """Samples to train on. `dataset` delivers whole batches; `image_size` is the edge of an image as delivered."""

    dataset: Dataset
    classes: int
    channels: int
    image_size: int
    prepare: Callable[[Any], torch.Tensor] | None = None
    """what is left to do on the device before images are normalised (None: nothing)"""
    ahead: Callable[[Any], torch.Tensor] | None = None
    """what of that is done for batches to come, beside the step (None: nothing)"""


class ImageDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images held in memory, delivered a batch at a time as uint8; normalising is the device's work.

    Loader processes get it pickled, so it holds how to read the images and not the images: `read(path, split)` is a
    module-level function that caches its result, once a process.
    """

    def __init__(self, read: Callable[[str, str], ImageArrays], path: str, split: str, image_size: int) -> None:
        self.read = read
        self.path = path
        self.split = split
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.read(self.path, self.split)[1])

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of these samples: images uint8 [n, C, image_size, image_size] and labels int64 [n]."""
        images, labels = self.read(self.path, self.split)
        batch = torch.from_numpy(images[indices])
        if batch.shape[-1] != self.image_size:
            batch = interpolate(batch, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        return batch, torch.from_numpy(labels[indices])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample: image uint8 [C, image_size, image_size] and label int64 []."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]
