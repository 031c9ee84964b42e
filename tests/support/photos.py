"""Small photographs for tests: noisy gradients, as real JPEG files in the layouts of the data sets."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "owl")
SPLITS = {"train": 6, "val": 2}


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return an image with smooth gradients and slight noise. The gradients depend on the seed."""
    y, x = np.mgrid[:height, :width]
    waves = [
        np.sin((seed + 1) * x / width + channel) + np.cos((seed + 2) * y / height - channel) for channel in range(3)
    ]
    pixels = 127 + 50 * np.stack(waves, axis=-1) + np.random.default_rng(seed).normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    """Encode the image as a file's bytes."""
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """Encode uint8 pixels [h, w] or [h, w, 3] as a 16-bit PNG whose lower 8 bits differ from its upper 8."""
    rows = (pixels.astype(">u2") << 8) + 77
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    image = zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows))
    chunks = [(b"IHDR", header), (b"IDAT", image), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def decoded(content: bytes) -> Image.Image:
    """Decode the image in a file's bytes."""
    image = Image.open(BytesIO(content))
    image.load()
    return image


def write_photos(
    folder: Path, splits: Mapping[str, int] = SPLITS, classes: Sequence[str] = CLASSES, first_seed: int = 0
) -> Path:
    """Write FOLDER/SPLIT/CLASS/*.JPEG in different sizes. `splits`: split -> images per class; "" is FOLDER."""
    seed = first_seed
    for split, count in splits.items():
        for name in classes:
            path = folder / split / name
            path.mkdir(parents=True)
            for number in range(count):
                seed += 1
                picture(90 + 7 * seed % 60, 70 + 11 * seed % 70, seed).save(path / f"{name}_{number}.JPEG", quality=90)
    return folder


def write_tiny_imagenet(folder: Path) -> Path:
    """Write Tiny-ImageNet's layout with three classes and 64 x 64 pixels."""
    classes = ("n02", "n01", "n03")
    folder.mkdir()
    (folder / "wnids.txt").write_text("\n".join(classes) + "\n")
    for number, name in enumerate(classes):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for k in range(4):
            picture(64, 64, 10 * number + k).save(images / f"{name}_{k}.JPEG")
    images = folder / "val" / "images"
    images.mkdir(parents=True)
    lines = []
    for k, name in enumerate(("n03", "n01", "n02", "n01")):
        picture(64, 64, 100 + k).save(images / f"val_{k}.JPEG")
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder
