"""Storage formats `arrow_jpeg` and `arrow_raw`: memory-mapped Arrow IPC files, shared by all processes of a host.

`arrow_jpeg` holds JPEG bytes.

`arrow_raw` holds pixels uint8 [side, side, 3]: the centre square of each image, decoded by PIL during the conversion
and resized to `stored_side(image_size)`. A set therefore serves one image_size; another size needs another conversion
(`convert --image-size`). With `augment="cpu"`, crops come from the stored square, while the JPEG formats crop from the
complete image.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainables.data.images.records import Records, Sample, Storage, damaged_file

BATCH_IMAGES = 256
"""images per record batch, which is held in memory while it is written"""


@dataclass
class ArrowFiles:
    """Files of `part` images each; the last may have fewer. `side` is the edge of stored pixels, 0 for JPEG bytes.

    Mappings end with this object. One that outlived its trial would pin pages in the page cache.
    """

    folder: str
    split: str
    count: int
    part: int
    side: int
    _open: dict[int, list[tuple[pa.Array, np.ndarray]]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.count:
            raise IndexError(index)
        number, row = divmod(index, self.part)
        content, label = self.batches(number)[row // BATCH_IMAGES]
        row %= BATCH_IMAGES
        if self.side:
            size = 3 * self.side**2
            pixels = np.frombuffer(content.buffers()[1], np.uint8, size, (content.offset + row) * size)
            return pixels.reshape(self.side, self.side, 3), int(label[row])
        return memoryview(content[row].as_buffer()), int(label[row])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": {}}

    def batches(self, number: int) -> list[tuple[pa.Array, np.ndarray]]:
        """Map a file, and return image column and labels int64 of each of its record batches. Raises DataError."""
        if number not in self._open:
            path = self._path(number)
            try:
                reader = pa.ipc.open_file(pa.memory_map(path))
                batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
                self._open[number] = [(batch.column("image"), batch.column("label").to_numpy()) for batch in batches]
            except (OSError, pa.ArrowException, KeyError) as error:
                raise damaged_file(path, error) from error
        return self._open[number]

    def name(self, index: int) -> str:
        return f"{self._path(index // self.part)} row {index % self.part}"

    def files(self) -> Sequence[str]:
        return [_file_name(self.split, number) for number in range(-(-self.count // self.part))]

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, _file_name(self.split, number))


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.arrow"


def read(folder: Path, split: str, manifest: dict[str, Any]) -> Records:
    """Open a split of a converted set. Raises DataError."""
    side = manifest.get("stored_side") or 0
    records = ArrowFiles(str(folder), split, manifest["splits"][split]["count"], manifest["part_images"], side)
    for number, name in enumerate(records.files()):
        path = str(folder / name)
        if not os.path.isfile(path):
            raise damaged_file(path, "it is missing")
        if number == len(records.files()) - 1:  # damage in the other files is detected when they are first read
            rows = sum(len(labels) for _, labels in records.batches(number))
            expected = len(records) - number * records.part
            if rows != expected:
                raise damaged_file(path, f"it has {rows} images, its manifest lists {expected}")
    return records


def write(folder: Path, split: str, first: int, samples: Iterable[Sample], manifest: dict[str, Any]) -> None:
    """Write one file under a temporary name, then rename it."""
    side = manifest.get("stored_side")
    kind = pa.binary(3 * side**2) if side else pa.large_binary()
    schema = pa.schema([("image", kind), ("label", pa.int64())])
    path = folder / _file_name(split, first // manifest["part_images"])
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        with pa.ipc.new_file(file, schema) as writer:
            for chunk in _chunks(samples):
                images = [content.tobytes() if side else bytes(content) for content, _ in chunk]
                writer.write(pa.record_batch([pa.array(images, kind), [label for _, label in chunk]], schema=schema))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _chunks(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    remaining = iter(samples)
    while chunk := list(islice(remaining, BATCH_IMAGES)):
        yield chunk


storage = Storage(read, write)
