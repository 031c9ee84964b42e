"""Replace files and folders of a local results folder. A kill at any moment leaves the old, the new, or none."""

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

ABANDONED_AFTER_S = 3600.0
"""age from which a partial write by another host counts as abandoned; its processes cannot be queried"""


def replace_file(root: Path, name: str, content: bytes) -> None:
    """Write root/name atomically: a reader sees the complete old or new file. The parent folder must exist."""
    partial, final = _partial_path(root), root / name
    _write(partial, content)
    partial.replace(final)
    _sync_folder(final.parent)


def create_file(root: Path, name: str, content: bytes) -> bool:
    """Write root/name atomically unless it exists. Return False if it does. The parent folder must exist."""
    partial = _partial_path(root)
    _write(partial, content)
    try:
        os.link(partial, root / name)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if (root / name).exists():
            return False
        partial.replace(root / name)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(root)
    return True


@contextmanager
def new_file(root: Path, name: str) -> Iterator[BinaryIO]:
    """Open root/name for writing, and replace it atomically at the end. An error leaves the old file as it is."""
    partial, final = _partial_path(root), root / name
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(final.parent)


def replace_folder(root: Path, trial_id: str, files: Mapping[str, bytes]) -> None:
    """Replace root/trials/trial_id by a folder with exactly these files, written to a partial folder first.

    A file name may contain folders (traces/rank0.json.gz).

    A folder cannot be renamed over another one, so an earlier one is moved away first. If the writer is killed between
    the two renames, `clear_partial` moves the complete new folder to its place.
    """
    partial, final = _partial_path(root), root / "trials" / trial_id
    replaced = partial.with_name(f"replaced-{partial.name}")
    folders = dict.fromkeys((partial / name).parent for name in files)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _write(partial / name, content)
    for folder in folders:
        _sync_folder(folder)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_empty_partial(root: Path) -> None:
    """Remove the folder of partial writes if no writer uses it."""
    with contextlib.suppress(OSError):
        (root / ".partial").rmdir()


def clear_partial(root: Path) -> None:
    """Clean up after killed writers: move complete trial folders to their places, and remove other partial writes."""
    for partial in (root / ".partial").glob("*"):
        if not _is_abandoned(partial):
            continue
        trial_id = None if partial.name.startswith("replaced-") else _complete_trial_id(partial)
        if trial_id is not None and not (root / "trials" / trial_id).exists():
            partial.rename(root / "trials" / trial_id)
        elif partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def is_plain_name(name: str) -> bool:
    """Return True if this is the name of a visible folder, and no path to a parent or elsewhere."""
    return name.replace("-", "").replace("_", "").replace(".", "").isalnum() and not name.startswith(".")


def _partial_path(root: Path) -> Path:
    """Return a new path in root/.partial whose name contains the writer's pid and host.

    Raises FileNotFoundError if root is gone: who moved it away wants to move it back to the same place.
    """
    folder = root / ".partial"
    folder.mkdir(exist_ok=True)
    return folder / f"{os.getpid()}-{uuid.uuid4().hex}-{socket.gethostname()}"


def _is_abandoned(partial: Path) -> bool:
    """Return True if the writer is gone. On another host, only the age of the write tells."""
    pid, _, host = f"{partial.name.removeprefix('replaced-')}--".split("-", 2)
    if host.removesuffix("--") == socket.gethostname() and pid.isdecimal() and not psutil.pid_exists(int(pid)):
        return True
    try:
        return time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S
    except FileNotFoundError:  # its writer has just put it into its place
        return False


def _complete_trial_id(folder: Path) -> str | None:
    """Return the id of the trial in a partial folder, or None if the folder is not complete."""
    try:
        trial_id = json.loads((folder / "trial.json").read_bytes())["trial_id"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return trial_id if isinstance(trial_id, str) and is_plain_name(trial_id) else None


def _write(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
