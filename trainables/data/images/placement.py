"""Control where a trial reads a split's files: from disk with a page cache in a known state, or from /dev/shm.

A copy in shared memory stays after the trial for the next one. It is removed when another set needs the space and no
process on this host uses the copy. To remove it by hand: `rm -r /dev/shm/scaling-study-images-*`, or restart the host.
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
from trainables.scratch import ScratchError, private_folder

SHARED_MEMORY = Path("/dev/shm")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_READ_BYTES = 4 * 2**20
_THREADS = 8
"""files read or copied at a time, because a network disk needs several requests at once for its full throughput"""


def set_page_cache(records: Records, state: str) -> None:
    """Drop the split's pages from the host's page cache (`state="cold"`), or read all of them into it ("warm").

    All ranks of a host may call this at the same time. The kernel keeps pages that another process has mapped. Raises
    DataError for files on a memory file system, which are never cold.
    """
    if state == "cold":
        if (kind := file_system(records.folder)) in MEMORY_FILE_SYSTEMS:
            raise DataError(
                f"page_cache 'cold' is impossible: {records.folder} is in memory ({kind}); "
                "move it to a disk, or use page_cache 'as_is'"
            )
        os.sync()  # the kernel cannot drop pages that are not on the disk yet
    action = {"cold": _drop, "warm": _read_through}[state]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(action, (os.path.join(records.folder, name) for name in records.files())):
            pass


def file_system(folder: str) -> str | None:
    """Return the type of the file system that holds a folder, such as "tmpfs", or None if unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        lines = [line.split() for line in mounts]  # proc(5): the third field is the device, the type follows a dash
    return next((fields[fields.index("-", 6) + 1] for fields in lines if fields[2] == number), None)


def copy_to_shared_memory(records: Records, spare_bytes: int) -> tuple[str, IO[Any]]:
    """Copy the split's files to /dev/shm once per host. Return the folder, and an open file that marks it as in use.

    The copy stays at least until that file is closed. Its name is a digest of the files' names, sizes and times.
    `spare_bytes` must stay free for the loaders' batches. Raises DataError if there is not enough space.
    """
    try:
        root = private_folder(SHARED_MEMORY / f"scaling-study-images-{os.getuid()}")
    except ScratchError as error:
        raise DataError(f"{error}; or use storage_place 'disk'") from None
    target = root / fingerprint(records)
    with _locked(root / "lock"):
        if not target.is_dir():
            for partial in root.glob("*.partial"):  # left by a killed process, since this one holds the lock
                shutil.rmtree(partial)
            _free_space(records, root, spare_bytes)
            _copy(records, target)
        os.utime(target)
        return str(target), _mark_in_use(target)


def _mark_in_use(target: Path) -> IO[Any]:
    """Mark a copy as in use by this process, for as long as the returned file is open."""
    file = open(target.with_suffix(".in-use"), "ab")  # noqa: SIM115 - closed with the trial's data set
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _free_space(records: Records, root: Path, spare_bytes: int) -> None:
    """Remove unused copies, least recently used first, until the files fit. Raises DataError if they do not."""
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
            f"{records.folder} does not fit into {SHARED_MEMORY}: it needs {needed / 1e9:.2f} GB including the "
            f"loaders' batches, {free / 1e9:.2f} GB are free; "
            "enlarge it (mount -o remount,size=...), or use storage_place 'disk'"
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
        raise DataError(f"cannot copy {records.folder} to {SHARED_MEMORY}: {error}") from error
    partial.rename(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock. Other processes of the host wait for it."""
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
