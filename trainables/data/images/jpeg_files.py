"""Storage format `jpeg`: one file per image in ImageNet's layout, SPLIT/CLASS/*.JPEG. Reads unconverted folders too."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.image_layout import MANIFEST, is_image
from trainables.data.images.records import Records, Sample, Storage
from trainables.data.source import DataError
from trainables.registry import STORAGES


@dataclass(frozen=True)
class JpegFiles:
    """Images as files. `names` are paths relative to `folder`, in one bytes array, so that a million pickle quickly."""

    folder: str
    names: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        try:
            with open(self.name(index), "rb") as file:
                return file.read(), int(self.labels[index])
        except OSError as error:
            raise DataError(f"cannot read {self.name(index)}: {error.strerror}") from None

    def name(self, index: int) -> str:
        return os.path.join(self.folder, os.fsdecode(self.names[index]))

    def files(self) -> Sequence[str]:
        return [os.fsdecode(name) for name in self.names]


def jpeg_files(folder: Path, images: Sequence[tuple[str, int]]) -> JpegFiles:
    """Return records of images, given as (path relative to `folder`, label), sorted by label and path."""
    ordered = sorted(images, key=lambda item: (item[1], item[0]))
    names = np.array([os.fsencode(name) for name, _ in ordered], dtype=np.bytes_)
    return JpegFiles(str(folder), names, np.array([label for _, label in ordered], dtype=np.int32))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the class folders, sorted. The position of a name is its label. Raises DataError.

    Folders named after storage formats or with a manifest are other sets, and `*.partial` are unfinished conversions.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        other_sets = [*STORAGES, *(name for name in names if (folder / name / MANIFEST).is_file())]
        return [name for name in names if name not in other_sets and not name.endswith(".partial")]
    except OSError as error:
        raise DataError(f"cannot read folder {folder}: {error.strerror}") from None


def images_in(folder: Path) -> list[str]:
    """Return the names of the image files directly in a folder. Raises DataError."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if is_image(entry.name) and entry.is_file()]
    except OSError as error:
        raise DataError(f"cannot read folder {folder}: {error.strerror}") from None


def images_by_class(root: Path, folder: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Return (path relative to `root`, label) of every image in the class folders of `folder`.

    Raises DataError for an unknown class, and for a class without images.
    """
    labels = {name: label for label, name in enumerate(classes)}
    labelled = []
    for name in class_folders(folder):
        if name not in labels:
            raise DataError(f"class {folder / name} has no training images; remove it, or complete the data set")
        images = images_in(folder / name)
        if not images:
            raise DataError(f"class folder {folder / name} has no images; remove it, or complete the data set")
        prefix = os.path.relpath(folder / name, root)
        labelled += [(os.path.join(prefix, image), labels[name]) for image in images]
    return labelled


def read(folder: Path, split: str, manifest: dict[str, Any]) -> Records:
    """Open a split of a converted set. Raises DataError."""
    return jpeg_files(folder, images_by_class(folder, folder / split, manifest["classes"]))


def write(folder: Path, split: str, first: int, samples: Iterable[Sample], manifest: dict[str, Any]) -> None:
    """Write SPLIT/CLASS/NUMBER.JPEG with the bytes of the source, unchanged. Raises DataError for an unknown label."""
    classes = manifest["classes"]
    for number, (content, label) in enumerate(samples, first):
        if not 0 <= label < len(classes):
            raise DataError(f"image {number} of {split!r} has label {label}, but there are {len(classes)} classes")
        path = folder / split / classes[label] / f"{number:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.sync()  # once per part, because an fsync per file would take longer than writing it


storage = Storage(read, write)
