"""Recognise image sets on disk: the data set's layout and its storage formats. Used by planning, so no torch here.

A converted set is a folder with a manifest. A folder of image files needs none. A folder may also hold one set per
storage format, in subfolders named after the formats (DIR/jpeg, DIR/lmdb, ...), so that a study can compare them.
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

SPLITS = ("train", "val")

MAX_COUNT = 10**9
"""most images of a split"""

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
"""of image files, in lower case; other files are ignored"""

STORED_RATIO = 256 / 224
"""edge of the stored square / edge of the model's input, which leaves room for a random crop; 256 and 224 as in the
usual evaluation on ImageNet (Krizhevsky et al., 2012)"""


def stored_side(image_size: int) -> int:
    """Return the edge in pixels of the stored square: 256 for 224."""
    return round(image_size * STORED_RATIO)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a converted set, or None if it is missing, damaged or of an unknown version.

    All its names can be joined to a path without leaving the folder.
    """
    manifest = _manifest(folder)
    return None if manifest is None or _bad_entry(manifest) else manifest


def manifest_error(folder: Path) -> str | None:
    """Return which entry makes `read_manifest` refuse the manifest of a converted set, in one line, or None."""
    manifest = _manifest(folder)
    reason = manifest and _bad_entry(manifest)
    return f"{folder / MANIFEST}: {reason}; convert the original images again" if reason else None


def bad_class(name: Any) -> str | None:
    """Return why a class cannot have a folder of this name, or None if it can. Hidden folders hold no images."""
    if isinstance(name, str) and name and not name.startswith(".") and "/" not in name and "\0" not in name:
        return None
    return f"class {name!r} is not the name of a visible folder"


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        path = folder / MANIFEST
        manifest: Any = json.loads(path.read_text()) if path.is_file() else None  # a named pipe would hang
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict):
        return None
    known = manifest.get("format") == FORMAT and manifest.get("version") == VERSION
    valid = known and isinstance(storage := manifest.get("storage"), str) and storage in STORAGES
    valid = valid and isinstance(manifest.get("splits"), dict) and isinstance(manifest.get("classes"), list)
    return manifest if valid else None


def _bad_entry(manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with a manifest: names of splits and classes become paths, counts become loops."""
    unknown = next((split for split in manifest["splits"] if split not in SPLITS), None)
    if unknown is not None:
        return f"split {unknown!r} is not known; allowed: {', '.join(SPLITS)}"
    counts = {
        f"count of split {split!r}": entry.get("count") if isinstance(entry, dict) else None
        for split, entry in manifest["splits"].items()
    }
    if manifest["storage"].startswith("arrow"):
        counts["part_images"] = manifest.get("part_images")
    if manifest["storage"] == "arrow_raw":
        counts |= {name: manifest.get(name) for name in ("image_size", "stored_side")}
    for name, count in counts.items():
        if type(count) is not int or not 0 < count < MAX_COUNT:
            return f"{name} is {count!r}, not a number of 1 to {MAX_COUNT}"
    return next(filter(None, map(bad_class, manifest["classes"])), None)


def kind_of(folder: Path) -> str | None:
    """Return the data set whose layout a folder has: tiny_imagenet, image_folder, or None."""
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
    """Return the storage formats available in a folder, each with the folder of its set."""
    storages: dict[str, Path] = {}
    for path in (folder, *(folder / name for name in STORAGES)):
        manifest = read_manifest(path)
        if manifest:
            storages.setdefault(manifest["storage"], path)
        elif path in (folder, folder / "jpeg") and kind_of(path):
            storages.setdefault("jpeg", path)
    return storages


def layout_mismatch(folder: Path, dataset: str, storage: str, image_size: int, split: str = "train") -> str | None:
    """Return why a folder does not hold the set that a trial needs, in one line, or None if it does.

    `split` is train or test.
    """
    storages = storages_in(folder)
    if not storages:
        return f"no images in {folder}; dataset {dataset!r} needs {DATASETS[dataset].layout}, or a converted set"
    if storage not in storages:
        available = ", ".join(map(repr, storages))
        fix = _conversion_advice(folder, storages, storage, image_size)
        return f"{folder} has storage {available}, but the trial needs {storage!r}; {fix}"
    folder = storages[storage]
    manifest = read_manifest(folder)
    if manifest is None and kind_of(folder) != dataset:
        actual = kind_of(folder)
        return f"{folder} has the layout of dataset {actual!r}, not {dataset!r}; use --set dataset={actual}"
    if manifest is not None and manifest["storage"] == "arrow_raw" and manifest["image_size"] != image_size:
        return (
            f"{folder} has pixels for image_size {manifest['image_size']} ({manifest['stored_side']} x "
            f"{manifest['stored_side']}), but the trial's image_size is {image_size} (which needs "
            f"{stored_side(image_size)}); convert its JPEG files again: {_command('SRC', 'DST', storage, image_size)}"
        )
    return missing_split(folder, "val") if split == "test" else None


def missing_split(folder: Path, split: str) -> str | None:
    """Return why the set directly in a folder lacks a split (train or val), judged by names only, or None."""
    manifest = read_manifest(folder)
    if manifest is not None:
        if split in manifest["splits"]:
            return None
        return f"{folder} has no split {split!r}, because its source had none when it was converted"
    has_both = os.path.isdir(folder / "train") and os.path.isdir(folder / "val")
    if split == "train" or has_both or kind_of(folder) == "tiny_imagenet":
        return None
    return f"no test images in {folder}; expected {folder / 'val'}/CLASS/*.JPEG"


def _conversion_advice(folder: Path, storages: dict[str, Path], storage: str, image_size: int) -> str:
    """Return how to get the requested format."""
    source = next((path for name, path in storages.items() if name != "arrow_raw"), None)
    if source is None:
        command = _command("SRC", "DST", storage, image_size)
        return f"pixels cannot be converted back to JPEG; convert the original images: {command}"
    destination = f"{source}-{storage}" if source == folder else str(folder / storage)
    return f"convert it: {_command(str(source), destination, storage, image_size)}"


def _command(source: str, destination: str, storage: str, image_size: int) -> str:
    size = ["--image-size", str(image_size)] if storage == "arrow_raw" else []
    words = ["python", "-m", "study.scaling", "convert", source, destination, "--storage", storage, *size]
    return shlex.join(words)


def is_image(name: str) -> bool:
    """Return True if a file name is that of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
