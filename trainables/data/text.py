"""Text as one array of bytes or token ids, cut into streams. Each row of each rank's batches reads its own, in order.

Row n of a batch continues where row n of the previous batch ended, as models that carry their state require.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from trainables.data.source import DataError
from trainables.trial import Trial

VOCABULARY = 256

TEST_SHARE = 20
"""the last 1/20 of a text's bytes is its test split, the rest its training split"""


@dataclass(frozen=True)
class TextSource:
    """Bytes or token ids to train on. `dataset` delivers complete batches, or is resident on the device."""

    dataset: Dataset
    vocabulary: int


class TextDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A split of a text. A sample, addressed by its first byte, is `sequence_length` bytes and the byte after each.

    A text of token ids has ids in the place of bytes. The data set is pickled into loader processes, so it holds a
    function that reads the text instead of the text. `read(path)` is a module-level function that returns uint8 [N],
    or ids that can be sliced, and caches its result once per process. A memory-mapped file is not copied into memory.
    split: train, test or all. vocabulary: ids are below it.
    """

    def __init__(
        self,
        read: Callable[[str], Any],
        path: str,
        split: str,
        sequence_length: int,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.read = read
        self.path = path
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        length = len(read(path))
        border = length - length // TEST_SHARE
        self.first, self.end = {"train": (0, border), "test": (border, length), "all": (0, length)}[split]

    def __len__(self) -> int:
        """Return the number of bytes or ids in the split."""
        return self.end - self.first

    def __getitems__(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets that start here in the split: uint8 or int32 [n, sequence_length] each.

        Raises DataError for an id outside of the vocabulary.
        """
        text = self.read(self.path)
        firsts = [self.first + start for start in starts]
        rows = np.stack([text[first : first + self.sequence_length + 1] for first in firsts])
        if rows.dtype != np.uint8:
            if (largest := int(rows.max())) >= self.vocabulary:
                raise DataError(
                    f"{self.path} contains token id {largest}, but the model's vocabulary has {self.vocabulary} ids; "
                    "encode the text for this model, or choose another model"
                )
            rows = rows.astype(np.int32)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample: inputs and targets [sequence_length]."""
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]


class Streams(Sampler[list[int]]):
    """Yield the first byte of every row for each batch of one rank, forever.

    The `length` bytes are cut into `world_size * batch` streams of equal length. Row n of rank r reads stream `r *
    batch + n`, so no two rows share a byte. A stream with less than one sequence left restarts. Raises DataError if a
    stream would be shorter than one sequence.
    """

    def __init__(self, length: int, batch: int, rank: int, world_size: int, sequence_length: int) -> None:
        self.stream_bytes = length // (world_size * batch)
        if self.stream_bytes <= sequence_length:
            rows = f"{world_size} ranks of {batch} rows" if world_size > 1 else f"{batch} rows"
            raise DataError(
                f"the text has a length of {length}, too few for {rows} of {sequence_length + 1} each; "
                "use a longer text, a smaller batch or a shorter sequence_length"
            )
        self.firsts = [(rank * batch + row) * self.stream_bytes for row in range(batch)]
        self.sequence_length = sequence_length

    def __iter__(self) -> Iterator[list[int]]:
        sequences = (self.stream_bytes - 1) // self.sequence_length  # the last byte is only a target
        for step in itertools.cycle(range(sequences)):
            yield [first + step * self.sequence_length for first in self.firsts]


def streams(trial: Trial, dataset: TextDataset, rank: int) -> Streams:
    """Return the streams of one rank of a trial. Raises DataError."""
    return Streams(len(dataset), trial.batch_per_process, rank, trial.processes, trial.sequence_length)


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats of logits [n, t, vocabulary] and the following bytes or ids [n, t]."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())


def sample(trial: Trial, split: str = "train") -> TextSource:
    """Return the text of `read_topics`. `trial.data_dir` is not used. Raises DataError."""
    return TextSource(TextDataset(read_topics, "", split, trial.sequence_length), VOCABULARY)


@lru_cache(maxsize=1)
def read_topics(path: str) -> np.ndarray:
    """Return Python's help topics in alphabetical order, separated by line breaks: uint8 [N].

    Raises DataError if this Python installation lacks them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"dataset 'text_sample' needs Python's help topics, which this Python lacks ({error}); install the "
            "complete standard library, or use dataset 'synthetic'"
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    return np.frombuffer("\n".join(texts).encode(), dtype=np.uint8)
