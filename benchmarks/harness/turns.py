"""Alternate blocks of steps (ABBA) between two programs, on hosts whose speed drifts in seconds.

Each program keeps its model and has one or more ranks. All ranks map one file of counters to take turns.
"""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

ORDER = "ABBA"
"""A is the study, B the bare loop."""

LEAD_STEPS = 2
"""Untimed steps at the start of a block, because a process that slept has cold caches."""

PATIENCE_S = 300.0


def new_turns(folder: Path, ranks: int) -> Path:
    """Create a file of counters for two sides of `ranks` ranks each."""
    file = folder / "turns"
    np.full((2, ranks), -1, dtype=np.int64).tofile(file)
    return file


class Turns:
    """One rank's view of the turns."""

    def __init__(self, file: Path, side: str, rank: int):
        self.finished = np.memmap(file, dtype=np.int64, mode="r+").reshape(2, -1)
        """Number of blocks of both sides up to the last one that each rank ended; -1: the rank is not ready."""
        self.mine = self.finished["AB".index(side), rank : rank + 1]
        self.places: Iterator[int] = (place for place in count() if ORDER[place % 4] == side)
        self.mine[0] = 0

    def start(self) -> None:
        """Wait until all ranks of the preceding block have ended it. Raises TimeoutError."""
        self.place = next(self.places)
        before = self.finished["AB".index(ORDER[(self.place - 1) % 4])]
        ends_at = time.monotonic() + PATIENCE_S
        while self.finished.min() < 0 or before.min() < self.place:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the other side did not end its block within {PATIENCE_S:g} s")
            time.sleep(0.0005)

    def end(self) -> None:
        self.mine[0] = self.place + 1
