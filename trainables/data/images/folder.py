"""Photographs in folders with the layout of ImageNet or Tiny-ImageNet, or converted from such folders.

The geometry is the same for every storage format and decoder. The centre square of each image is resized to
`stored_side(image_size)` (256 for 224; bilinear, antialiased). Then:
- `augment="none"`: the loader cuts out its centre, image_size x image_size.
- `augment="device"`: the loader delivers the square; the device crops at random and mirrors, one batch at a time.
- `augment="cpu"`: instead, loaders cut a region of random size and shape from the image itself, resize it to image_size
  and mirror it with probability 0.5. The result depends only on seed, epoch and sample.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from trainables.data.image_layout import stored_side
from trainables.data.images.augment import crop_and_flip, random_resized_crop, sample_generators
from trainables.data.images.decode import DecodeError, as_baseline, centre_square, reason, resize_region
from trainables.data.images.open import open_split
from trainables.data.images.placement import copy_to_shared_memory, set_page_cache
from trainables.data.images.records import Records
from trainables.data.loader import device_of
from trainables.data.source import DataError, DataSource
from trainables.registry import DECODERS, load
from trainables.trial import Trial
from trainables.workload import OnHost

CHANNELS = 3
CPU = torch.device("cpu")


def source(trial: Trial, split: str = "train") -> DataSource:
    """Open the images in `trial.data_dir`, in the trial's storage format and its data set's layout.

    `split` is train or test; test is the folder val. Page cache and shared memory are set up as the trial requests.
    Raises DataError if files are missing, or if opening them shows damage.
    """
    records, classes = open_split(trial.dataset, trial.data_dir, trial.storage, trial.image_size, split)
    in_use = None
    if trial.storage_place == "shared_memory":
        folder, in_use = copy_to_shared_memory(records, _prefetched_bytes(trial))
        records = replace(records, folder=folder)  # type: ignore[type-var]
    elif trial.page_cache != "as_is":
        set_page_cache(records, trial.page_cache)
    images = ImageFolder(records, trial, in_use)
    ahead = partial(_decode_on_device, trial) if DECODERS[trial.decode].ahead else None
    return DataSource(images, len(classes), CHANNELS, trial.image_size, partial(_finish_on_device, trial), ahead)


class ImageFolder(Dataset[Any]):
    """Labelled images, delivered as uint8 batches [n, 3, edge, edge], or encoded if the device decodes.

    Sample numbers are epoch * len + index, so that augmentation differs between epochs.
    """

    numbers_epochs = True

    def __init__(self, records: Records, trial: Trial, in_use: Any = None) -> None:
        self.records, self.trial, self.in_use = records, trial, in_use

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"in_use": None}  # the rank keeps the copy in use for its loaders

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, numbers: list[int]) -> tuple[Any, torch.Tensor]:
        """Return images and labels int64 [n].

        Images are uint8 [n, 3, edge, edge], or `OnHost` of (bytes of all files uint8, offsets int64 [n + 1]) if the
        device decodes. Raises DataError with the name of a file that cannot be decoded.
        """
        epochs_and_indices = [divmod(number, len(self)) for number in numbers]
        samples = [self.records[index] for _, index in epochs_and_indices]
        labels = torch.tensor([label for _, label in samples])
        contents = [content for content, _ in samples]
        try:
            if DECODERS[self.trial.decode].on_device:
                return OnHost(_pack(contents)), labels
            return self._images(contents, epochs_and_indices), labels
        except DecodeError as error:
            name = self.records.name(epochs_and_indices[error.position][1])
            raise DataError(f"cannot decode {name} ({error}); replace or remove it") from error

    def __getitem__(self, number: int) -> tuple[Any, torch.Tensor]:
        """Return one sample: image uint8 [3, edge, edge], or its encoded bytes on the host, and label int64 []."""
        images, labels = self.__getitems__([number])
        return (images if isinstance(images, OnHost) else images[0]), labels[0]

    def _images(self, contents: list[Any], epochs_and_indices: list[tuple[int, int]]) -> torch.Tensor:
        trial = self.trial
        size, side = trial.image_size, stored_side(trial.image_size)
        pixels = trial.storage == "arrow_raw"
        decode = _from_pixels if pixels else load(DECODERS[trial.decode])
        if trial.augment == "cpu":
            generators = list(sample_generators(trial.seed, epochs_and_indices))
            crops = [partial(random_resized_crop, random=generator) for generator in generators]
            images = decode(contents, crops, size, CPU)
            mirrored = torch.tensor([generator.random() < 0.5 for generator in generators])
            return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if pixels:
            images = _crop_stored(contents, side if trial.augment == "device" else size)
        else:
            images = decode(contents, [centre_square] * len(contents), side, CPU)
        return images if trial.augment == "device" else _crop_centre(images, size)


def _finish_on_device(trial: Trial, inputs: Any) -> torch.Tensor:
    """Do the work that loaders left to the device: decode, crop, mirror. Returns uint8 images."""
    images = _decode_on_device(trial, inputs) if isinstance(inputs, OnHost) else inputs
    if trial.augment == "device":
        return crop_and_flip(images, trial.image_size)
    return _crop_centre(images, trial.image_size)


def _decode_on_device(trial: Trial, inputs: OnHost) -> torch.Tensor:
    """Decode encoded images to squares, uint8 [n, 3, side, side] on the device."""
    contents = _unpack(*inputs.value)
    decode = load(DECODERS[trial.decode])
    return decode(contents, [centre_square] * len(contents), stored_side(trial.image_size), device_of(trial))


def _crop_centre(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return the centre of square images, size x size, as a new batch in channels_last."""
    if images.shape[-1] == size:
        return images
    margin = (images.shape[-1] - size) // 2
    return images[:, :, margin : margin + size, margin : margin + size].contiguous(memory_format=torch.channels_last)


def _crop_stored(contents: list[np.ndarray], size: int) -> torch.Tensor:
    """Crop the centre from stored pixels uint8 [side, side, 3], and copy each pixel only once."""
    images = np.empty((len(contents), size, size, 3), dtype=np.uint8)
    for position, pixels in enumerate(contents):
        margin = (len(pixels) - size) // 2
        images[position] = pixels[margin : margin + size, margin : margin + size]
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def _from_pixels(contents: list[np.ndarray], regions: list[Any], side: int, device: torch.device) -> torch.Tensor:
    """Stand in for a decoder: crop and resize stored pixels."""
    images = [
        resize_region(Image.fromarray(content), region, side) for content, region in zip(contents, regions, strict=True)
    ]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def _pack(contents: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate all files to one uint8 tensor. Return it and the offsets, int64 [n + 1]. Raises DecodeError."""
    files = []
    for position, content in enumerate(contents):
        try:
            files.append(as_baseline(content))
        except Exception as error:  # a damaged file raises nearly anything
            raise DecodeError(position, reason(error)) from error
    offsets = np.cumsum([0, *map(len, files)])
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), torch.from_numpy(offsets)


def _unpack(flat: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def _prefetched_bytes(trial: Trial) -> int:
    """Return the shared memory that the loader processes of a host fill with prefetched batches, in bytes."""
    batch_bytes = trial.batch_per_gpu * CHANNELS * stored_side(trial.image_size) ** 2
    return batch_bytes * trial.loader_workers * trial.prefetch_batches * trial.world_size // trial.nodes
