"""One split of an image set as it is kept: encoded images, or pixels, with their labels. What all formats share."""

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
"""content and label"""


class Records(Protocol):
    """A split that is read by index. It pickles to paths and small arrays; files are opened on first use."""

    @property
    def folder(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError where the file is damaged."""
        ...

    def name(self, index: int) -> str:
        """Where a record lies, for a message."""
        ...

    def files(self) -> Sequence[str]:
        """Paths of all files that hold the split, relative to `folder`."""
        ...


@dataclass(frozen=True)
class Storage:
    """A storage format.

    `read(folder, split, manifest)` opens a split of a converted set; it raises DataError. `write(folder, split, first,
    samples, manifest)` writes samples that are numbered from `first` on and returns when they are on the disk; called
    again it replaces what an interrupted call left.
    """

    read: Callable[[Path, str, dict[str, Any]], Records]
    write: Callable[[Path, str, int, Iterable[Sample], dict[str, Any]], None]


def hashed(samples: Iterable[Sample], digest: Any) -> Iterator[Sample]:
    """The samples, each taken into the digest as it passes: label and length as little-endian int64, then the content."""
    for content, label in samples:
        view = memoryview(content)
        digest.update(np.array([label, view.nbytes], dtype="<i8").tobytes())
        digest.update(view.cast("B"))
        yield content, label


def part_digest(samples: Iterable[Sample]) -> str:
    """sha256 of samples in order, see `hashed`."""
    digest = hashlib.sha256()
    for _ in hashed(samples, digest):
        pass
    return digest.hexdigest()


def fingerprint(records: Records) -> str:
    """16 hex digits that tell one state of a split's files from another: sha256 over their names, sizes and times."""
    digest = hashlib.sha256()
    for name in records.files():
        try:
            found = (Path(records.folder) / name).stat()
        except OSError as error:
            raise DataError(f"{Path(records.folder) / name} cannot be read: {error.strerror}") from None
        digest.update(os.fsencode(name) + f"\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def damaged(path: Path | str, error: object) -> DataError:
    """The line for a converted file that cannot be read."""
    return DataError(f"{path} is damaged ({one_line(error)}): delete its set and convert it again")
