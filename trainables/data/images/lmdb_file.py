"""Storage format `lmdb`: one LMDB file per split. Keys are record numbers, values are label and JPEG bytes."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import lmdb

from trainables.data.images.records import Records, Sample, Storage, damaged_file

_KEY, _LABEL = struct.Struct(">Q"), struct.Struct("<q")
_LARGEST_BYTES = 2**42
"""address space of the mapping while a file is written; the file itself grows with its content"""


class _Reader:
    """A file opened for reading, with one transaction for the lifetime of this object.

    Converted sets are never written to, so no lock is needed. Values are views of the mapped file.
    """

    def __init__(self, path: str) -> None:
        self.environment = lmdb.open(path, subdir=False, readonly=True, lock=False)
        self.transaction = self.environment.begin(buffers=True)


_READERS: WeakValueDictionary[str, _Reader] = WeakValueDictionary()
"""open files by path, because a process may open an LMDB file only once; weak, because a mapping that outlives its
trial pins pages in the page cache"""


@dataclass
class LmdbFile:
    folder: str
    split: str
    count: int
    _reader: _Reader | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        try:
            value = self.reader().transaction.get(_KEY.pack(index))
        except lmdb.Error as error:
            raise damaged_file(self._path, error) from error
        if value is None or len(value) <= _LABEL.size:
            raise damaged_file(self.name(index), "it is missing")
        return value[_LABEL.size :], _LABEL.unpack_from(value)[0]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None}

    def name(self, index: int) -> str:
        return f"{self._path} record {index}"

    def files(self) -> Sequence[str]:
        return [f"{self.split}.lmdb"]

    def reader(self) -> _Reader:
        """Return the open file. Raises lmdb.Error."""
        if self._reader is None:
            self._reader = _READERS.get(self._path) or _Reader(self._path)
            _READERS[self._path] = self._reader
        return self._reader

    @property
    def _path(self) -> str:
        return str(Path(self.folder) / f"{self.split}.lmdb")


def read(folder: Path, split: str, manifest: dict[str, Any]) -> Records:
    """Open a split of a converted set. Raises DataError."""
    records = LmdbFile(str(folder), split, manifest["splits"][split]["count"])
    try:
        entries = records.reader().environment.stat()["entries"]
    except lmdb.Error as error:
        raise damaged_file(folder / f"{split}.lmdb", error) from error
    if entries != len(records):
        raise damaged_file(folder / f"{split}.lmdb", f"it has {entries} records, its manifest lists {len(records)}")
    return records


def write(folder: Path, split: str, first: int, samples: Iterable[Sample], manifest: dict[str, Any]) -> None:
    """Write the samples in one transaction: all of them or none. Raises OSError, for example if the disk is full."""
    path = str(folder / f"{split}.lmdb")
    if not first:
        Path(path).unlink(missing_ok=True)  # left by a call that ended before its first page was complete
    try:
        with (
            lmdb.open(path, subdir=False, map_size=_LARGEST_BYTES, lock=False) as environment,
            environment.begin(write=True) as transaction,
        ):
            for number, (content, label) in enumerate(samples, first):
                transaction.put(_KEY.pack(number), _LABEL.pack(label) + bytes(content))
    except lmdb.Error as error:
        raise OSError(str(error)) from error


storage = Storage(read, write)
