"""Checkpoints of trainings that have not ended, in the results folder: DIR/checkpoints/<trial_id>/latest.pt.

The bytes are what `trainables.train.train` made of the trial's own state, and only it reads them. They pass through the
keeper, which sits on the driver's host, so that only that host needs to reach the folder.
"""

from collections.abc import Collection

from pyarrow import fs

from study.store.durable import is_plain_name
from study.store.store import Store, StoreError, explained

_FOLDER = "checkpoints"
_NAME = "latest.pt"


def save(store: Store, trial_id: str, content: bytes) -> None:
    """Keeps this in place of the trial's earlier checkpoint: a reader, and one who comes after a kill, sees one of them whole.

    Raises StoreError.
    """
    if not is_plain_name(trial_id):
        raise StoreError(f"trial {trial_id!r} cannot be a folder's name")
    with explained(f"the checkpoint of {trial_id} cannot be saved in {store.out}"):
        store.filesystem.create_dir(f"{store.root}/{_FOLDER}/{trial_id}", recursive=True)
        store.replace_file(f"{_FOLDER}/{trial_id}/{_NAME}", content)


def load(store: Store, trial_id: str) -> bytes | None:
    """The trial's latest checkpoint; None where it has none. Raises StoreError."""
    path = f"{store.root}/{_FOLDER}/{trial_id}/{_NAME}"
    with explained(f"the checkpoint of {trial_id} cannot be read from {store.out}"):
        if store.filesystem.get_file_info(path).type != fs.FileType.File:
            return None
        with store.filesystem.open_input_file(path) as file:
            return bytes(file.read())


def drop(store: Store, trial_ids: Collection[str]) -> None:
    """Removes the checkpoints of these trials, where they have any: those that have ended, whoever ended them. Raises StoreError."""
    with explained(f"checkpoints cannot be removed from {store.out}"):
        selector = fs.FileSelector(f"{store.root}/{_FOLDER}", allow_not_found=True)
        folders = store.filesystem.get_file_info(selector)
        gone = [folder for folder in folders if folder.base_name in trial_ids]
        for folder in gone:
            store.filesystem.delete_dir(folder.path)
        if gone and len(gone) == len(folders):
            store.filesystem.delete_dir(f"{store.root}/{_FOLDER}")
