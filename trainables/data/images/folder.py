"""Photographs in folders, or converted from such folders: ImageNet's layout and Tiny-ImageNet's.

Geometry, the same for every storage format and decoder: of each image the centre square, resized to
`stored_side(image_size)` (256 for 224; bilinear, antialiased), then
- `augment="none"`: its centre, image_size x image_size, cut out by the loader;
- `augment="device"`: the whole square is delivered, and the device crops at random and mirrors a batch at once;
- `augment="cpu"`: instead of all that, loaders cut a region of random size and shape from the image itself, resize it
  to image_size and mirror every second one; the same for the same seed, epoch and sample.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from trainables.data.image_layout import stored_side
from trainables.data.images.augment import crop_and_flip, generators, random_resized_crop
from trainables.data.images.decode import DecodeError, as_baseline, centre_square, reason, resized
from trainables.data.images.open import open_split
from trainables.data.images.placement import in_shared_memory, set_page_cache
from trainables.data.images.records import Records
from trainables.data.loader import device_of
from trainables.data.source import DataError, DataSource
from trainables.registry import DECODERS, load
from trainables.trial import Trial
from trainables.workload import OnHost

CHANNELS = 3
CPU = torch.device("cpu")


def source(trial: Trial, split: str = "train") -> DataSource:
    """The images in `trial.data_dir`, in the trial's storage format and as its data set lays them out.

    `split` is train, or test: the folder val. Page cache and shared memory are brought into the state that the trial
    asks for. Raises DataError where files are missing, or are damaged as far as opening them tells.
    """
    records, classes = open_split(trial.dataset, trial.data_dir, trial.storage, trial.image_size, split)
    in_use = None
    if trial.storage_place == "shared_memory":
        folder, in_use = in_shared_memory(records, _loaders_bytes(trial))
        records = replace(records, folder=folder)  # type: ignore[type-var]
    elif trial.page_cache != "as_is":
        set_page_cache(records, trial.page_cache)
    images = ImageFolder(records, trial, in_use)
    ahead = partial(_decoded, trial) if DECODERS[trial.decode].ahead else None
    return DataSource(images, len(classes), CHANNELS, trial.image_size, partial(_on_device, trial), ahead)


class ImageFolder(Dataset[Any]):
    """Labelled images, delivered a batch at a time as uint8 [n, 3, edge, edge], or encoded where the device decodes.

    A sample is asked for by number: epoch * len + index, so that its augmentation can be told from other epochs'.
    """

    numbers_epochs = True

    def __init__(self, records: Records, trial: Trial, in_use: Any = None) -> None:
        self.records, self.trial, self.in_use = records, trial, in_use

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"in_use": None}  # the rank keeps its loaders' files for them

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, numbers: list[int]) -> tuple[Any, torch.Tensor]:
        """(images, labels int64 [n]); images are uint8, or `OnHost` of (all files' bytes uint8, where each begins int64).

        Raises DataError with the name of a file that cannot be decoded.
        """
        places = [divmod(number, len(self)) for number in numbers]
        samples = [self.records[index] for _, index in places]
        labels = torch.tensor([label for _, label in samples])
        contents = [content for content, _ in samples]
        try:
            if DECODERS[self.trial.decode].on_device:
                return OnHost(_packed(contents)), labels
            return self._images(contents, places), labels
        except DecodeError as error:
            name = self.records.name(places[error.place][1])
            raise DataError(f"{name} cannot be decoded ({error}): replace or remove it") from error

    def __getitem__(self, number: int) -> tuple[Any, torch.Tensor]:
        """One sample: image uint8 [3, edge, edge], or its encoded bytes on the host, and label int64 []."""
        images, labels = self.__getitems__([number])
        return (images if isinstance(images, OnHost) else images[0]), labels[0]

    def _images(self, contents: list[Any], places: list[tuple[int, int]]) -> torch.Tensor:
        trial = self.trial
        size, side = trial.image_size, stored_side(trial.image_size)
        pixels = trial.storage == "arrow_raw"
        decode = _from_pixels if pixels else load(DECODERS[trial.decode])
        if trial.augment == "cpu":
            random = list(generators(trial.seed, places))
            images = decode(contents, [partial(random_resized_crop, random=own) for own in random], size, CPU)
            mirrored = torch.tensor([own.random() < 0.5 for own in random])
            return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if pixels:
            images = _centres(contents, side if trial.augment == "device" else size)
        else:
            images = decode(contents, [centre_square] * len(contents), side, CPU)
        return images if trial.augment == "device" else _centre(images, size)


def _on_device(trial: Trial, inputs: Any) -> torch.Tensor:
    """What is left to do on the device, as uint8: decode where it decodes, crop and mirror where it augments."""
    images = _decoded(trial, inputs) if isinstance(inputs, OnHost) else inputs
    if trial.augment == "device":
        return crop_and_flip(images, trial.image_size)
    return _centre(images, trial.image_size)


def _decoded(trial: Trial, inputs: OnHost) -> torch.Tensor:
    """Encoded images as squares, uint8 [n, 3, side, side] on the device."""
    contents = _unpacked(*inputs.value)
    decode = load(DECODERS[trial.decode])
    return decode(contents, [centre_square] * len(contents), stored_side(trial.image_size), device_of(trial))


def _centre(images: torch.Tensor, size: int) -> torch.Tensor:
    """The middle of square images, size x size: a batch of its own in memory, pixel by pixel with all channels."""
    if images.shape[-1] == size:
        return images
    margin = (images.shape[-1] - size) // 2
    return images[:, :, margin : margin + size, margin : margin + size].contiguous(memory_format=torch.channels_last)


def _centres(contents: list[np.ndarray], size: int) -> torch.Tensor:
    """The same from stored pixels uint8 [side, side, 3], each touched once."""
    images = np.empty((len(contents), size, size, 3), dtype=np.uint8)
    for place, pixels in enumerate(contents):
        margin = (len(pixels) - size) // 2
        images[place] = pixels[margin : margin + size, margin : margin + size]
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def _from_pixels(contents: list[np.ndarray], regions: list[Any], side: int, device: torch.device) -> torch.Tensor:
    """What a decoder does, from stored pixels."""
    images = [
        resized(Image.fromarray(content), region, side) for content, region in zip(contents, regions, strict=True)
    ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _packed(contents: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """All files in one uint8 tensor, and int64 [n + 1] where each begins. Raises DecodeError."""
    files = []
    for place, content in enumerate(contents):
        try:
            files.append(as_baseline(content))
        except Exception as error:  # a damaged file raises nearly anything
            raise DecodeError(place, reason(error)) from error
    ends = np.cumsum([0, *map(len, files)])
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), torch.from_numpy(ends)


def _unpacked(flat: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    return [flat[begin:end] for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _loaders_bytes(trial: Trial) -> int:
    """Shared memory that the loader processes of a host fill with batches that are ready."""
    batch_bytes = trial.batch_per_gpu * CHANNELS * stored_side(trial.image_size) ** 2
    return batch_bytes * trial.loader_workers * trial.prefetch_batches * trial.world_size // trial.nodes
