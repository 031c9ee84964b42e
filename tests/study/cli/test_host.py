"""Before a run: a busy host and other studies on it are reported, and refused with --strict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from study.cli import host
from study.cli.host import busy_lines, measuring
from study.scaling import main

ROOT = Path(__file__).parents[3]
HOLD = (
    "from pathlib import Path; import sys\nfrom study.cli.host import measuring\n"
    "with measuring(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
)


def test_a_study_that_measures_is_reported_with_its_process_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdin
        assert other.stdout.readline() == "held\n"
        line = busy_lines(on_gpus=False, folder=tmp_path)[-1]
        assert f"(pid {other.pid}, since 20" in line
        with measuring(tmp_path):  # the lock is taken, and the study runs nevertheless
            pass
        other.kill()
    assert not any("another study" in line for line in busy_lines(on_gpus=False, folder=tmp_path))


def test_a_lock_that_cannot_be_created_is_no_error(tmp_path: Path) -> None:
    (tmp_path / host.LOCK_NAME.format(user=os.getuid())).symlink_to(tmp_path / "elsewhere")
    with measuring(tmp_path):
        assert not (tmp_path / "elsewhere").exists()


def test_a_busy_host_is_one_line_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    [line] = busy_lines(on_gpus=False, folder=tmp_path)
    assert "load 7.5" in line and "fix: " in line
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert busy_lines(on_gpus=False, folder=tmp_path) == []


def test_strict_refuses_a_busy_host_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    arguments = ["run", "smoke", "--gpus", "1", "--address", "local", "--out", str(tmp_path / "out"), "--strict"]
    assert main(arguments) == 3
    assert capsys.readouterr().err.startswith("error: --strict: this host is busy: CPU: ")
