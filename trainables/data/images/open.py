"""Finds an image set in a folder, in the storage format that is asked for, and opens a split of it."""

from collections.abc import Sequence
from pathlib import Path

from trainables.data.image_layout import kind_of, lacking_split, misfit, read_manifest, storages_in
from trainables.data.images.jpeg_files import class_folders, images_by_class, images_in, jpeg_files
from trainables.data.images.records import Records
from trainables.data.source import DataError
from trainables.registry import DATASETS, STORAGES, load

Split = tuple[Records, Sequence[str]]
"""records, and names of the classes that their labels count"""


def open_split(dataset: str, data_dir: str, storage: str, image_size: int, split: str) -> Split:
    """A split (train, or test: the folder val) of the set in `data_dir`, or in its subfolder of the format's name.

    Raises DataError.
    """
    layout = f"{DATASETS[dataset].layout}, or a converted set"
    if not data_dir:
        raise DataError(f"dataset {dataset!r} needs --data-dir DIR with {layout}")
    folder = Path(data_dir)
    if not folder.is_dir():
        raise DataError(f"--data-dir {folder} is not a folder; dataset {dataset!r} needs {layout}")
    if reason := misfit(folder, dataset, storage, image_size, split):
        raise DataError(reason)
    return open_folder(storages_in(folder)[storage], {"train": "train", "test": "val"}[split])


def open_folder(folder: Path, split: str) -> Split:
    """A split (train or val) of the one set that lies directly in a folder, whatever its kind. Raises DataError."""
    if reason := lacking_split(folder, split):
        raise DataError(reason)
    manifest = read_manifest(folder)
    if manifest is not None:
        records = load(STORAGES[manifest["storage"]]).read(folder, split, manifest)
        expected = manifest["splits"][split]["count"]
        if len(records) != expected:
            raise DataError(
                f"{folder} holds {len(records)} images in {split!r}, its manifest promises {expected}: convert it again"
            )
        return records, manifest["classes"]
    return _tiny_imagenet(folder, split) if kind_of(folder) == "tiny_imagenet" else _by_class(folder, split)


def splits_in(folder: Path) -> list[str]:
    """The splits of the set that lies directly in a folder."""
    manifest = read_manifest(folder)
    if manifest is not None:
        return list(manifest["splits"])
    return ["train", "val"] if (folder / "train").is_dir() and (folder / "val").is_dir() else ["train"]


def _by_class(folder: Path, split: str) -> Split:
    """ImageNet's layout; without folders train and val all images are for training."""
    train = folder / "train" if (folder / "train").is_dir() else folder
    classes = class_folders(train)
    if split == "train":
        return jpeg_files(folder, images_by_class(folder, train, classes)), classes
    found = images_by_class(folder, folder / "val", classes)
    if not found:
        raise DataError(f"{folder / 'val'} has no class folders; expected {folder / 'val'}/CLASS/*.JPEG")
    return jpeg_files(folder, found), classes


def _tiny_imagenet(folder: Path, split: str) -> Split:
    """Tiny-ImageNet as it is published (Le and Yang, Stanford CS231N, 2015): 64 x 64 pixels, 200 classes.

    train/CLASS/images/*.JPEG; val/images/*.JPEG, with their classes in val/val_annotations.txt: file name and class,
    separated by tabs, and a box that is not used.
    """
    try:
        classes = sorted((folder / "wnids.txt").read_text().split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / 'wnids.txt'} cannot be read: {error}") from None
    labels = {name: label for label, name in enumerate(classes)}
    if split == "train":
        found = []
        for name in classes:
            images = images_in(folder / "train" / name / "images")
            if not images:
                raise DataError(f"class folder {folder / 'train' / name / 'images'} holds no image: unpack it again")
            found += [(f"train/{name}/images/{image}", labels[name]) for image in images]
        return jpeg_files(folder, found), classes
    path = folder / "val" / "val_annotations.txt"
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    present = set(images_in(folder / "val" / "images"))
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file_name, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in labels:
            raise DataError(f"{path} line {number}: {name!r} is no class of wnids.txt")
        if file_name not in present:
            raise DataError(
                f"{path} line {number}: {folder / 'val' / 'images' / file_name} is missing: unpack it again"
            )
        found.append((f"val/images/{file_name}", labels[name]))
    if not found:
        raise DataError(f"{path} names no images: unpack it again")
    return jpeg_files(folder, found), classes
