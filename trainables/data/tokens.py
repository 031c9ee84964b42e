"""Token ids in files as nanoGPT and llm.c write them, or in the bundled sample. Read in order, as text is.

nanoGPT: uint16 without a header, `train.bin` and `val.bin`. llm.c: a header of 256 int32 (magic number, version, number
of tokens), then uint16 (GPT-2) or uint32 (Llama 3); shards such as `fineweb_train_000001.bin` and `..._val_000000.bin`.
Files are mapped, so they may be larger than memory.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from trainables.data.files import missing_tokens, token_files
from trainables.data.source import DataError
from trainables.data.synthetic import resident_rows
from trainables.data.text import TextDataset, TextSource
from trainables.registry import MODELS
from trainables.trial import Trial

HEADER_BYTES = 1024
TYPES_BY_MAGIC: dict[int, np.dtype[Any]] = {20_240_520: np.dtype("<u2"), 20_240_801: np.dtype("<u4")}
"""magic number of a file of llm.c -> type of its tokens"""

SAMPLE = Path(__file__).with_name("token_sample.parquet")
"""written by `scripts/token_sample.py`"""


class Shards:
    """Token ids of several files as one sequence, of which only slices are read."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self.shards = shards
        self.ends = list(itertools.accumulate(map(len, shards)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the ids from `part.start` to `part.stop`, which may lie in different files: [n]."""
        start, stop, _ = part.indices(len(self))
        first = bisect.bisect_right(self.ends, start)
        if first == len(self.shards) or stop <= self.ends[first]:
            before = self.ends[first - 1] if first else 0
            return self.shards[min(first, len(self.shards) - 1)][start - before : stop - before]
        return np.concatenate([self[start : self.ends[first]], self[self.ends[first] : stop]])


def sample(trial: Trial, split: str = "train") -> TextSource:
    """Return the bundled token ids: the King James Bible, byte-pair encoded. `trial.data_dir` is not used."""
    return _source(read_sample, str(SAMPLE), split, trial)


def files(trial: Trial, split: str = "train") -> TextSource:
    """Return the token ids of the files in `trial.data_dir`; its validation files are the test split.

    Raises DataError if there are none, or if one is damaged.
    """
    if not trial.data_dir:
        raise DataError(
            "dataset 'token_files' needs --data-dir DIR with token files (train*.bin, as nanoGPT and llm.c write "
            "them); dataset 'token_sample' needs no files"
        )
    return _source(partial(read_files, split), trial.data_dir, "all", trial)


def resident(trial: Trial) -> TextSource:
    """Return one batch of random token ids on the rank's device, used in every step.

    Inputs and targets are int32 [batch_per_process, sequence_length].
    """
    vocabulary = MODELS[trial.model].vocabulary
    return TextSource(resident_rows(trial, vocabulary, torch.int32), vocabulary)


def _source(read: Callable[[str], Any], path: str, split: str, trial: Trial) -> TextSource:
    vocabulary = MODELS[trial.model].vocabulary
    return TextSource(TextDataset(read, path, split, trial.sequence_length, vocabulary), vocabulary)


@lru_cache(maxsize=1)
def read_sample(path: str) -> np.ndarray:
    """Return the ids of the bundled sample: uint16 [N]."""
    return pq.read_table(path)["token"].to_numpy()


@lru_cache(maxsize=2)
def read_files(split: str, folder: str) -> Shards:
    """Map the token files of a split, in the order of their names. Raises DataError."""
    if reason := missing_tokens(Path(folder), split):
        raise DataError(reason)
    return Shards([_map_file(path) for path in token_files(Path(folder), split)])


def _map_file(path: Path) -> np.ndarray:
    """Return the ids of one file: uint16 or uint32 [N]. Raises DataError."""
    try:
        size = path.stat().st_size
        start = np.fromfile(path, np.dtype("<i4"), count=3)
        type_ = TYPES_BY_MAGIC.get(int(start[0])) if len(start) == 3 else None
        if type_ is None:
            if size < 4 or size % 2:
                raise DataError(f"{path} has {size} bytes, which is not a file of uint16 token ids; write it again")
            return np.memmap(path, np.dtype("<u2"), mode="r").view(np.ndarray)
        expected = HEADER_BYTES + int(start[2]) * type_.itemsize
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, but its header states {start[2]} tokens, {expected} bytes; write it again"
            )
        return np.memmap(path, type_, mode="r", offset=HEADER_BYTES).view(np.ndarray)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
