"""Temporary files: one folder per user and host, which nobody else can enter.

    TMPDIR/scaling-study-UID/     mode 700
        KIND-xxxxxxxx/            a scratch folder; its owner locks the file `in-use` in it
        logs/                     output of scripts, and tracebacks
        workload-DIGEST/  core-N  copies of users' workload files; locks of cores

A temporary folder is shared with other users, who may create any name in it first. Therefore nothing in it is opened
before its owner and type are known, and no link is followed.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

VARIABLE = "SCALING_STUDY_SCRATCH"
"""The user's folder for processes whose TMPDIR is a scratch folder in it."""

IN_USE = "in-use"
"""File in each scratch folder that its owner locks. The lock ends with the owner, even if it is killed."""

YOUNG_S = 60.0
"""A younger folder may not be locked yet."""


class ScratchError(OSError):
    """A temporary file that other users control. The message is one line."""

    exit_code = 2


def user_folder() -> Path:
    """Return this user's folder on this host; it exists afterwards. Raises ScratchError if it is another user's."""
    default = Path(tempfile.gettempdir()) / f"scaling-study-{os.getuid()}"
    return private_folder(Path(os.environ.get(VARIABLE) or default))


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can enter, unless it exists. Raises ScratchError if others can write it."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise ScratchError(
            f"{path} is writable by other users or no folder; fix: remove it, or set TMPDIR to a folder of your own"
        )
    return path


def open_regular(path: Path, flags: int = os.O_RDONLY, owner: int | None = None, mode: int = 0o600) -> IO[bytes]:
    """Open a regular file without waiting, and without following a link. Raises OSError for anything else.

    flags: as of `os.open`. owner: user id that the file must belong to, None for any. mode: of a new file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or owner not in (None, status.st_uid):
        os.close(descriptor)
        raise ScratchError(f"{path} is no regular file of this user")
    return os.fdopen(descriptor, "rb" if flags & (os.O_WRONLY | os.O_RDWR) == os.O_RDONLY else "r+b")


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[str]:
    """Yield a new folder for temporary files. Also remove folders of killed processes."""
    remove_abandoned()
    temporary = tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=user_folder(), ignore_cleanup_errors=True)
    with temporary as folder, open(Path(folder) / IN_USE, "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        yield folder


def remove_abandoned() -> None:
    """Remove the scratch folders whose owner has ended."""
    for path in user_folder().glob(f"*/{IN_USE}"):
        with contextlib.suppress(OSError), open_regular(path, owner=os.getuid()) as file:  # or already removed
            if time.time() - os.fstat(file.fileno()).st_mtime < YOUNG_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def log_folder() -> Path:
    """Return the folder for logs that belong to no results folder."""
    return private_folder(user_folder() / "logs")


def new_log(name: str, content: str) -> str:
    """Write a new log and return its path. It is in the temporary folder itself if the user's own cannot be used."""
    try:
        folder = log_folder()
    except OSError:
        folder = Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{name}-", suffix=".log", dir=folder, delete=False, errors="backslashreplace"
    ) as file:
        file.write(content)
    return file.name
