"""Scratch folders end with their owner, or with a later study if the owner was killed."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from study.cli.doctor import temporary_files
from study.orchestrate.discovery.neighbours import LOCK_NAME, measuring, other_studies
from study.scaling import main
from tests.support.system import needs
from trainables.scratch import (
    IN_USE,
    VARIABLE,
    YOUNG_S,
    ScratchError,
    clean,
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
    os.mkfifo(tmp_path / LOCK_NAME.format(pid=1))
    os.mkfifo(tmp_path / LOCK_NAME.format(pid=os.getpid()))
    with scratch_folder("tune"), measuring([], tmp_path):
        assert other_studies(os.getpid(), [], tmp_path) is not None
    for core in os.sched_getaffinity(0):
        (user_folder() / f"core-{core}").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), exclusive_cores(1):
        pass
    assert not (tmp_path / "precious").exists()


# ------------------------------------------------------------------------------------------------------- leftovers

PYMP = """
import json, multiprocessing.util, os, sys, tempfile, time
from trainables.scratch import own_temporary_folder, user_folder
before = os.environ.get("TMPDIR"), str(user_folder())
with own_temporary_folder():
    inside = multiprocessing.util.get_temp_dir(), tempfile.mkdtemp(), str(user_folder())
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    print(json.dumps([*inside, cache]), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
assert (os.environ.get("TMPDIR"), str(user_folder())) == before
"""


def start_rank(how: str, folder: Path) -> tuple["subprocess.Popen[str]", list[str]]:
    environment = os.environ | {"TMPDIR": str(folder), "USER": "somebody", "LOGNAME": "somebody"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    rank = subprocess.Popen([sys.executable, "-c", PYMP, how], env=environment, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    return rank, json.loads(rank.stdout.readline())


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a temporary folder with room for the names of sockets, unlike that of a test."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_temporary_files_of_a_rank_end_with_it_and_compiled_code_stays(short_folder: Path) -> None:
    rank, (of_multiprocessing, own, common, cache) = start_rank("end", short_folder)
    assert rank.wait(30) == 0
    folder = short_folder / f"scaling-study-{os.getuid()}"
    assert Path(of_multiprocessing).parent.parent == Path(own).parent.parent == folder == Path(common)
    assert cache == f"{short_folder}/torchinductor_somebody"
    assert sorted(path.name for path in short_folder.iterdir()) == [folder.name]
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_temporary_files_of_a_killed_rank_are_removed_by_clean(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    rank, (of_multiprocessing, *_) = start_rank("wait", short_folder)
    removed, kept = clean()
    assert removed == [] and [leftover.needed_by for leftover in kept] == ["a running study"]
    rank.kill()
    rank.wait()
    removed, kept = clean()
    assert [leftover.path for leftover in removed] == [Path(of_multiprocessing).parent] and kept == []
    assert not removed[0].path.exists()


def test_clean_removes_what_no_running_study_needs_and_nothing_else(tmp_path: Path) -> None:
    folder, precious = user_folder(), tmp_path / "precious"
    precious.write_text("mine")
    log = Path(new_log("error", "x" * 1000))
    for name in ("workload-1234abcd", "unsaved-1234abcd", "ray/session_1", "ray/session_2", "tune-ended"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("y" * 500)
        os.utime(folder / name, (0, 0))
    (folder / "tune-ended" / IN_USE).touch()
    (folder / "link").symlink_to(precious)
    (folder / "workload-1234abcd" / "link").symlink_to(precious)
    ray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", f"{folder}/ray/session_2/sockets/x"])
    with scratch_folder("train") as running:
        removed, kept = clean()
        assert {leftover.path.name for leftover in removed} == {"session_1", "tune-ended"}
        assert {leftover.path.name: leftover.needed_by for leftover in kept} == {
            "workload-1234abcd": "a running study",
            log.name: "a running study",
            Path(running).name: "a running study",
            "session_2": "a running Ray",
            "unsaved-1234abcd": "results that the next run saves",
        }
    ray.kill()
    ray.wait()
    removed, kept = clean()
    assert {leftover.path.name for leftover in removed} == {"workload-1234abcd", log.name, "session_2"}
    assert sum(leftover.size_bytes for leftover in removed) == 2000
    assert [leftover.path.name for leftover in kept] == ["unsaved-1234abcd"]
    assert precious.read_text() == "mine" and (folder / "link").is_symlink()


def test_clean_says_what_it_removed_and_the_doctor_how_much_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = new_log("error", "x" * 2**20)
    [check] = temporary_files(most_bytes=2**10)
    assert (check.status, check.fix) == ("warn", "python -m study.scaling clean")
    assert "1\N{NO-BREAK SPACE}MiB" in check.message and str(user_folder()) in check.message
    assert main(["clean", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"removed": [{"path": log, "size_bytes": 2**20, "needed_by": ""}], "kept": []}
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "0\N{NO-BREAK SPACE}B removed\n"
    [check] = temporary_files()
    assert check.status == "ok"
