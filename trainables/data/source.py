"""`DataSource`: the samples of a data set, as the functions in this package return them. One module per data set."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

ImageArrays = tuple[np.ndarray, np.ndarray]
"""images uint8 [N, C, H, W] and labels int64 [N]"""


class DataError(Exception):
    """Data files are missing or unreadable. The message is one line: what was expected, where, and the fix."""

    exit_code = 2


@dataclass(frozen=True)
class DataSource:
    """Samples to train on. `dataset` delivers complete batches; `image_size` is an image's edge in pixels."""

    dataset: Dataset
    classes: int
    channels: int
    image_size: int
    prepare: Callable[[Any], torch.Tensor] | None = None
    """work left for the device before images are normalised (None: nothing)"""
    ahead: Callable[[Any], torch.Tensor] | None = None
    """the part of that work that the prefetch thread does for later batches, during the step (None: nothing)"""


class ImageDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Labelled images in memory, delivered as uint8 batches. The device normalises them.

    The data set is pickled into loader processes, so it holds a function that reads the images instead of the images.
    `read(path, split)` is a module-level function that caches its result once per process.
    """

    def __init__(self, read: Callable[[str, str], ImageArrays], path: str, split: str, image_size: int) -> None:
        self.read = read
        self.path = path
        self.split = split
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.read(self.path, self.split)[1])

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch: images uint8 [n, C, image_size, image_size] and labels int64 [n]."""
        images, labels = self.read(self.path, self.split)
        batch = torch.from_numpy(images[indices])
        if batch.shape[-1] != self.image_size:
            batch = interpolate(batch, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        return batch, torch.from_numpy(labels[indices])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample: image uint8 [C, image_size, image_size] and label int64 []."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]
