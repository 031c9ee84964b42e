"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009): 32 x 32 RGB, 10 classes."""

import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.files import CIFAR10_FILES, CIFAR10_FOLDER, cifar10_layout, missing_cifar10
from trainables.data.source import DataError, DataSource, ImageArrays, ImageDataset
from trainables.messages import one_line
from trainables.trial import Trial

CLASSES = 10
IMAGE_SIZE = 32

_ALLOWED_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1, and the published files
    ("numpy._core.multiarray", "_reconstruct"),  # the same function in numpy 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 3 writes bytes in pickle protocol 2
}


def cifar10(trial: Trial, split: str = "train") -> DataSource:
    """Return CIFAR-10 from `trial.data_dir`, in torchvision's layout: DIR/cifar-10-batches-py/data_batch_1 to 5.

    Raises DataError if files are missing. Damaged files raise it when they are first read.
    """
    if not trial.data_dir:
        raise DataError(f"dataset 'cifar10' needs --data-dir DIR with {cifar10_layout(split)}")
    if reason := missing_cifar10(Path(trial.data_dir), split):
        raise DataError(reason)
    dataset = ImageDataset(read_batches, str(Path(trial.data_dir) / CIFAR10_FOLDER), split, trial.image_size)
    return DataSource(dataset, classes=CLASSES, channels=3, image_size=trial.image_size)


@lru_cache(maxsize=2)
def read_batches(folder: str, split: str) -> ImageArrays:
    """Return images uint8 [N, 3, 32, 32] and labels int64 [N] of one split. Raises DataError."""
    parts = [_read_batch(Path(folder) / name) for name in CIFAR10_FILES[split]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


class _ArraysOnly(pickle.Unpickler):
    """Unpickles only numpy arrays and plain values. CIFAR-10 is published as pickles, and a pickle may run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"it loads {module}.{name}, which CIFAR-10 does not use")
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
        raise _damaged(
            path, f"its data is {images.dtype} of shape {images.shape}; expected uint8 of shape (N, {values})"
        )
    if labels.shape != (len(images),):
        raise _damaged(path, f"it has {len(images)} images but labels of shape {labels.shape}")
    if len(labels) and (labels.min() < 0 or labels.max() >= CLASSES):
        raise _damaged(path, f"its labels range from {labels.min()} to {labels.max()}; expected 0 to {CLASSES - 1}")
    return images.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE), labels


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path} is not a CIFAR-10 batch: {problem}; download it again")
