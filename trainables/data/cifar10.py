"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009): 32 x 32 RGB, 10 classes."""

import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.files import CIFAR10_FILES, CIFAR10_FOLDER, cifar10_layout, lacking_cifar10
from trainables.data.source import DataError, DataSource, ImageArrays, ImageDataset
from trainables.messages import one_line
from trainables.trial import Trial

CLASSES = 10
IMAGE_SIZE = 32

_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1 and the publishers' own files
    ("numpy._core.multiarray", "_reconstruct"),  # the same function since numpy 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # Python 3 writes the array's bytes so where it keeps to protocol 2
}


def cifar10(trial: Trial, split: str = "train") -> DataSource:
    """CIFAR-10 from `trial.data_dir`, in torchvision's layout: DIR/cifar-10-batches-py/data_batch_1 to 5.

    Raises DataError where the files are missing; damaged ones raise it when they are first read.
    """
    if not trial.data_dir:
        raise DataError(f"dataset 'cifar10' needs --data-dir DIR with {cifar10_layout(split)}")
    if reason := lacking_cifar10(Path(trial.data_dir), split):
        raise DataError(reason)
    dataset = ImageDataset(read_batches, str(Path(trial.data_dir) / CIFAR10_FOLDER), split, trial.image_size)
    return DataSource(dataset, classes=CLASSES, channels=3, image_size=trial.image_size)


@lru_cache(maxsize=2)
def read_batches(folder: str, split: str) -> ImageArrays:
    """Images uint8 [N, 3, 32, 32] and labels int64 [N] of one split. Raises DataError."""
    parts = [_read_batch(Path(folder) / name) for name in CIFAR10_FILES[split]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


class _ArraysOnly(pickle.Unpickler):
    """CIFAR-10 is published as pickles, and a pickle may run code: this admits numpy arrays and plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR-10 does not need")
        return super().find_class(module, name)


def _read_batch(path: Path) -> ImageArrays:
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="latin1").load()
        images = np.asarray(content["data"])
        labels = np.asarray(content["labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _damaged(path, one_line(error)) from error
    values = 3 * IMAGE_SIZE * IMAGE_SIZE
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != values:
        raise _damaged(path, f"its data are {images.dtype} of shape {images.shape}, not uint8 of shape (N, {values})")
    if labels.shape != (len(images),):
        raise _damaged(path, f"it holds {len(images)} images but labels of shape {labels.shape}")
    if len(labels) and not (0 <= labels.min() and labels.max() < CLASSES):
        raise _damaged(path, f"its labels run from {labels.min()} to {labels.max()}, not within 0 to {CLASSES - 1}")
    return images.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE), labels


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is not a CIFAR-10 batch: {what}; download it again")
