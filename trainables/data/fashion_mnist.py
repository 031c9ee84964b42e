"""Fashion-MNIST (Xiao, Rasul and Vollgraf, arXiv:1708.07747): 28 x 28 grey images in 10 classes."""

import gzip
import math
import struct
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainables.data.files import (
    FASHION_MNIST_FILES,
    fashion_mnist_folder,
    fashion_mnist_layout,
    idx_file,
    missing_fashion_mnist,
)
from trainables.data.source import DataError, DataSource, ImageArrays, ImageDataset
from trainables.messages import one_line
from trainables.trial import Trial

CLASSES = 10
IMAGE_SIZE = 28
SAMPLE = Path(__file__).with_name("fashion_mnist_sample.parquet")


def sample(trial: Trial, split: str = "train") -> DataSource:
    """Return the shipped sample: 10,000 training and 2,000 test images. `trial.data_dir` is not used."""
    return _source(ImageDataset(read_sample, str(SAMPLE), split, trial.image_size))


def full(trial: Trial, split: str = "train") -> DataSource:
    """Return the full data set from `trial.data_dir`, in torchvision's layout or with the idx files directly in it.

    Raises DataError if files are missing. Damaged files raise it when they are first read.
    """
    folder = _folder(trial.data_dir, split)
    return _source(ImageDataset(read_idx_folder, str(folder), split, trial.image_size))


def _source(dataset: ImageDataset) -> DataSource:
    return DataSource(dataset, classes=CLASSES, channels=1, image_size=dataset.image_size)


@lru_cache(maxsize=2)
def read_sample(path: str, split: str) -> ImageArrays:
    """Return images uint8 [N, 1, 28, 28] and labels int64 [N] of one split of the sample file. Raises DataError."""
    try:
        # One thread, because every loader process of every rank reads this at the same time.
        table = pq.ParquetFile(path).read(use_threads=False)
        table = table.filter(pc.equal(table["split"], split)).combine_chunks()
        images = np.frombuffer(table["image"].chunk(0).buffers()[1], dtype=np.uint8)
        images = images.reshape(table.num_rows, 1, IMAGE_SIZE, IMAGE_SIZE)
        return images, table["label"].to_numpy().astype(np.int64)
    except (OSError, pa.ArrowException, KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"cannot read the shipped Fashion-MNIST sample {path} ({one_line(error)}); "
            "restore it from the repository, or build it with scripts/make_fashion_mnist_sample.py"
        ) from error


@lru_cache(maxsize=2)
def read_idx_folder(folder: str, split: str) -> ImageArrays:
    """Return images uint8 [N, 1, 28, 28] and labels int64 [N] of one split in a folder of idx files. Raises DataError.

    An uncompressed image file is memory-mapped, so that all loader processes of a host share it.
    """
    image_path, label_path = (_existing(Path(folder), name) for name in FASHION_MNIST_FILES[split])
    images, labels = read_idx(image_path, dimensions=3), read_idx(label_path, dimensions=1)
    if images.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE):
        raise DataError(
            f"{image_path} has images of {images.shape[1]} x {images.shape[2]} pixels; "
            f"Fashion-MNIST has {IMAGE_SIZE} x {IMAGE_SIZE}; check that the file belongs to Fashion-MNIST"
        )
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels; "
            "download both files again"
        )
    if len(labels) and labels.max() >= CLASSES:
        raise DataError(f"{label_path} has label {labels.max()}; Fashion-MNIST has labels 0 to {CLASSES - 1}")
    return images[:, None], labels.astype(np.int64)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the uint8 array in an idx file, plain or gzip, in the shape that its header states. Raises DataError.

    Format (http://yann.lecun.com/exdb/mnist): two zero bytes, the type (8 is uint8), the number of dimensions, each
    dimension as a big-endian 32-bit number, then the values.
    """
    header_bytes = 4 + 4 * dimensions
    try:
        if path.suffix == ".gz":
            content = np.frombuffer(gzip.decompress(path.read_bytes()), dtype=np.uint8)
        else:
            content = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _damaged(path, one_line(error)) from error
    if len(content) < header_bytes:
        raise _damaged(path, f"{len(content)} bytes are too few for a header of {header_bytes}")
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content[:header_bytes].tobytes())
    expected = 0x0800 + dimensions
    if magic != expected:
        raise _damaged(path, f"it starts with {magic:#010x}; expected {expected:#010x}")
    values = len(content) - header_bytes
    if values != math.prod(shape):
        raise _damaged(path, f"its header declares {math.prod(shape)} values of shape {shape}, but it has {values}")
    return content[header_bytes:].reshape(shape)


def _folder(data_dir: str, split: str) -> Path:
    """Return the folder that holds a split's idx files. Raises DataError."""
    if not data_dir:
        raise DataError(
            f"dataset 'fashion_mnist' needs --data-dir DIR with {fashion_mnist_layout(split)}; "
            "dataset 'fashion_mnist_sample' is shipped with the project"
        )
    folder = fashion_mnist_folder(Path(data_dir), split)
    if folder is None:
        raise DataError(missing_fashion_mnist(Path(data_dir), split))
    return folder


def _existing(folder: Path, name: str) -> Path:
    path = idx_file(folder, name)
    if path is None:
        raise DataError(f"{folder / name}[.gz] is missing; download Fashion-MNIST again, or correct --data-dir")
    return path


def _damaged(path: Path, problem: str) -> DataError:
    return DataError(f"{path} is not a valid idx file: {problem}; download it again")
