"""The shipped Fashion-MNIST sample as an image folder of JPEG files, from which every storage format is built.

With it, a study can compare formats, decoders and storage locations without any other files. Its images have 28 x 28
pixels and about 1 kB each. They show that everything works, not how fast photographs load.
"""

import hashlib
import os
from functools import partial
from pathlib import Path

from PIL import Image

from trainables.data.cache import build_once
from trainables.data.fashion_mnist import SAMPLE, read_sample
from trainables.data.images import folder as image_folder
from trainables.data.images.convert import convert
from trainables.data.source import DataSource
from trainables.trial import Trial

QUALITY = 95
_SPLITS = {"train": "train", "test": "val"}
_DESCRIPTION = "the shipped Fashion-MNIST sample"


def source(trial: Trial, split: str = "train") -> DataSource:
    """Return the images in the trial's storage format, written to the cache once per host. Raises DataError.

    `trial.data_dir` is not used.
    """
    base = f"fashion-mnist-sample-{hashlib.sha256(SAMPLE.read_bytes()).hexdigest()[:16]}"
    folder = build_once(f"{base}-jpeg", _DESCRIPTION, _write)
    if trial.storage != "jpeg":
        name = f"{base}-{trial.storage}" + (f"-{trial.image_size}" if trial.storage == "arrow_raw" else "")
        conversion = partial(convert, folder, storage=trial.storage, image_size=trial.image_size)
        folder = build_once(name, _DESCRIPTION, conversion)
    return image_folder.source(trial.but(dataset="image_folder", data_dir=str(folder)), split)


def _write(folder: Path) -> None:
    """Write all images as SPLIT/CLASS/NUMBER.JPEG, in RGB like photographs."""
    for split, name in _SPLITS.items():
        images, labels = read_sample(str(SAMPLE), split)
        for label in sorted(set(labels.tolist())):
            (folder / name / str(label)).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / name / str(label) / f"{number:05d}.JPEG"
            Image.fromarray(image[0]).convert("RGB").save(path, "JPEG", quality=QUALITY)
    os.sync()  # before the folder gets the name of a complete one
