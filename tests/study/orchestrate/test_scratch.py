"""Scratch folders end with their owner, or with a later study if the owner was killed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from study.orchestrate.scratch import IN_USE, YOUNG_S, scratch_folder

OWNER = """
import sys, time
from study.orchestrate.scratch import scratch_folder
with scratch_folder("tune") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def separate_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def aged(folder: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(folder / IN_USE, (then, then))
    return folder


def test_a_folder_is_removed_by_its_owner() -> None:
    with scratch_folder("train") as folder:
        assert Path(folder).is_dir() and Path(folder).name.startswith("scaling-study-train-")
    assert not Path(folder).exists()


def test_the_next_owner_removes_folders_of_killed_processes_only(tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = aged(Path(owner.stdout.readline().strip()), 2 * YOUNG_S)
    (folder / "state").write_text("state of Tune")
    with scratch_folder("tune"):
        assert folder.is_dir()
    owner.kill()
    owner.wait()
    with scratch_folder("tune"):
        assert not folder.exists()


def test_young_folders_and_other_folders_stay(tmp_path: Path) -> None:
    young = tmp_path / "scaling-study-tune-young"
    others = tmp_path / "scaling-study-of-mine"
    for folder in (young, others):
        folder.mkdir()
    (young / IN_USE).touch()
    with scratch_folder("tune"):
        assert young.is_dir() and others.is_dir()
