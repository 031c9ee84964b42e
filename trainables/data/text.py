"""Text as one long run of bytes, cut into streams: each row of each rank's batches reads a stream of its own, in order.

Row n of a batch goes on where row n of the batch before it ended, as models that carry their state need it.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from trainables.data.source import DataError
from trainables.trial import Trial

VOCABULARY = 256


TEST_SHARE = 20
"""the last twentieth of a text's bytes is its test split, what comes before it its training split"""


@dataclass(frozen=True)
class TextSource:
    """Bytes to train on; `dataset` delivers whole batches, or is resident on the device."""

    dataset: Dataset
    vocabulary: int


class TextDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A split of a text. A sample is named by its first byte: `sequence_length` bytes, and as targets those after each.

    Loader processes get it pickled, so it holds how to read the text and not the text: `read(path)` is a module-level
    function that gives uint8 [N] and caches its result, once a process; a memory-mapped file is not held at all.
    """

    def __init__(self, read: Callable[[str], np.ndarray], path: str, split: str, sequence_length: int) -> None:
        self.read = read
        self.path = path
        self.sequence_length = sequence_length
        length = len(read(path))
        border = length - length // TEST_SHARE
        self.first, self.end = {"train": (0, border), "test": (border, length)}[split]

    def __len__(self) -> int:
        """Bytes of the split."""
        return self.end - self.first

    def __getitems__(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets from these bytes of the split on: uint8 [n, sequence_length] each."""
        text = self.read(self.path)
        firsts = [self.first + start for start in starts]
        rows = np.stack([text[first : first + self.sequence_length + 1] for first in firsts])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample: inputs and targets uint8 [sequence_length]."""
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]


class Streams(Sampler[list[int]]):
    """For each batch of one rank the first byte of every row; it never ends.

    The `length` bytes are cut into `world_size * batch` streams of equal length; row n of rank r reads stream
    `r * batch + n`, so that no two rows share a byte. At its end, where less than a sequence is left, a stream begins
    again. Raises DataError where a stream would be shorter than one sequence.
    """

    def __init__(self, length: int, batch: int, rank: int, world_size: int, sequence_length: int) -> None:
        self.stream_bytes = length // (world_size * batch)
        if self.stream_bytes <= sequence_length:
            rows = f"{world_size} ranks of {batch} rows" if world_size > 1 else f"{batch} rows"
            raise DataError(
                f"the text has {length} bytes; {rows} read {sequence_length + 1} each: "
                "use a longer text, a smaller batch or a shorter sequence_length"
            )
        self.firsts = [(rank * batch + row) * self.stream_bytes for row in range(batch)]
        self.sequence_length = sequence_length

    def __iter__(self) -> Iterator[list[int]]:
        sequences = (self.stream_bytes - 1) // self.sequence_length  # the last byte read is a target only
        for step in itertools.cycle(range(sequences)):
            yield [first + step * self.sequence_length for first in self.firsts]


def streams(trial: Trial, dataset: TextDataset, rank: int) -> Streams:
    """The streams of this rank of a trial. Raises DataError."""
    return Streams(len(dataset), trial.batch_per_process, rank, trial.processes, trial.sequence_length)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats a byte: logits [n, t, 256] against the bytes that follow, uint8 [n, t]."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())


def sample(trial: Trial, split: str = "train") -> TextSource:
    """All topics in alphabetical order, an empty line between them. Raises DataError. `trial.data_dir` is not used."""
    return TextSource(TextDataset(read_topics, "", split, trial.sequence_length), VOCABULARY)


@lru_cache(maxsize=1)
def read_topics(path: str) -> np.ndarray:
    """The text as bytes, uint8 [N]. Raises DataError where this Python came without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"dataset 'text_sample' reads Python's own help, which this Python lacks ({error}): install the whole "
            "standard library, or use dataset 'synthetic'"
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    return np.frombuffer("\n".join(texts).encode(), dtype=np.uint8)
