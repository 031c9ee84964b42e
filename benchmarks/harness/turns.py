"""Two sides that keep their models and time blocks of steps in turn, A B B A: for hosts whose speed moves within seconds.

Two programs, each of one or more ranks, tell each other through a file of counters that all of them map.
"""

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

ORDER = "ABBA"
"""A is the study"""

LEAD_STEPS = 2
"""steps at the begin of a block that are not timed: a process that has slept finds cold caches"""

PATIENCE_S = 300.0


def new_turns(folder: Path, ranks: int) -> Path:
    """A file of counters for two sides of so many ranks each."""
    file = folder / "turns"
    np.full((2, ranks), -1, dtype=np.int64).tofile(file)
    return file


class Turns:
    """One rank's view of whose turn it is."""

    def __init__(self, file: Path, side: str, rank: int):
        self.finished = np.memmap(file, dtype=np.int64, mode="r+").reshape(2, -1)
        """blocks of both sides after which a rank last ended one of its own; -1: it is not ready"""
        self.mine = self.finished["AB".index(side), rank : rank + 1]
        self.places: Iterator[int] = (place for place in count() if ORDER[place % 4] == side)
        self.mine[0] = 0

    def begin(self) -> None:
        """Returns when all ranks of whoever comes before have ended their block. Raises TimeoutError."""
        self.place = next(self.places)
        before = self.finished["AB".index(ORDER[(self.place - 1) % 4])]
        ends_at = time.monotonic() + PATIENCE_S
        while self.finished.min() < 0 or before.min() < self.place:
            if time.monotonic() > ends_at:
                raise TimeoutError(f"the other side did not end its block within {PATIENCE_S:g} s")
            time.sleep(0.0005)

    def end(self) -> None:
        self.mine[0] = self.place + 1
