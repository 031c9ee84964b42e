"""Results that the results folder does not take: a disk is full, an object store is away, the folder was moved.

Such a result waits in a folder of this host, with the layout of a results folder, until the results folder is back:
within minutes, when another trial is saved, or at the next run.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from study.store.durable import replace_folder
from study.store.result import TrialResult, files_of
from study.store.store import Store, StoreError, store_errors
from trainables.scratch import private_folder

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""pauses before each further attempt to save a trial"""


def save(store: Store, result: TrialResult, scratch: Path, pauses_s: Sequence[float] = PAUSES_S) -> None:
    """Save a result, if necessary after some attempts. If all fail, it waits below `scratch`, as StoreError says."""
    try:
        store.save(result)
        flush(store, scratch)
        return
    except StoreError as error:
        if not isinstance(error.__cause__, (OSError, pa.ArrowException)):
            raise  # another attempt would fail too
        first_error = error
    with contextlib.suppress(OSError):  # this disk may be the full one
        replace_folder(_folder(store, scratch), result.trial.trial_id, files_of(result))
    for pause_s in pauses_s:
        time.sleep(pause_s)
        with contextlib.suppress(StoreError):
            store.save(result)
            flush(store, scratch)
            return
    if _waiting(store, scratch, result.trial.trial_id).exists():
        raise StoreError(f"{first_error}; it waits in {_folder(store, scratch)}, and the next run saves it")
    raise StoreError(f"{first_error}; it is lost, so the trial runs again")


def flush(store: Store, scratch: Path) -> list[str]:
    """Save the results that wait for this results folder, and return their trial ids. Raises StoreError."""
    trials = sorted(_waiting(store, scratch, "").glob("*/trial.json"))
    for path in trials:
        folder = path.parent
        with store_errors(f"trial {folder.name} cannot be saved in {store.out}"):
            names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
            files = {name: (folder / name).read_bytes() for name in names if name != path.name}
            store.save_new(folder.name, files | {path.name: path.read_bytes()})
            shutil.rmtree(folder)
    return [path.parent.name for path in trials]


def _waiting(store: Store, scratch: Path, trial_id: str) -> Path:
    """Return the folder of a waiting trial, or of all if the id is empty."""
    return _path(store, scratch) / "trials" / trial_id


def _folder(store: Store, scratch: Path) -> Path:
    """Return the folder of waiting results. It exists afterwards, with a folder for trials."""
    folder = private_folder(_path(store, scratch))
    (folder / "trials").mkdir(exist_ok=True)
    return folder


def _path(store: Store, scratch: Path) -> Path:
    address = f"{store.filesystem.type_name}:{store.root}"
    return scratch / f"unsaved-{hashlib.sha256(address.encode()).hexdigest()[:16]}"
