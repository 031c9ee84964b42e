"""Where a split's files lie when a trial reads them: on their disk with a page cache in a known state, or in /dev/shm.

A copy in shared memory stays after the trial, for the next one to use. It goes when another set needs the room and no
process on this host uses it, or by hand: `rm -r /dev/shm/scaling-study-images-*`, or a restart of the host.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from trainables.data.images.records import Records, fingerprint
from trainables.data.source import DataError

SHARED_MEMORY = Path("/dev/shm")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_READ_BYTES = 4 * 2**20
_THREADS = 8
"""files are read and copied at the same time: a disk that is far away has more throughput than one request at a time"""


def set_page_cache(records: Records, state: str) -> None:
    """Drops the split's pages from the host's page cache (cold) or reads them all into it (warm).

    Every rank of a host may do it at the same moment. Pages that another process has mapped stay, as the kernel has it.
    Raises DataError for files that lie in memory themselves, which are never cold.
    """
    if state == "cold":
        if (kind := file_system(records.folder)) in MEMORY_FILE_SYSTEMS:
            raise DataError(
                f"page_cache 'cold' cannot be had: {records.folder} lies in memory ({kind}); move it to a disk, or use 'as_is'"
            )
        os.sync()  # a page that is not on the disk yet cannot be dropped
    treat = {"cold": _drop, "warm": _read_through}[state]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(treat, (os.path.join(records.folder, name) for name in records.files())):
            pass


def file_system(folder: str) -> str | None:
    """The kind of the file system that holds a folder, as Linux names it; None where that cannot be told."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        fields = [line.split() for line in mounts]  # proc(5): the third is the device's number, the kind follows a dash
    return next((each[each.index("-", 6) + 1] for each in fields if each[2] == number), None)


def in_shared_memory(records: Records, spare_bytes: int) -> tuple[str, IO[Any]]:
    """A folder in /dev/shm with a copy of the split's files, made once a host; and what keeps others from removing it.

    The copy is used by whoever holds the second value, until that is closed. Copies are told apart by the files' names,
    sizes and times. `spare_bytes` must stay free for the loaders' batches. Raises DataError where there is no room.
    """
    root = SHARED_MEMORY / f"scaling-study-images-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise DataError(f"{root} belongs to another user; have it removed, or use storage_place 'disk'")
    target = root / fingerprint(records)
    with _locked(root / "lock"):
        if not target.is_dir():
            for partial in root.glob("*.partial"):  # of a process that was killed: this one holds the lock
                shutil.rmtree(partial)
            _make_room(records, root, spare_bytes)
            _copy(records, target)
        os.utime(target)
        return str(target), _use(target)


def _use(target: Path) -> IO[Any]:
    """Says that this process uses a copy, for as long as the file is open."""
    file = open(target.with_suffix(".in-use"), "ab")  # noqa: SIM115 - closed when the trial's data set goes
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _make_room(records: Records, root: Path, spare_bytes: int) -> None:
    """Removes copies that nobody uses, the least recently used first, until the files fit."""
    needed = sum((Path(records.folder) / name).stat().st_size for name in records.files()) + spare_bytes
    copies = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in copies:
        if shutil.disk_usage(root).free >= needed:
            return
        with open(path.with_suffix(".in-use"), "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            shutil.rmtree(path)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise DataError(
            f"{records.folder} does not fit into {SHARED_MEMORY}: {needed / 1e9:.2f} GB are needed with the loaders' batches, "
            f"{free / 1e9:.2f} GB are free; enlarge it (mount -o remount,size=...), or use storage_place 'disk'"
        )


def _copy(records: Records, target: Path) -> None:
    partial = target.with_suffix(".partial")

    def copy(name: str) -> None:
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(os.path.join(records.folder, name), path)

    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(copy, records.files()):
                pass
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise DataError(f"{records.folder} cannot be copied to {SHARED_MEMORY}: {error}") from error
    partial.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that one process of the host has at a time; others wait."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _drop(path: str) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_through(path: str) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(_READ_BYTES):
            pass
