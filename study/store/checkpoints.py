"""Checkpoints of unfinished trainings in the results folder: DIR/checkpoints/<trial_id>/latest.pt.

The bytes are opaque here: `trainables.train.train` writes and reads them. They pass through the keeper on the driver's
host, so that only that host needs access to the folder.
"""

from collections.abc import Collection

from pyarrow import fs

from study.store.durable import is_plain_name
from study.store.store import Store, StoreError, store_errors

_FOLDER = "checkpoints"
_NAME = "latest.pt"


def save(store: Store, trial_id: str, content: bytes) -> None:
    """Replace the trial's checkpoint atomically: a kill leaves the old or the new one. Raises StoreError."""
    if not is_plain_name(trial_id):
        raise StoreError(f"trial {trial_id!r} cannot be a folder name")
    with store_errors(f"the checkpoint of {trial_id} cannot be saved in {store.out}"):
        store.filesystem.create_dir(f"{store.root}/{_FOLDER}/{trial_id}", recursive=True)
        store.replace_file(f"{_FOLDER}/{trial_id}/{_NAME}", content)


def load(store: Store, trial_id: str) -> bytes | None:
    """Return the trial's latest checkpoint, or None if it has none. Raises StoreError."""
    path = f"{store.root}/{_FOLDER}/{trial_id}/{_NAME}"
    with store_errors(f"the checkpoint of {trial_id} cannot be read from {store.out}"):
        if store.filesystem.get_file_info(path).type != fs.FileType.File:
            return None
        with store.filesystem.open_input_file(path) as file:
            return bytes(file.read())


def drop(store: Store, trial_ids: Collection[str]) -> None:
    """Remove the checkpoints of these trials, if there are any. Raises StoreError."""
    with store_errors(f"checkpoints cannot be removed from {store.out}"):
        selector = fs.FileSelector(f"{store.root}/{_FOLDER}", allow_not_found=True)
        folders = store.filesystem.get_file_info(selector)
        removed = [folder for folder in folders if folder.base_name in trial_ids]
        for folder in removed:
            store.filesystem.delete_dir(folder.path)
        if removed and len(removed) == len(folders):
            store.filesystem.delete_dir(f"{store.root}/{_FOLDER}")
