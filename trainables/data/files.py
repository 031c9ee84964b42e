"""The files that each data set needs in the user's folder. Planning checks for them, ranks open them. No torch here.

Only names are checked. A damaged file is detected when a rank reads it.
"""

import os
from pathlib import Path

from trainables.data.image_layout import layout_mismatch
from trainables.registry import DATASETS, load

(CIFAR10_FOLDER,) = DATASETS["cifar10"].found_by
CIFAR10_FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}

FASHION_MNIST_FOLDER = DATASETS["fashion_mnist"].found_by[0]
FASHION_MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""images and labels, each plain or with .gz"""

TOKEN_SPLITS = {"train": "train", "test": "val"}
"""what the name of a token file contains"""

REVIEW_FILES = DATASETS["amazon_reviews"].file_patterns


def missing_files(folder: Path, dataset: str, storage: str, image_size: int, split: str = "train") -> str | None:
    """Return why a data set cannot be read from a folder, in one line, or None if its files are present.

    `storage` and `image_size` only matter for image folders. `split` is train or test.
    """
    if DATASETS[dataset].image_folder:
        return layout_mismatch(folder, dataset, storage, image_size, split)
    reason: str | None = load(DATASETS[dataset].missing)(folder, split)
    return reason


def cifar10_layout(split: str) -> str:
    """Describe the expected files of a CIFAR-10 split, in torchvision's layout."""
    return f"DIR/{CIFAR10_FOLDER}/{CIFAR10_FILES[split][0]}" + (" to data_batch_5" if split == "train" else "")


def missing_cifar10(folder: Path, split: str) -> str | None:
    """Return which file of CIFAR-10 is missing, and the fix. None if all are present."""
    paths = [folder / CIFAR10_FOLDER / name for name in CIFAR10_FILES[split]]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is None:
        return None
    return (
        f"no CIFAR-10 in {folder}: {missing} is missing, expected {cifar10_layout(split)}; download it with "
        "torchvision.datasets.CIFAR10(DIR, download=True) and pass --data-dir DIR"
    )


def fashion_mnist_layout(split: str) -> str:
    """Describe the expected files of a Fashion-MNIST split: in torchvision's layout, or directly in the folder."""
    images, labels = FASHION_MNIST_FILES[split]
    return f"DIR/{FASHION_MNIST_FOLDER}/raw/{images}[.gz] and {labels}[.gz], or both directly in DIR"


def fashion_mnist_folder(folder: Path, split: str) -> Path | None:
    """Return the folder that holds both files of a split, or None."""
    for candidate in (folder / FASHION_MNIST_FOLDER / "raw", folder):
        if all(idx_file(candidate, name) for name in FASHION_MNIST_FILES[split]):
            return candidate
    return None


def idx_file(folder: Path, name: str) -> Path | None:
    """Return the path of a Fashion-MNIST file, plain or gzip, or None if it is missing."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if os.path.isfile(path)), None)


def missing_fashion_mnist(folder: Path, split: str) -> str | None:
    """Return what is expected and how to get it if the folder has no Fashion-MNIST, else None."""
    if fashion_mnist_folder(folder, split):
        return None
    return (
        f"no Fashion-MNIST in {folder}: expected {fashion_mnist_layout(split)}; download it with "
        "torchvision.datasets.FashionMNIST(DIR, download=True) and pass --data-dir DIR"
    )


def review_files(folder: Path) -> list[Path]:
    """Return the review files in a folder, sorted by name."""
    return sorted({path for pattern in REVIEW_FILES for path in folder.glob(pattern) if os.path.isfile(path)})


def missing_reviews(folder: Path, split: str = "train") -> str | None:
    """Return what is expected if the folder has no reviews, else None."""
    if review_files(folder):
        return None
    return f"no reviews in {folder}: expected JSON Lines in {', '.join(REVIEW_FILES)}; correct --data-dir"


def token_files(folder: Path, split: str) -> list[Path]:
    """Return the token files of a split, in the order of their names."""
    return sorted(path for path in folder.glob(f"*{TOKEN_SPLITS[split]}*.bin") if path.is_file())


def missing_tokens(folder: Path, split: str) -> str | None:
    """Return what is expected if the folder has no token files of a split, else None."""
    if token_files(folder, split):
        return None
    return (
        f"no token files in {folder}: expected *{TOKEN_SPLITS[split]}*.bin, as the scripts of nanoGPT "
        "(data/*/prepare.py) and llm.c (dev/data/*.py) write them"
    )
