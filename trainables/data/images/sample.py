"""The shipped Fashion-MNIST sample as an image folder: JPEG files, from which every storage format is made.

It lets a study compare formats, decoders and places without files of its own. Its images have 28 x 28 pixels and about
a kilobyte: they show that all works, not how fast photographs are.
"""

import hashlib
import os
from functools import partial
from pathlib import Path

from PIL import Image

from trainables.data.cache import made_once
from trainables.data.fashion_mnist import SAMPLE, read_sample
from trainables.data.images import folder as image_folder
from trainables.data.images.convert import convert
from trainables.data.source import DataSource
from trainables.trial import Trial

QUALITY = 95
_SPLITS = {"train": "train", "test": "val"}
_SAID = "the shipped Fashion-MNIST sample"


def source(trial: Trial, split: str = "train") -> DataSource:
    """Its images in the trial's storage format, written once a host into the cache; `trial.data_dir` is not used.

    Raises DataError.
    """
    base = f"fashion-mnist-sample-{hashlib.sha256(SAMPLE.read_bytes()).hexdigest()[:16]}"
    folder = made_once(f"{base}-jpeg", _SAID, _write)
    if trial.storage != "jpeg":
        name = f"{base}-{trial.storage}" + (f"-{trial.image_size}" if trial.storage == "arrow_raw" else "")
        folder = made_once(name, _SAID, partial(convert, folder, storage=trial.storage, image_size=trial.image_size))
    return image_folder.source(trial.but(dataset="image_folder", data_dir=str(folder)), split)


def _write(folder: Path) -> None:
    """SPLIT/CLASS/NUMBER.JPEG of all images, in colour as photographs are."""
    for split, name in _SPLITS.items():
        images, labels = read_sample(str(SAMPLE), split)
        for label in sorted(set(labels.tolist())):
            (folder / name / str(label)).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            path = folder / name / str(label) / f"{number:05d}.JPEG"
            Image.fromarray(image[0]).convert("RGB").save(path, "JPEG", quality=QUALITY)
    os.sync()  # before the name says that it is whole
