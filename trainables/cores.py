"""Cores that belong to one rank for the length of a trial, among all ranks of a user on a host."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def own_cores(count: int) -> Iterator[set[int]]:
    """This process on `count` cores on which no other process within `own_cores` is; gives their numbers.

    All its threads go there, and threads that it starts meanwhile; processes that exist already, loaders among them, stay
    where they are. A core is held by a lock on a file, which ends with the process that holds it, so that ranks need not
    know of each other. Raises RuntimeError where too few cores are free.
    """
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as held:
        own: set[int] = set()
        for core in allowed:
            if len(own) < count and _lock(core, held):
                own.add(core)
        if len(own) < count:
            raise RuntimeError(
                f"pin_cores needs {count} cores for each rank, and {len(own)} of the {len(allowed)} that this process "
                "may use are free: run fewer ranks or trials at a time, or lower cpus_per_rank"
            )
        _move(own)
        try:
            yield own
        finally:
            _move(set(allowed))


def _lock(core: int, held: ExitStack) -> bool:
    path = Path(tempfile.gettempdir()) / f"scaling-study-core-{os.getuid()}-{core}"
    file: IO[bytes] = held.enter_context(path.open("ab"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _move(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
