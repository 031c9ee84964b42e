"""Build the shipped Fashion-MNIST sample from the original files.

    python -m scripts.make_fashion_mnist_sample --source DIR

DIR has the four published idx files (Debian's package dataset-fashion-mnist installs them to
/usr/share/datasets/fashion-mnist). With the same version of pyarrow, the same files give the same bytes.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainables.data.fashion_mnist import CLASSES, IMAGE_SIZE, SAMPLE, read_idx_folder
from trainables.data.source import DataError

MAX_BYTES = 6_000_000
METADATA = {
    "source": "https://github.com/zalandoresearch/fashion-mnist",
    "licence": "MIT, Copyright 2017 Zalando SE, https://tech.zalando.com; full text in README.md next to this file",
    "command": "python -m scripts.make_fashion_mnist_sample --source DIR",
}


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Return the ascending indices of the first `per_class` samples of each class.

    Raises ValueError if a class has fewer.
    """
    indices_by_class = []
    for label in range(CLASSES):
        indices = np.flatnonzero(labels == label)[:per_class]
        if len(indices) < per_class:
            raise ValueError(f"class {label} has {len(indices)} samples; {per_class} are needed")
        indices_by_class.append(indices)
    return np.sort(np.concatenate(indices_by_class))


def make_sample(source: Path, destination: Path, train_images: int, test_images: int) -> int:
    """Write the class-balanced sample and return its size in bytes. Raises DataError or ValueError."""
    parts = []
    for split, count in (("train", train_images), ("test", test_images)):
        images, labels = read_idx_folder(str(source), split)
        rows = first_of_each_class(labels, count // CLASSES)
        flat = np.ascontiguousarray(images[rows]).tobytes()
        image = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(IMAGE_SIZE * IMAGE_SIZE), len(rows), [None, pa.py_buffer(flat)]
        )
        parts.append(
            pa.table({"image": image, "label": labels[rows].astype(np.uint8), "split": pa.array([split] * len(rows))})
        )
    table = pa.concat_tables(parts).replace_schema_metadata(METADATA)
    pq.write_table(
        table, destination, compression="zstd", compression_level=22, use_dictionary=["split"], write_statistics=False
    )
    return destination.stat().st_size


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder with the four idx files, plain or .gz")
    parser.add_argument("--destination", type=Path, default=SAMPLE)
    parser.add_argument("--train-images", type=int, default=10_000)
    parser.add_argument("--test-images", type=int, default=2_000)
    options = parser.parse_args()
    try:
        size = make_sample(options.source, options.destination, options.train_images, options.test_images)
    except (DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.destination}: {size:,} bytes")
    if size > MAX_BYTES:
        print(f"error: the sample exceeds {MAX_BYTES:,} bytes; use fewer images", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
