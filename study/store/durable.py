"""Files and folders of a local results folder, replaced so that a kill at any moment leaves the old, the new or none."""

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

ABANDONED_AFTER_S = 3600.0  # what another host was writing, whose processes cannot be asked


def replace_file(root: Path, name: str, content: bytes) -> None:
    """Writes root/name, in a folder that is there, so that a reader sees the old or the new one, whole."""
    beside, final = _beside(root), root / name
    _write(beside, content)
    beside.replace(final)
    _sync_folder(final.parent)


@contextmanager
def new_file(root: Path, name: str) -> Iterator[BinaryIO]:
    """Writes root/name like `replace_file`, from what the caller writes meanwhile; an error leaves no trace of it."""
    beside, final = _beside(root), root / name
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(final)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(final.parent)


def replace_folder(root: Path, trial_id: str, files: Mapping[str, bytes]) -> None:
    """Makes root/trials/trial_id hold exactly `files`, with trial.json as the last of them, by writing beside.

    A name may have folders in it (traces/rank0.json.gz).

    A folder cannot be renamed over another, so that an earlier one is moved away first: for that moment there is
    none, and if the writer dies in it, `clear_partial` puts the new one, which is whole, in its place.
    """
    beside, final = _beside(root), root / "trials" / trial_id
    replaced = beside.with_name(f"replaced-{beside.name}")
    folders = dict.fromkeys((beside / name).parent for name in files)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _write(beside / name, content)
    for folder in folders:
        _sync_folder(folder)
    if final.exists():
        final.rename(replaced)
    beside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clear_partial(root: Path) -> None:
    """Ends what killed writers began in a results folder: what was complete gets its place, the rest is removed."""
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
    """Does this name a folder, and none above or elsewhere?"""
    return name.replace("-", "").replace("_", "").replace(".", "").isalnum() and not name.startswith(".")


def _beside(root: Path) -> Path:
    """A new path in root/.partial that tells who writes there."""
    partial = root / ".partial"
    partial.mkdir(parents=True, exist_ok=True)
    return partial / f"{os.getpid()}-{uuid.uuid4().hex}-{socket.gethostname()}"


def _is_abandoned(partial: Path) -> bool:
    """Is the writer of this gone? On another host that is only known by its age."""
    pid, _, host = f"{partial.name.removeprefix('replaced-')}--".split("-", 2)
    if host.removesuffix("--") == socket.gethostname() and pid.isdecimal() and not psutil.pid_exists(int(pid)):
        return True
    return time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S


def _complete_trial_id(folder: Path) -> str | None:
    try:
        trial_id = json.loads((folder / "trial.json").read_bytes())["trial_id"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return trial_id if isinstance(trial_id, str) and is_plain_name(trial_id) else None


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
