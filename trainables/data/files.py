"""Which files a data set needs in the folder that a user names: planning looks for them, ranks open them. No torch here.

Only names are looked at: whether a file is whole shows when a rank reads it.
"""

import os
from pathlib import Path

from trainables.data.image_layout import misfit
from trainables.registry import DATASETS, load

(CIFAR10_FOLDER,) = DATASETS["cifar10"].found_by
CIFAR10_FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}

FASHION_MNIST_FOLDER = DATASETS["fashion_mnist"].found_by[0]
FASHION_MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""images and labels, each plain or with .gz"""

REVIEW_FILES = DATASETS["amazon_reviews"].file_patterns


def lacking(folder: Path, dataset: str, storage: str, image_size: int, split: str = "train") -> str | None:
    """Why a data set that a user has to name cannot be read from a folder, in one line; None where it can, as far as names
    tell. Storage format and image size are those of image folders; `split` is train or test."""
    if DATASETS[dataset].image_folder:
        return misfit(folder, dataset, storage, image_size, split)
    reason: str | None = load(DATASETS[dataset].missing)(folder, split)
    return reason


def cifar10_layout(split: str) -> str:
    """Where a split of CIFAR-10 is looked for, in torchvision's layout."""
    return f"DIR/{CIFAR10_FOLDER}/{CIFAR10_FILES[split][0]}" + (" to data_batch_5" if split == "train" else "")


def lacking_cifar10(folder: Path, split: str) -> str | None:
    """Which file of CIFAR-10 a folder lacks, and what to do."""
    paths = [folder / CIFAR10_FOLDER / name for name in CIFAR10_FILES[split]]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is None:
        return None
    return (
        f"no CIFAR-10 in {folder}: {missing} is missing, expected {cifar10_layout(split)}; download it with "
        "torchvision.datasets.CIFAR10(DIR, download=True) and give --data-dir DIR"
    )


def fashion_mnist_layout(split: str) -> str:
    """Where a split of Fashion-MNIST is looked for: in torchvision's layout, or directly."""
    images, labels = FASHION_MNIST_FILES[split]
    return f"DIR/{FASHION_MNIST_FOLDER}/raw/{images}[.gz] and {labels}[.gz], or both directly in DIR"


def fashion_mnist_folder(folder: Path, split: str) -> Path | None:
    """The folder that holds both files of a split."""
    for place in (folder / FASHION_MNIST_FOLDER / "raw", folder):
        if all(idx_file(place, name) for name in FASHION_MNIST_FILES[split]):
            return place
    return None


def idx_file(folder: Path, name: str) -> Path | None:
    """A file of Fashion-MNIST, plain or gzip."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def lacking_fashion_mnist(folder: Path, split: str) -> str | None:
    """That a folder has no Fashion-MNIST, and what to do."""
    if fashion_mnist_folder(folder, split):
        return None
    return (
        f"no Fashion-MNIST in {folder}: expected {fashion_mnist_layout(split)}; download it with "
        "torchvision.datasets.FashionMNIST(DIR, download=True) and give --data-dir DIR"
    )


def review_files(folder: Path) -> list[Path]:
    """Files of reviews in a folder, in the order of their names."""
    return sorted({path for pattern in REVIEW_FILES for path in folder.glob(pattern) if os.path.isfile(path)})


def lacking_reviews(folder: Path, split: str = "train") -> str | None:
    """That a folder has no reviews, and what is expected."""
    if review_files(folder):
        return None
    return f"no reviews in {folder}: expected JSON Lines in {', '.join(REVIEW_FILES)}; correct --data-dir"
