"""Folders for files that others want to keep while a study runs: gone with it, or with a later study where it was killed."""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "scaling-study-"
IN_USE = "in-use"
"""a file in each that its owner has locked: the lock ends with the owner, however that ends"""

YOUNG_S = 60.0
"""a folder that is younger may be about to be locked"""


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[str]:
    """A new folder for temporary files; removes those that killed processes have left."""
    _remove_abandoned()
    temporary = tempfile.TemporaryDirectory(prefix=f"{PREFIX}{kind}-", ignore_cleanup_errors=True)
    with temporary as folder, open(Path(folder) / IN_USE, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        yield folder


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError):  # another user's, one that is in use, or one that has gone meanwhile
            if time.time() - path.stat().st_mtime < YOUNG_S:
                continue
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
