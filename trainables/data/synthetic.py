"""Random data, either resident on the device (compute only) or delivered by loaders without decoding."""

from functools import lru_cache

import torch
from torch.utils.data import Dataset, TensorDataset

from trainables.data.loader import device_of
from trainables.data.source import DataSource
from trainables.data.text import VOCABULARY, TextSource
from trainables.trial import Trial

CLASSES = 1000
CHANNELS = 3
LENGTH = 1_281_167
"""images per epoch, as in ImageNet's training split"""

_SLICES = 64
_STRIDE_BYTES = 4096


def resident(trial: Trial) -> DataSource:
    """Return one batch of standard normal images and random labels on the rank's device, used in every step.

    Images are float32 [batch_per_process, 3, image_size, image_size] in the trial's memory format. They are random
    because zeros draw less power and run faster.
    """
    device = device_of(trial)
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    images = torch.randn(trial.batch_per_process, CHANNELS, trial.image_size, trial.image_size, device=device)
    labels = torch.randint(CLASSES, (trial.batch_per_process,), device=device)
    dataset = TensorDataset(images.contiguous(memory_format=layout), labels)
    return DataSource(dataset=dataset, classes=CLASSES, channels=CHANNELS, image_size=trial.image_size)


def resident_text(trial: Trial) -> TextSource:
    """Return one batch of random bytes on the rank's device, used in every step.

    Inputs and targets are uint8 [batch_per_process, sequence_length].
    """
    return TextSource(resident_rows(trial, VOCABULARY, torch.uint8), VOCABULARY)


def resident_rows(trial: Trial, vocabulary: int, dtype: torch.dtype) -> TensorDataset:
    """Return random inputs and targets on the rank's device: [batch_per_process, sequence_length] each."""
    shape = (trial.batch_per_process, trial.sequence_length + 1)
    rows = torch.randint(vocabulary, shape, dtype=dtype, device=device_of(trial))
    return TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def from_loaders(trial: Trial) -> DataSource:
    """Return random images from loaders, to measure processes, queues and copies without reading or decoding."""
    return DataSource(RandomImages(trial.image_size), CLASSES, CHANNELS, trial.image_size)


class RandomImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images that are overlapping slices of one block, so that a batch costs one copy and nothing else."""

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __len__(self) -> int:
        return LENGTH

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch: images uint8 [n, 3, image_size, image_size] and labels int64 [n]."""
        numbers = torch.tensor(indices)
        images = _slices(CHANNELS * self.image_size**2).index_select(0, numbers % _SLICES)
        return images.view(-1, CHANNELS, self.image_size, self.image_size), numbers % CLASSES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample: image uint8 [3, image_size, image_size] and label int64 []."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]


@lru_cache(maxsize=1)
def _slices(image_bytes: int) -> torch.Tensor:
    """Return uint8 [64, image_bytes]: slices of one block, 4 KiB apart. Built once per process."""
    size = image_bytes + (_SLICES - 1) * _STRIDE_BYTES
    block = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return block.unfold(0, image_bytes, _STRIDE_BYTES)
