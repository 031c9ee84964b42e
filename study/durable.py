"""Files and folders of a local results folder, replaced so that a kill at any moment leaves the old, the new or none."""

import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

ABANDONED_AFTER_S = 3600.0  # a partial folder of another host, whose processes cannot be asked


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees the old or the new one, whole."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    _write(beside, content)
    beside.replace(path)
    _sync_folder(path.parent)


def replace_folder(root: Path, trial_id: str, files: Mapping[str, bytes]) -> None:
    """Makes root/trials/trial_id hold exactly `files`, with trial.json as the last of them, by writing beside.

    A folder cannot be renamed over another, so that an earlier one is moved away first: for that moment there is
    none, and if the writer dies in it, `clear_partial` puts the new one, which is whole, in its place.
    """
    owner = f"{os.getpid()}-{uuid.uuid4().hex}-{socket.gethostname()}"
    beside, replaced = root / ".partial" / owner, root / ".partial" / f"replaced-{owner}"
    final = root / "trials" / trial_id
    beside.mkdir(parents=True)
    for name, content in files.items():
        _write(beside / name, content)
    _sync_folder(beside)
    if final.exists():
        final.rename(replaced)
    beside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def clear_partial(root: Path) -> None:
    """Ends what killed writers began in a results folder: what was complete gets its place, the rest is removed."""
    for folder in (root / ".partial").glob("*"):
        if not _is_abandoned(folder):
            continue
        trial_id = None if folder.name.startswith("replaced-") else _complete_trial_id(folder)
        if trial_id is not None and not (root / "trials" / trial_id).exists():
            folder.rename(root / "trials" / trial_id)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def is_plain_name(name: str) -> bool:
    """Does this name a folder, and none above or elsewhere?"""
    return name.replace("-", "").replace("_", "").replace(".", "").isalnum() and not name.startswith(".")


def _is_abandoned(folder: Path) -> bool:
    """Is the writer of a partial folder gone? On another host that is only known by the folder's age."""
    pid, _, host = f"{folder.name.removeprefix('replaced-')}--".split("-", 2)
    if host.removesuffix("--") == socket.gethostname() and pid.isdecimal() and not psutil.pid_exists(int(pid)):
        return True
    return time.time() - folder.stat().st_mtime > ABANDONED_AFTER_S


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
