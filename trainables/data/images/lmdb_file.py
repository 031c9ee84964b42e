"""Storage format `lmdb`: one LMDB file a split; a key is the record's number, a value its label and the JPEG bytes."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import lmdb

from trainables.data.images.records import Records, Sample, Storage, damaged

_KEY, _LABEL = struct.Struct(">Q"), struct.Struct("<q")
_LARGEST_BYTES = 2**42
"""address space that a file is mapped into while it is written; the file itself grows as it is filled"""


class _Reader:
    """A file opened to read, with one transaction for as long as anyone holds this.

    Nobody writes a converted set, so there is nothing to lock. Values are views of the mapped file.
    """

    def __init__(self, path: str) -> None:
        self.environment = lmdb.open(path, subdir=False, readonly=True, lock=False)
        self.transaction = self.environment.begin(buffers=True)


_READERS: WeakValueDictionary[str, _Reader] = WeakValueDictionary()
"""LMDB lets a process open a file once; a mapping that outlived its trial would keep pages from leaving the cache"""


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
            raise damaged(self._path, error) from error
        if value is None or len(value) <= _LABEL.size:
            raise damaged(self.name(index), "it is not there")
        return value[_LABEL.size :], _LABEL.unpack_from(value)[0]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_reader": None}

    def name(self, index: int) -> str:
        return f"{self._path} record {index}"

    def files(self) -> Sequence[str]:
        return [f"{self.split}.lmdb"]

    def reader(self) -> _Reader:
        """The open file. Raises lmdb.Error."""
        if self._reader is None:
            self._reader = _READERS.get(self._path) or _Reader(self._path)
            _READERS[self._path] = self._reader
        return self._reader

    @property
    def _path(self) -> str:
        return str(Path(self.folder) / f"{self.split}.lmdb")


def read(folder: Path, split: str, manifest: dict[str, Any]) -> Records:
    """A split of a converted set. Raises DataError."""
    records = LmdbFile(str(folder), split, manifest["splits"][split]["count"])
    try:
        entries = records.reader().environment.stat()["entries"]
    except lmdb.Error as error:
        raise damaged(folder / f"{split}.lmdb", error) from error
    if entries != len(records):
        raise damaged(folder / f"{split}.lmdb", f"it holds {entries} records, its manifest promises {len(records)}")
    return records


def write(folder: Path, split: str, first: int, samples: Iterable[Sample], manifest: dict[str, Any]) -> None:
    """One transaction: all of the samples are in the file, or none. Raises OSError, as where the disk is full."""
    path = str(folder / f"{split}.lmdb")
    if not first:
        Path(path).unlink(missing_ok=True)  # of a call that ended before its first page was whole
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
