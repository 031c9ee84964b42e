"""Temporary files: one folder per user and host, which nobody else can enter.

    TMPDIR/scaling-study-UID/     mode 700
        KIND-xxxxxxxx/            a scratch folder; its owner locks the file `in-use` in it
        measuring-PID.lock        locked by a study that measures
        logs/                     output of scripts, and tracebacks
        workload-DIGEST/  core-N  copies of users' workload files; locks of cores
        ray/session_*             files of local Rays
        unsaved-*                 results that wait for their results folder (`study/store/spool.py`)
        lock                      shared while a scratch folder is created, exclusive while files are removed

A temporary folder is shared with other users, who may create any name in it first. Therefore nothing in it is opened
before its owner and type are known, and no link is followed.
"""

import contextlib
import fcntl
import getpass
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

VARIABLE = "SCALING_STUDY_SCRATCH"
"""The user's folder for processes whose TMPDIR is a scratch folder in it."""

IN_USE = "in-use"
"""File in each scratch folder that its owner locks. The lock ends with the owner, even if it is killed."""

YOUNG_S = 60.0
"""A younger folder may not be locked yet."""


SOCKET_PATH_LIMIT = 107
"""unix(7): `sun_path` has 108 bytes, including the final zero"""
LONGEST_SOCKET_BYTES = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""of multiprocessing, below a temporary folder"""

_SET_FOR_RANKS = (VARIABLE, "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


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
    with contextlib.ExitStack() as held:
        with _lock(fcntl.LOCK_SH):
            temporary = tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=user_folder(), ignore_cleanup_errors=True)
            folder = held.enter_context(temporary)
            fcntl.flock(held.enter_context(open(Path(folder) / IN_USE, "w")), fcntl.LOCK_EX)
        yield folder


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[None]:
    """Let this process and those that it starts put their temporary files into a new scratch folder.

    So nothing remains if they are killed.
    """
    with scratch_folder("rank") as folder, temporary_files_in(folder):
        yield


@contextlib.contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Let this process, and those that it starts meanwhile, have environment variables that nobody else sets."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Let this process, and those that it starts meanwhile, put their temporary files into a scratch folder.

    torch's cache of compiled code stays where it is. Nothing changes if the path is too long for the sockets in it.
    """
    with contextlib.ExitStack() as held:
        if has_room_for_sockets(folder):
            held.callback(_set_temporary_folder, {name: os.environ.get(name) for name in _SET_FOR_RANKS})
            with contextlib.suppress(KeyError, OSError):  # a user without a name
                cache = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # torch's default
                os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
            _set_temporary_folder({VARIABLE: str(user_folder()), "TMPDIR": folder})
        yield


def has_room_for_sockets(folder: str) -> bool:
    """Return True if the paths of multiprocessing's sockets in this folder are short enough."""
    return len(os.fsencode(folder)) + LONGEST_SOCKET_BYTES <= SOCKET_PATH_LIMIT


def _set_temporary_folder(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None  # chosen anew


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    with open_regular(user_folder() / "lock", os.O_RDWR | os.O_CREAT, os.getuid()) as file:
        fcntl.flock(file, kind)
        yield


def remove_abandoned() -> None:
    """Remove the scratch folders whose owner has ended."""
    for path in user_folder().glob(f"*/{IN_USE}"):
        with contextlib.suppress(OSError), open_regular(path, owner=os.getuid()) as file:  # or already removed
            if time.time() - os.fstat(file.fileno()).st_mtime < YOUNG_S:
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


@dataclass(frozen=True)
class Leftover:
    """A file or folder that a study has left. needed_by: what still needs it, empty if nothing does."""

    path: Path
    size_bytes: int
    needed_by: str = ""

    @property
    def as_json(self) -> dict[str, str | int]:
        return {"path": str(self.path), "size_bytes": self.size_bytes, "needed_by": self.needed_by}


def leftovers() -> list[Leftover]:
    """Return what studies of this user have left on this host, by name."""
    folder = user_folder()
    in_use = {path for path in _scratch_folders(folder) if _is_locked(path / IN_USE)}
    in_use |= {path for path in folder.glob("*.lock") if _is_locked(path)}  # of studies that measure
    found = [*folder.iterdir(), *(folder / "logs").glob("*"), *(folder / "ray").glob("session_*")]
    others = ("logs", "ray", "lock")
    paths = [path for path in found if path.name not in others and path.suffix != ".lock" and not path.is_symlink()]
    commands = _command_lines() if (folder / "ray").is_dir() else ""
    return [Leftover(path, _size_bytes(path), _needed_by(path, in_use, commands)) for path in sorted(paths)]


def clean() -> tuple[list[Leftover], list[Leftover]]:
    """Remove what no living study needs, and return what was removed and what was not."""
    with _lock(fcntl.LOCK_EX):
        found = leftovers()
        removed = [leftover for leftover in found if not leftover.needed_by]
        for leftover in removed:
            if leftover.path.is_dir():
                shutil.rmtree(leftover.path, ignore_errors=True)
            else:
                leftover.path.unlink(missing_ok=True)
    return removed, [leftover for leftover in found if leftover.needed_by]


def _needed_by(path: Path, in_use: Collection[Path], commands: str) -> str:
    if path.name.startswith("unsaved-"):
        return "results that the next run saves"
    if path.parent.name == "ray":
        is_young = time.time() - path.stat().st_mtime < YOUNG_S  # its processes may not have started yet
        return "a running Ray" if is_young or f"{path}/" in commands else ""
    if (path / IN_USE).exists():
        return "a running study" if path in in_use else ""
    return "a running study" if in_use else ""


def _scratch_folders(folder: Path) -> list[Path]:
    return [path.parent for path in folder.glob(f"*/{IN_USE}")]


def _is_locked(path: Path) -> bool:
    try:
        with open_regular(path, owner=os.getuid()) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # removed meanwhile
        return False
    return False


def _command_lines() -> str:
    """Return the command lines of all processes. Those of a Ray name its session folder."""
    import psutil

    lines = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()).replace(" ", "/ ") + "/")
    return "\n".join(lines)


def _size_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a folder. Links are not followed."""
    paths = [path, *path.rglob("*")] if path.is_dir() else [path]
    total = 0
    for entry in paths:
        with contextlib.suppress(OSError):
            status = entry.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


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
