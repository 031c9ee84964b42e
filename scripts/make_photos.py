"""Create photographs with ImageNet's sizes in ImageNet's layout, to measure the loading of images.

    python -m scripts.make_photos DIR --images 20000

The images are crops of larger photographs at random positions and scales, by default of the JPEG wallpapers of three
Debian packages (apt install mate-backgrounds gnome-backgrounds plasma-workspace-wallpapers). Each source is a class.
The images have 500 x 375, 375 x 500 or 500 x 333 pixels, the most common sizes of ImageNet, and at most 100 to 260 kB;
ImageNet's mean is 110 kB. So loading and decoding cost the same as with ImageNet. Accuracies mean nothing.

With the same version of Pillow, the same sources, number and seed give the same images.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

SOURCES = (Path("/usr/share/backgrounds/mate"), Path("/usr/share/backgrounds/gnome"), Path("/usr/share/wallpapers"))
PACKAGES = ("mate-backgrounds", "gnome-backgrounds", "plasma-workspace-wallpapers")
SIZES, SHARES = ((500, 375), (375, 500), (500, 333)), (0.6, 0.2, 0.2)
BYTES = (100_000, 260_000)
"""uniform distribution of the maximum file size; smooth images are smaller, so the mean is near ImageNet's 110 kB"""

QUALITIES = (50, 65, 75, 82, 88, 92, 95, 98)
MAX_REDUCTION = 2.5
"""pixels of the source / pixels of the image, along an edge"""

MIN_SOURCE_PIXELS = 1000
"""short side of a source; smaller ones would give nearly equal images"""

MIN_SOURCE_BITS = 1.0
"""bits per pixel in a source's file; drawings and gradients have fewer and decode faster than photographs"""


class PhotosError(Exception):
    """The photographs cannot be created. The message is one line."""


def make_photos(
    destination: Path,
    images: int,
    sources: Sequence[Path] = SOURCES,
    *,
    test_share: float = 0.05,
    seed: int = 0,
    processes: int | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> float:
    """Write `images` images to DESTINATION/train/CLASS and val/CLASS, and return their mean size in bytes.

    `destination` only exists once it is complete. `report` is called with the number of images done. Raises
    PhotosError.
    """
    if destination.exists():
        raise PhotosError(f"{destination} already exists; remove it, or choose another folder")
    photographs = find_sources(sources)
    if images < 2 * len(photographs):
        raise PhotosError(
            f"{images} images are too few for {len(photographs)} sources; use at least {2 * len(photographs)}"
        )
    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tasks = []
    for (name, path), numbers in zip(
        photographs.items(), np.array_split(np.arange(images), len(photographs)), strict=True
    ):
        test_count = max(1, round(test_share * len(numbers)))
        for split, part in (("val", numbers[:test_count]), ("train", numbers[test_count:])):
            tasks += [
                _Task(path, partial / split / name, part[k : k + 50].tolist(), seed) for k in range(0, len(part), 50)
            ]
    total_bytes = done = 0
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        for written, size in pool.map(_write_images, tasks):
            done, total_bytes = done + written, total_bytes + size
            report(done)
    _write_description(partial, photographs, images, seed, total_bytes / images)
    partial.rename(destination)
    return total_bytes / images


def find_sources(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the large enough JPEG files in these folders, by class name. Raises PhotosError if there are none."""
    sources = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file() and not path.is_symlink():
                with Image.open(path) as image:
                    bits = 8 * path.stat().st_size / (image.width * image.height)
                    if min(image.size) >= MIN_SOURCE_PIXELS and bits >= MIN_SOURCE_BITS:
                        name = "-".join(path.relative_to(folder).with_suffix("").parts)
                        sources[re.sub(r"[^A-Za-z0-9_.-]", "_", name)] = path
    if not sources:
        raise PhotosError(
            f"no JPEG photograph of {MIN_SOURCE_PIXELS} pixels or more in {', '.join(map(str, folders))}; "
            f"on Debian: apt install --no-install-recommends {' '.join(PACKAGES)}; or pass --sources DIR"
        )
    return sources


@dataclass(frozen=True)
class _Task:
    """Images with these numbers, from one source to one folder."""

    source: Path
    folder: Path
    numbers: list[int]
    seed: int


def _write_images(task: _Task) -> tuple[int, int]:
    """Write a task's images, and return their number and total bytes."""
    task.folder.mkdir(parents=True, exist_ok=True)
    source, size = _open(task.source), 0
    for number in task.numbers:
        random = np.random.default_rng((task.seed, number))
        content = encode(random_crop(source, random), random.uniform(*BYTES))
        (task.folder / f"{number:08d}.JPEG").write_bytes(content)
        size += len(content)
    return len(task.numbers), size


@lru_cache(maxsize=1)
def _open(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def random_crop(source: Image.Image, random: np.random.Generator) -> Image.Image:
    """Return a crop of random position, scale and size (one of SIZES), mirrored with probability 0.5."""
    width, height = SIZES[random.choice(len(SIZES), p=SHARES)]
    scale = random.uniform(1, min(MAX_REDUCTION, source.width / width, source.height / height))
    w, h = int(width * scale), int(height * scale)
    x, y = int(random.integers(source.width - w + 1)), int(random.integers(source.height - h + 1))
    image = source.resize((width, height), Image.Resampling.LANCZOS, box=(x, y, x + w, y + h))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def encode(image: Image.Image, max_bytes: float) -> bytes:
    """Return a JPEG of the best quality with at most `max_bytes`, or of the lowest quality if none fits."""
    low, high = 0, len(QUALITIES) - 1
    best = None
    while low < high:
        middle = (low + high + 1) // 2
        content = _jpeg(image, QUALITIES[middle])
        if len(content) <= max_bytes:
            low, best = middle, content
        else:
            high = middle - 1
    return best or _jpeg(image, QUALITIES[0])


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _write_description(folder: Path, photographs: dict[str, Path], images: int, seed: int, mean_bytes: float) -> None:
    """Write README.md and photos.json with the sources of the images and their licences."""
    licences = {name: _licences(Path(f"/usr/share/doc/{name}/copyright")) for name in PACKAGES}
    installed = {name: names for name, names in licences.items() if names}
    facts = {
        "images": images,
        "seed": seed,
        "mean_bytes": round(mean_bytes),
        "made_by": "python -m scripts.make_photos",
        "cut_from": {name: str(path) for name, path in photographs.items()},
        "licences_of_packages": installed,
    }
    (folder / "photos.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [
        "# Photographs to measure the loading of images",
        "",
        f"{images:,} images cropped from {len(photographs)} wallpapers, one class per wallpaper; mean size "
        f"{mean_bytes / 1e3:.0f} kB.",
        "Created by `python -m scripts.make_photos`. photos.json lists the sources. Their licences, according to",
        "/usr/share/doc/PACKAGE/copyright of the installed Debian packages:",
        "",
        *(f"- {name}: {', '.join(names)}" for name, names in installed.items()),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _licences(path: Path) -> list[str]:
    """Return the licences listed in a Debian copyright file."""
    if not path.is_file():
        return []
    return sorted(set(re.findall(r"^License: *(\S.*)$", path.read_text(errors="replace"), re.MULTILINE)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, metavar="DIR")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--sources", type=Path, nargs="+", default=SOURCES, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        mean_bytes = make_photos(options.destination, options.images, options.sources, seed=options.seed)
    except (PhotosError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.destination}: {options.images:,} images, mean size {mean_bytes / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
