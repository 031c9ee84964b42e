"""Before a run: a busy host, other studies and other Rays on it are reported, and refused with --strict."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from study.cli import progress
from study.cli.host import busy_lines, started_ray
from study.orchestrate.discovery import neighbours
from study.orchestrate.discovery.neighbours import measuring, other_rays, other_studies
from study.scaling import main

ROOT = Path(__file__).parents[3]
HOLD = (
    "from pathlib import Path; import sys\nfrom study.orchestrate.discovery.neighbours import measuring\n"
    "with measuring(['GPU-1'], Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def idle_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(neighbours.psutil, "process_iter", lambda: [])
    monkeypatch.setattr(neighbours, "_locked", lambda *_: iter(()))


def test_a_study_that_measures_is_reported_with_its_process_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdin
        assert other.stdout.readline() == "held\n"
        with measuring([], tmp_path):  # several studies may hold a lock each
            [line] = list_of_own_user(tmp_path)
        assert line.startswith(f"pid {other.pid}, measures on this host since 20")
        assert " on the same GPUs since" in list_of_own_user(tmp_path, "GPU-1", "GPU-2")[0]
        other.kill()
    assert list_of_own_user(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "the lock of a killed study is removed"


@contextlib.contextmanager
def slow_cluster(left: list[str]) -> Iterator[Any]:
    """A cluster whose start and end take a while."""
    time.sleep(0.2)
    yield "cluster"
    time.sleep(0.2)
    left.append("cluster")


def test_the_start_and_the_end_of_ray_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LONG_WAIT_S", 0.0)
    left: list[str] = []
    with started_ray(slow_cluster(left), quiet=False) as cluster:
        assert cluster == "cluster"
        assert capsys.readouterr().err.splitlines() == ["starting Ray"]
    assert (left, capsys.readouterr().err.splitlines()) == (["cluster"], ["stopping Ray"])


def list_of_own_user(folder: Path, *gpus: str) -> list[str]:
    return [line for line in other_studies(os.getpid(), gpus, folder) if "measures on" in line]


def test_a_lock_that_cannot_be_created_or_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / f"measuring-{os.getpid()}.lock").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "measuring-1.lock").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "measuring-2.lock")
    with measuring([], tmp_path):
        assert not (tmp_path / "elsewhere").exists()
        assert list_of_own_user(tmp_path) == []


def raylet(user: str, parents: list[Any], address: str = "10.0.0.1:6379") -> Any:
    return SimpleNamespace(
        pid=77,
        name=lambda: "raylet",
        cmdline=lambda: ["raylet", f"--gcs-address={address}"],
        parents=lambda: parents,
        username=lambda: user,
        create_time=lambda: 0.0,
    )


def test_rays_and_studies_of_other_users_are_seen_in_the_process_table(
    idle_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = SimpleNamespace(pid=4711, cmdline=lambda: ["python", "-m", "study.scaling", "run"])
    own = SimpleNamespace(pid=os.getpid(), cmdline=lambda: ["pytest"])
    processes = [raylet("somebody", [command]), raylet("somebody", []), raylet("me", [own])]
    monkeypatch.setattr(psutil, "process_iter", lambda: processes)
    [study] = other_studies(os.getpid())
    assert study.startswith("pid 4711 of user somebody, runs on this host since 19")
    [ray] = other_rays(os.getpid())
    assert ray.startswith("pid 77 of user somebody, cluster 10.0.0.1:6379, since 19")
    assert other_rays(os.getpid(), address="10.0.0.1:6379") == [], "it is the cluster of this study"
    processes[1] = raylet("somebody", [], "127.0.0.1:6379")
    assert other_rays(os.getpid(), address="localhost:6379") == []
    assert len(other_rays(os.getpid(), address="localhost:6380")) == 1
    lines = busy_lines(on_gpus=False)
    assert [line.partition("; fix: ")[0].split(" ")[:2] for line in lines] == [
        ["another", "study,"],
        ["another", "Ray"],
    ]


def test_a_busy_host_is_one_line_with_a_fix(idle_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert busy_lines(on_gpus=False) == []
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    [line] = busy_lines(on_gpus=False)
    assert "load 7.5" in line and "fix: " in line


def test_strict_refuses_a_busy_host_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    arguments = ["run", "smoke", "--gpus", "1", "--address", "local", "--out", str(tmp_path / "out"), "--strict"]
    assert main(arguments) == 3
    assert capsys.readouterr().err.startswith("error: --strict: this host is busy: CPU: ")
