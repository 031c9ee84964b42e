"""What all storage formats share: a split as indexed records of an encoded image or pixels, and a label."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainables.data.source import DataError
from trainables.messages import one_line

Content = Any
"""an encoded image as bytes or memoryview, or its pixels as uint8 [side, side, 3]"""

Sample = tuple[Content, int]
"""content, label"""


class Records(Protocol):
    """A split read by index. It pickles to paths and small arrays, and opens files on first use."""

    @property
    def folder(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Return one sample. Raises DataError if the file is damaged."""
        ...

    def name(self, index: int) -> str:
        """Return where a record is stored, for messages."""
        ...

    def files(self) -> Sequence[str]:
        """Return the paths of all files of the split, relative to `folder`."""
        ...


@dataclass(frozen=True)
class Storage:
    """A storage format.

    `read(folder, split, manifest)` opens a split of a converted set. It raises DataError.

    `write(folder, split, first, samples, manifest)` writes samples numbered from `first`, and returns when they are on
    the disk. A repeated call replaces the remains of an interrupted one.
    """

    read: Callable[[Path, str, dict[str, Any]], Records]
    write: Callable[[Path, str, int, Iterable[Sample], dict[str, Any]], None]


def hash_samples(samples: Iterable[Sample], digest: Any) -> Iterator[Sample]:
    """Yield the samples, adding each to the digest: label and length as little-endian int64, then the content."""
    for content, label in samples:
        view = memoryview(content)
        digest.update(np.array([label, view.nbytes], dtype="<i8").tobytes())
        digest.update(view.cast("B"))
        yield content, label


def part_digest(samples: Iterable[Sample]) -> str:
    """Return the sha256 of samples in order. See `hash_samples`."""
    digest = hashlib.sha256()
    for _ in hash_samples(samples, digest):
        pass
    return digest.hexdigest()


def fingerprint(records: Records) -> str:
    """Return 16 hex digits that identify the state of a split's files: sha256 of their names, sizes and times."""
    digest = hashlib.sha256()
    for name in records.files():
        try:
            status = (Path(records.folder) / name).stat()
        except OSError as error:
            raise DataError(f"cannot read {Path(records.folder) / name}: {error.strerror}") from None
        digest.update(os.fsencode(name) + f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def damaged_file(path: Path | str, error: object) -> DataError:
    """Return the error for an unreadable file of a converted set."""
    return DataError(f"{path} is damaged ({one_line(error)}); delete its set and convert it again")
