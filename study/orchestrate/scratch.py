"""Scratch folders for files of Ray Tune and Train.

Each is removed at the end of its study, or by a later study if that one was killed.
"""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "scaling-study-"
IN_USE = "in-use"
"""File in each folder that its owner locks. The lock ends with the owner, even if it is killed."""

YOUNG_S = 60.0
"""A younger folder may not be locked yet."""


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[str]:
    """Yield a new folder for temporary files. Also remove folders of killed processes."""
    _remove_abandoned()
    temporary = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True)
    with temporary as folder, open(Path(folder) / IN_USE, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        yield folder


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError):  # of another user, in use, or already removed
            if time.time() - path.stat().st_mtime < YOUNG_S:
                continue
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
