"""Scratch folders end with their owner, or with a later study if the owner was killed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from study.cli.host import LOCK_NAME, busy_lines, measuring
from tests.support.system import needs
from trainables.scratch import (
    IN_USE,
    VARIABLE,
    YOUNG_S,
    ScratchError,
    new_log,
    open_regular,
    private_folder,
    scratch_folder,
    user_folder,
)
from trainables.step.process import exclusive_cores

OWNER = """
import sys, time
from trainables.scratch import scratch_folder
with scratch_folder("tune") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def separate_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)


def aged(folder: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(folder / IN_USE, (then, then))
    return folder


def test_a_folder_is_removed_by_its_owner() -> None:
    with scratch_folder("train") as folder:
        assert Path(folder).is_dir() and Path(folder).name.startswith("train-")
        assert Path(folder).parent == user_folder()
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
    young = user_folder() / "tune-young"
    others = user_folder() / "of-mine"
    for folder in (young, others):
        folder.mkdir()
    (young / IN_USE).touch()
    with scratch_folder("tune"):
        assert young.is_dir() and others.is_dir()


def test_only_this_user_can_enter_the_folder_of_temporary_files(tmp_path: Path) -> None:
    folder = user_folder()
    assert folder == tmp_path / f"scaling-study-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(new_log("trial-1", "text")).parent.parent == folder


@pytest.mark.parametrize("kind", ["open to others", "link", "file", "named pipe"])
def test_a_folder_that_others_may_control_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"scaling-study-{os.getuid()}"
    (tmp_path / "target").mkdir(mode=0o700)
    if kind == "open to others":
        path.mkdir()
        path.chmod(0o777)
    elif kind == "link":
        path.symlink_to(tmp_path / "target")
    elif kind == "file":
        path.touch()
    else:
        os.mkfifo(path)
    with pytest.raises(ScratchError, match=f"{path} is writable by other users or no folder; fix: ") as error:
        private_folder(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ScratchError), scratch_folder("tune"):
        pass
    assert not list((tmp_path / "target").iterdir())
    assert Path(new_log("error", "traceback")).read_text() == "traceback"


@needs("root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(ScratchError, match="writable by other users"):
        private_folder(path)
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 65534, 65534)
    with pytest.raises(ScratchError, match="no regular file"):
        open_regular(tmp_path / "file", owner=os.getuid())


@pytest.mark.timeout(30)  # opening a named pipe waits for its other end, for ever
def test_named_pipes_and_links_in_the_temporary_folder_stop_no_study(tmp_path: Path) -> None:
    for folder in (tmp_path / "scaling-study-x", user_folder() / "tune-x"):  # where others can and cannot create it
        folder.mkdir(mode=0o777)
        os.mkfifo(folder / IN_USE)
        aged(folder, 2 * YOUNG_S)
    os.mkfifo(tmp_path / LOCK_NAME.format(user="other"))
    os.mkfifo(tmp_path / LOCK_NAME.format(user=os.getuid()))
    with scratch_folder("tune"), measuring(tmp_path):
        assert busy_lines(on_gpus=False, folder=tmp_path) is not None
    for core in os.sched_getaffinity(0):
        (user_folder() / f"core-{core}").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), exclusive_cores(1):
        pass
    assert not (tmp_path / "precious").exists()
