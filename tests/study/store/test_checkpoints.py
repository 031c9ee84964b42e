"""Checkpoints in a results folder, local and in an object store: complete after any kill, removed at the end."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from study.store import checkpoints
from study.store.store import Store, StoreError
from tests.study.store.test_store import STUDY, files_below
from tests.support.orchestration import new_store

CONTENTS = [bytes([number]) * 2_000_000 for number in range(3)]


@pytest.fixture(params=["local", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return new_store(tmp_path / "results")
    memory = fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem()))  # one for the whole process
    return Store.open(f"bucket/{tmp_path.name}", **STUDY, filesystem=memory)


def test_the_latest_checkpoint_of_each_trial_is_read_back(store: Store) -> None:
    assert checkpoints.load(store, "one") is None
    checkpoints.save(store, "one", b"first")
    checkpoints.save(store, "two", b"other")
    checkpoints.save(store, "one", b"second")
    assert checkpoints.load(store, "one") == b"second"
    assert checkpoints.load(store, "two") == b"other"


def test_dropped_checkpoints_are_removed_and_the_last_one_removes_the_folder(store: Store) -> None:
    checkpoints.drop(store, ["never started"])
    for trial_id in ("one", "two"):
        checkpoints.save(store, trial_id, b"content")
    checkpoints.drop(store, ["one", "never started"])
    assert checkpoints.load(store, "one") is None
    assert checkpoints.load(store, "two") == b"content"
    checkpoints.drop(store, ["two"])
    entries = store.filesystem.get_file_info(fs.FileSelector(store.root))
    assert not [entry.base_name for entry in entries if entry.base_name == "checkpoints"]


def test_a_checkpoint_is_one_file_under_the_id_of_its_trial(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    checkpoints.save(store, "one", b"first")
    checkpoints.save(store, "one", b"second")
    assert files_below(tmp_path) == ["checkpoints/one/latest.pt", "study.json"]


@pytest.mark.parametrize("trial_id", ["../outside", "a/b", ".hidden"])
def test_no_checkpoint_is_saved_outside_the_folder(tmp_path: Path, trial_id: str) -> None:
    with pytest.raises(StoreError, match=f"^trial '{trial_id}' cannot be a folder name$"):
        checkpoints.save(new_store(tmp_path), trial_id, b"content")


def test_a_folder_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StoreError) as error:
        checkpoints.save(store, "one", b"content")
    message = str(error.value)
    assert message.startswith(f"the checkpoint of one cannot be saved in {tmp_path}: ")
    assert "\n" not in message


def save_forever(out: str, ready: Any) -> None:
    store = new_store(Path(out))
    while True:
        for content in CONTENTS:
            checkpoints.save(store, "one", content)
        ready.set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # starts in milliseconds, which allows many kills
    random.seed(0)
    for _ in range(10):
        ready = context.Event()
        writer = context.Process(target=save_forever, args=(str(tmp_path), ready))
        writer.start()
        assert ready.wait(30)
        time.sleep(random.uniform(0, 0.03))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert checkpoints.load(new_store(tmp_path), "one") in CONTENTS
        assert list((tmp_path / ".partial").iterdir()) == []
