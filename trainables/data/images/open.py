"""Find an image set in a folder, in the requested storage format, and open one of its splits."""

from collections.abc import Sequence
from pathlib import Path

from trainables.data.image_layout import (
    SPLITS,
    bad_class,
    kind_of,
    layout_mismatch,
    missing_split,
    read_manifest,
    storages_in,
)
from trainables.data.images.jpeg_files import class_folders, images_by_class, images_in, jpeg_files
from trainables.data.images.records import Records
from trainables.data.source import DataError
from trainables.registry import DATASETS, STORAGES, load

Split = tuple[Records, Sequence[str]]
"""records, and the class names that their labels index"""


def open_split(dataset: str, data_dir: str, storage: str, image_size: int, split: str) -> Split:
    """Open a split of the set in `data_dir`, or in its subfolder named after the format. Raises DataError.

    `split` is train or test; test is the folder val.
    """
    layout = f"{DATASETS[dataset].layout}, or a converted set"
    if not data_dir:
        raise DataError(f"dataset {dataset!r} needs --data-dir DIR with {layout}")
    folder = Path(data_dir)
    if not folder.is_dir():
        raise DataError(f"--data-dir {folder} is not a folder; dataset {dataset!r} needs {layout}")
    if reason := layout_mismatch(folder, dataset, storage, image_size, split):
        raise DataError(reason)
    return open_folder(storages_in(folder)[storage], {"train": "train", "test": "val"}[split])


def open_folder(folder: Path, split: str) -> Split:
    """Open a split (train or val) of the set directly in a folder, whatever its layout. Raises DataError."""
    if reason := missing_split(folder, split):
        raise DataError(reason)
    manifest = read_manifest(folder)
    if manifest is not None:
        records = load(STORAGES[manifest["storage"]]).read(folder, split, manifest)
        expected = manifest["splits"][split]["count"]
        if len(records) != expected:
            raise DataError(
                f"{folder} has {len(records)} images in {split!r}, its manifest lists {expected}; convert it again"
            )
        return records, manifest["classes"]
    return _tiny_imagenet(folder, split) if kind_of(folder) == "tiny_imagenet" else _by_class(folder, split)


def splits_in(folder: Path) -> list[str]:
    """Return the splits of the set directly in a folder."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return list(manifest["splits"])
    return list(SPLITS) if all((folder / split).is_dir() for split in SPLITS) else ["train"]


def _by_class(folder: Path, split: str) -> Split:
    """Open ImageNet's layout. Without folders train and val, all images are for training."""
    train = folder / "train" if (folder / "train").is_dir() else folder
    classes = class_folders(train)
    if split == "train":
        return jpeg_files(folder, images_by_class(folder, train, classes)), classes
    images = images_by_class(folder, folder / "val", classes)
    if not images:
        raise DataError(f"{folder / 'val'} has no class folders; expected {folder / 'val'}/CLASS/*.JPEG")
    return jpeg_files(folder, images), classes


def _tiny_imagenet(folder: Path, split: str) -> Split:
    """Open Tiny-ImageNet in its published layout (Le and Yang, Stanford CS231N, 2015): 64 x 64 pixels, 200 classes.

    Training images are train/CLASS/images/*.JPEG. Validation images are val/images/*.JPEG.
    """
    try:
        classes = sorted((folder / "wnids.txt").read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {folder / 'wnids.txt'}: {error}") from None
    if reason := next(filter(None, map(bad_class, classes)), None):
        raise DataError(f"{folder / 'wnids.txt'}: {reason}; unpack the archive again")
    labels = {name: label for label, name in enumerate(classes)}
    images = _tiny_imagenet_train(folder, labels) if split == "train" else _tiny_imagenet_val(folder, labels)
    return jpeg_files(folder, images), classes


def _tiny_imagenet_train(folder: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    """Return (path relative to `folder`, label) of every training image. Raises DataError."""
    images = []
    for name, label in labels.items():
        names = images_in(folder / "train" / name / "images")
        if not names:
            raise DataError(
                f"class folder {folder / 'train' / name / 'images'} has no images; unpack the archive again"
            )
        images += [(f"train/{name}/images/{image}", label) for image in names]
    return images


def _tiny_imagenet_val(folder: Path, labels: dict[str, int]) -> list[tuple[str, int]]:
    """Return (path relative to `folder`, label) of every validation image. Raises DataError.

    Each line of val/val_annotations.txt has a file name, a class and an unused box, separated by tabs.
    """
    path = folder / "val" / "val_annotations.txt"
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    present = set(images_in(folder / "val" / "images"))
    images = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file_name, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in labels:
            raise DataError(f"{path} line {number}: class {name!r} is not in wnids.txt")
        if file_name not in present:
            raise DataError(
                f"{path} line {number}: {folder / 'val' / 'images' / file_name} is missing; unpack the archive again"
            )
        images.append((f"val/images/{file_name}", labels[name]))
    if not images:
        raise DataError(f"{path} lists no images; unpack the archive again")
    return images
