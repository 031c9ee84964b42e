"""Image sets on disk, as planning sees them: which kind lies in a folder, and in which storage format. No torch here.

A converted set is a folder with a manifest; a folder of image files needs none. A folder may also hold one set for each
storage format, in subfolders of the formats' names (DIR/jpeg, DIR/lmdb, ...), so that a study can compare them.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

from trainables.registry import DATASETS, STORAGES

MANIFEST = "manifest.json"
FORMAT = "scaling-study image set"
VERSION = 1

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
"""names of image files, in lower case; others are passed over"""

STORED_PART = 256 / 224
"""edge of the square that is kept of an image / edge of what a model sees: room for a random crop, as ImageNet's
usual evaluation has it (Krizhevsky et al., 2012)"""


def stored_side(image_size: int) -> int:
    """Edge in pixels of the square that is kept of an image: 256 for 224."""
    return round(image_size * STORED_PART)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a converted set; None where the folder is none, or its manifest damaged or of a version that is not known."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    known = isinstance(manifest, dict) and manifest.get("format") == FORMAT and manifest.get("version") == VERSION
    whole = known and manifest.get("storage") in STORAGES and isinstance(manifest.get("splits"), dict)
    return manifest if whole else None


def kind_of(folder: Path) -> str | None:
    """The data set that a folder's layout belongs to: tiny_imagenet, image_folder, or none."""
    try:
        if (folder / "wnids.txt").is_file() and (folder / "train").is_dir():
            return "tiny_imagenet"
        classes = folder / "train" if (folder / "train").is_dir() else folder
        has_images = any(
            is_image(file.name) for entry in classes.iterdir() if entry.is_dir() for file in entry.iterdir()
        )
    except OSError:
        return None
    return "image_folder" if has_images else None


def storages_in(folder: Path) -> dict[str, Path]:
    """Storage formats that a folder offers, each with the folder that holds the set."""
    found: dict[str, Path] = {}
    for path in (folder, *(folder / name for name in STORAGES)):
        manifest = read_manifest(path)
        if manifest:
            found.setdefault(manifest["storage"], path)
        elif path in (folder, folder / "jpeg") and kind_of(path):
            found.setdefault("jpeg", path)
    return found


def misfit(folder: Path, dataset: str, storage: str, image_size: int, split: str = "train") -> str | None:
    """Why the sets in a folder are not what a trial asks for, in one line; None where they are. `split` is train or test."""
    found = storages_in(folder)
    if not found:
        return f"{folder} holds no images; dataset {dataset!r} needs {DATASETS[dataset].layout}, or a converted set"
    if storage not in found:
        return f"{folder} holds storage {', '.join(map(repr, found))}, the trial asks for {storage!r}; " + _advice(
            folder, found, storage, image_size
        )
    folder = found[storage]
    manifest = read_manifest(folder)
    if manifest is None and kind_of(folder) != dataset:
        return (
            f"{folder} is laid out as dataset {kind_of(folder)!r}, not as {dataset!r}: --set dataset={kind_of(folder)}"
        )
    if manifest is not None and manifest["storage"] == "arrow_raw" and manifest["image_size"] != image_size:
        return (
            f"{folder} holds pixels for image_size {manifest['image_size']} ({manifest['stored_side']} x "
            f"{manifest['stored_side']}), the trial asks for {image_size} (which needs {stored_side(image_size)}); "
            f"convert its JPEG files again: {_command('SRC', 'DST', storage, image_size)}"
        )
    return lacking_split(folder, "val") if split == "test" else None


def lacking_split(folder: Path, split: str) -> str | None:
    """Why the one set that lies directly in a folder has no such split (train or val), as far as names tell."""
    manifest = read_manifest(folder)
    if manifest is not None:
        missing = split not in manifest["splits"]
        return f"{folder} has no split {split!r}: its source had none when it was converted" if missing else None
    has_both = os.path.isdir(folder / "train") and os.path.isdir(folder / "val")
    if split == "train" or has_both or kind_of(folder) == "tiny_imagenet":
        return None
    return f"{folder} has no images to test with; expected {folder / 'val'}/CLASS/*.JPEG"


def _advice(folder: Path, found: dict[str, Path], storage: str, image_size: int) -> str:
    """How to get the format that is asked for."""
    source = next((path for name, path in found.items() if name != "arrow_raw"), None)
    if source is None:
        command = _command("SRC", "DST", storage, image_size)
        return f"pixels cannot become JPEG files again; convert what they were made from: {command}"
    destination = f"{source}-{storage}" if source == folder else str(folder / storage)
    return f"convert it: {_command(str(source), destination, storage, image_size)}"


def _command(source: str, destination: str, storage: str, image_size: int) -> str:
    size = ["--image-size", str(image_size)] if storage == "arrow_raw" else []
    words = ["python", "-m", "study.scaling", "convert", source, destination, "--storage", storage, *size]
    return shlex.join(words)


def is_image(name: str) -> bool:
    """Whether a file's name is an image's."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
