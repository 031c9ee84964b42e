"""Makes the Fashion-MNIST sample that the project ships, from the data set's own files.

    python -m scripts.make_fashion_mnist_sample --source DIR

DIR holds the publishers' four idx files (on Debian, the package dataset-fashion-mnist puts them under
/usr/share/datasets/fashion-mnist). The same files give the same bytes, with the same version of pyarrow.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainables.data.fashion_mnist import CLASSES, IMAGE_SIZE, SAMPLE, read_idx_folder
from trainables.data.source import DataError

LARGEST_BYTES = 6_000_000
METADATA = {
    "source": "https://github.com/zalandoresearch/fashion-mnist",
    "licence": "MIT, Copyright 2017 Zalando SE, https://tech.zalando.com; full text in README.md beside this file",
    "command": "python -m scripts.make_fashion_mnist_sample --source DIR",
}


def first_of_each_class(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Indices, ascending, of the first `per_class` samples of each class. Raises ValueError where a class has fewer."""
    chosen = []
    for label in range(CLASSES):
        found = np.flatnonzero(labels == label)[:per_class]
        if len(found) < per_class:
            raise ValueError(f"class {label} has {len(found)} samples, {per_class} are wanted")
        chosen.append(found)
    return np.sort(np.concatenate(chosen))


def make_sample(source: Path, destination: Path, train_images: int, test_images: int) -> int:
    """Writes the class-balanced sample and returns its size in bytes. Raises DataError or ValueError."""
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
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the Fashion-MNIST sample from the data set's own files.")
    parser.add_argument("--source", type=Path, required=True, help="folder of the four idx files, plain or .gz")
    parser.add_argument("--destination", type=Path, default=SAMPLE)
    parser.add_argument("--train-images", type=int, default=10_000)
    parser.add_argument("--test-images", type=int, default=2_000)
    options = parser.parse_args()
    try:
        size = make_sample(options.source, options.destination, options.train_images, options.test_images)
    except (DataError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.destination}: {size:,} bytes")
    if size > LARGEST_BYTES:
        print(f"that is over {LARGEST_BYTES:,} bytes: ask for fewer images", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
