"""Makes a folder of photographs of ImageNet's sizes, in ImageNet's layout, to measure loading with.

    python -m scripts.make_photos DIR --images 20000

The photographs are cut at random places and scales from larger ones: by default from the JPEG wallpapers that three
Debian packages install (apt install mate-backgrounds gnome-backgrounds plasma-workspace-wallpapers). Each source is a
class. They are resized to 500 x 375, 375 x 500 or 500 x 333 pixels, the commonest sizes of ImageNet, and encoded with
at most 100 to 260 kB; ImageNet's mean is 110 kB. Loading and decoding cost what they cost there; what a network learns from them says nothing.

The same sources, number and seed give the same images, with the same version of Pillow.
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
"""of an image, evenly spread; smooth ones have fewer, so that the mean is near ImageNet's 110 kB"""

QUALITIES = (50, 65, 75, 82, 88, 92, 95, 98)
LARGEST_REDUCTION = 2.5
"""pixels of the source / pixels of the image, along an edge"""

SMALLEST_SOURCE = 1000
"""short side in pixels of a source: smaller ones would give the same picture again and again"""


SMALLEST_BITS = 1.0
"""bits a pixel of a source's own file: pictures with less are drawings and gradients, easier to decode than photographs"""


class PhotosError(Exception):
    """Photographs that cannot be made: one line."""


def make_photos(
    destination: Path,
    images: int,
    sources: Sequence[Path] = SOURCES,
    *,
    share_to_test: float = 0.05,
    seed: int = 0,
    processes: int | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> float:
    """Writes DESTINATION/train/CLASS and val/CLASS with so many images in all; gives their mean size in bytes.

    Nothing is at `destination` before all of it is. Raises PhotosError.
    """
    if destination.exists():
        raise PhotosError(f"{destination} is there already; remove it, or give another folder")
    photographs = find_sources(sources)
    if images < 2 * len(photographs):
        raise PhotosError(f"{images} images are fewer than two for each of {len(photographs)} sources; ask for more")
    beside = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    tasks = []
    for (name, path), numbers in zip(
        photographs.items(), np.array_split(np.arange(images), len(photographs)), strict=True
    ):
        tests = max(1, round(share_to_test * len(numbers)))
        for split, part in (("val", numbers[:tests]), ("train", numbers[tests:])):
            tasks += [
                _Task(path, beside / split / name, part[k : k + 50].tolist(), seed) for k in range(0, len(part), 50)
            ]
    total_bytes = done = 0
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        for written, size in pool.map(_cut, tasks):
            done, total_bytes = done + written, total_bytes + size
            report(done)
    _describe(beside, photographs, images, seed, total_bytes / images)
    beside.rename(destination)
    return total_bytes / images


def find_sources(folders: Sequence[Path]) -> dict[str, Path]:
    """The JPEG files in these folders that are large enough, by the names of their classes. Raises PhotosError."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in (".jpg", ".jpeg") and path.is_file() and not path.is_symlink():
                with Image.open(path) as image:
                    bits = 8 * path.stat().st_size / (image.width * image.height)
                    if min(image.size) >= SMALLEST_SOURCE and bits >= SMALLEST_BITS:
                        name = "-".join(path.relative_to(folder).with_suffix("").parts)
                        found[re.sub(r"[^A-Za-z0-9_.-]", "_", name)] = path
    if not found:
        raise PhotosError(
            f"no JPEG photograph of {SMALLEST_SOURCE} pixels or more in {', '.join(map(str, folders))}; "
            f"on Debian: apt install --no-install-recommends {' '.join(PACKAGES)}; or name folders: --sources DIR"
        )
    return found


@dataclass(frozen=True)
class _Task:
    """Images of these numbers, from one source into one folder."""

    source: Path
    folder: Path
    numbers: list[int]
    seed: int


def _cut(task: _Task) -> tuple[int, int]:
    """Writes a task's images; gives how many, and their bytes."""
    task.folder.mkdir(parents=True, exist_ok=True)
    source, size = _opened(task.source), 0
    for number in task.numbers:
        random = np.random.default_rng((task.seed, number))
        content = encoded(piece(source, random), random.uniform(*BYTES))
        (task.folder / f"{number:08d}.JPEG").write_bytes(content)
        size += len(content)
    return len(task.numbers), size


@lru_cache(maxsize=1)
def _opened(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def piece(source: Image.Image, random: np.random.Generator) -> Image.Image:
    """A random part of the source, at a random scale, every second one mirrored, in one of SIZES."""
    width, height = SIZES[random.choice(len(SIZES), p=SHARES)]
    scale = random.uniform(1, min(LARGEST_REDUCTION, source.width / width, source.height / height))
    w, h = int(width * scale), int(height * scale)
    x, y = int(random.integers(source.width - w + 1)), int(random.integers(source.height - h + 1))
    image = source.resize((width, height), Image.Resampling.LANCZOS, box=(x, y, x + w, y + h))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def encoded(image: Image.Image, most_bytes: float) -> bytes:
    """JPEG of the best quality that needs no more than so many bytes, or of the lowest."""
    low, high = 0, len(QUALITIES) - 1
    best = None
    while low < high:
        middle = (low + high + 1) // 2
        content = _jpeg(image, QUALITIES[middle])
        if len(content) <= most_bytes:
            low, best = middle, content
        else:
            high = middle - 1
    return best or _jpeg(image, QUALITIES[0])


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def _describe(folder: Path, photographs: dict[str, Path], images: int, seed: int, mean_bytes: float) -> None:
    """README.md and photos.json: where the images come from, and under which licence."""
    licences = {name: _licences(Path(f"/usr/share/doc/{name}/copyright")) for name in PACKAGES}
    installed = {name: found for name, found in licences.items() if found}
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
        "# Photographs to measure loading with",
        "",
        f"{images:,} images cut from wallpapers: {len(photographs)} sources, each a class; {mean_bytes / 1e3:.0f} kB in the mean.",
        "Made by `python -m scripts.make_photos`. The sources are listed in photos.json; their licences, as the Debian",
        "packages that were installed state them in /usr/share/doc/PACKAGE/copyright:",
        "",
        *(f"- {name}: {', '.join(found)}" for name, found in installed.items()),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def _licences(path: Path) -> list[str]:
    """The licences that a Debian copyright file names."""
    if not path.is_file():
        return []
    return sorted(set(re.findall(r"^License: *(\S.*)$", path.read_text(errors="replace"), re.MULTILINE)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, metavar="DIR")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--sources", type=Path, nargs="+", default=SOURCES, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        mean_bytes = make_photos(options.destination, options.images, options.sources, seed=options.seed)
    except (PhotosError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.destination}: {options.images:,} images of {mean_bytes / 1e3:.0f} kB in the mean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
