"""Closed or full standard streams and ending signals: nothing measured is lost, and every exit code is documented."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from study import errors
from study.cli import commands
from study.cli.process import ENDING, interrupt, on_ending_signals
from study.orchestrate.cluster import Cluster
from study.orchestrate.processes import reaper, watch
from study.orchestrate.processes.watch import ClusterLost
from study.scaling import main
from tests.support.hosts import ROOT

COMMAND = [sys.executable, "-m", "study.scaling"]
RUN = ["run", "smoke", "--gpus", "1", "--address", "local"]


@pytest.fixture
def simulated_run(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace Ray and its trials. `during` is what happens while they run."""
    run = SimpleNamespace(during=lambda: None)

    @contextlib.contextmanager
    def connected(target: Any) -> Iterator[Cluster]:
        previous = signal.signal(signal.SIGTERM, lambda *_: os._exit(9))  # as Ray does
        yield Cluster([], "simulated", None, {}, "", is_local=True)
        signal.signal(signal.SIGTERM, previous)

    def trials(*arguments: Any, **options: Any) -> bool:
        try:
            run.during()
        except KeyboardInterrupt:
            return True
        return False

    monkeypatch.setattr(commands, "connect", connected)
    monkeypatch.setattr("study.orchestrate.tune.run_trials", trials)
    monkeypatch.setattr("study.cli.host.busy_lines", lambda *_: [])
    return run


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_every_ending_signal_ends_with_a_partial_report_and_the_command_that_resumes(
    number: signal.Signals, simulated_run: SimpleNamespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    simulated_run.during = lambda: os.kill(os.getpid(), number)
    before = [signal.getsignal(each) for each in ENDING]
    assert main([*RUN, "--out", str(tmp_path / "out")]) == 130
    assert "interrupted; resume with: " in capsys.readouterr().err
    assert "partial" in (tmp_path / "out/report/index.html").read_text().lower()
    assert [signal.getsignal(each) for each in ENDING] == before


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_before_ray_starts_is_no_silent_end(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("study.cli.host.busy_lines", lambda *_: os.kill(os.getpid(), number))
    assert main([*RUN, "--out", str(tmp_path / "out")]) == 130
    assert "interrupted; resume with: " in capsys.readouterr().err


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with on_ending_signals(interrupt):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == interrupt
    finally:
        signal.signal(signal.SIGHUP, before)


class Broken:
    """A standard error that fails, like a closed pipe or a full disk."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self) -> bool:
        return False


@pytest.mark.usefixtures("no_figures")
def test_progress_that_cannot_be_written_does_not_end_a_study(
    simulated_run: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []
    simulated_run.during = lambda: measured.append(True)
    monkeypatch.setattr(sys, "stderr", Broken())
    assert main([*RUN, "--out", str(tmp_path / "out")]) == 1, "no trial has run"
    assert measured and (tmp_path / "out/report/index.html").exists()


@pytest.mark.parametrize("command", ["plan smoke", "plan smoke --json", "list", "list --json"])
def test_a_reader_that_ends_early_ends_the_command_silently(command: str, tmp_path: Path) -> None:
    line = f"{' '.join(COMMAND)} {command} | true; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ""}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_or_closed_output_is_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def listed(redirection: str) -> tuple[int, str]:
        line = f"{' '.join(COMMAND)} list {redirection}"
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    assert listed(">/dev/full") == (
        2,
        "error: standard output cannot be written: No space left on device; fix: send it elsewhere\n",
    )
    assert listed(">&-") == (0, "")
    assert listed("2>&-")[0] == 0


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "README.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    documented = {int(code) for code in re.findall(r"(?:^|; )(\d+) ", " ".join(text.split()))}
    codes = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert documented == codes


# -------------------------------------------------------------------------------------------------- Ray itself dies


@pytest.mark.usefixtures("no_figures")
def test_a_cluster_that_fails_leaves_a_partial_report_and_one_line(
    simulated_run: SimpleNamespace, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail() -> None:
        raise ClusterLost("Ray failed: it is gone; log: here")

    simulated_run.during = fail
    assert main([*RUN, "--out", str(tmp_path / "out")]) == 4
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: Ray failed: it is gone; log: here; finished trials are saved; resume with: python -m"
    )
    assert "partial" in (tmp_path / "out/report/index.html").read_text().lower()


def test_the_output_of_ray_goes_to_a_file_and_that_of_the_study_to_stderr(tmp_path: Path) -> None:
    code = (
        "import logging, os, sys\nfrom pathlib import Path\n"
        "from study.cli.process import standard_streams\nfrom study.orchestrate.processes.output import ray_output_in\n"
        "logger = logging.getLogger('ray'); logger.addHandler(logging.StreamHandler())\n"
        "with standard_streams():\n"
        "    with ray_output_in(Path(sys.argv[1])):\n"
        "        os.write(2, b'native\\n'); logging.getLogger('ray.tune').error('of Tune')\n"
        "        print('progress', file=sys.stderr)\n"
        "    os.write(2, b'later\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ray.log")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines() == ["progress", "later"]
    assert (tmp_path / "ray.log").read_text().splitlines() == ["native", "of Tune"]


def test_the_death_of_a_server_interrupts_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as server:
        monkeypatch.setattr(watch, "servers_of", lambda log_dir: [psutil.Process(server.pid)])
        with on_ending_signals(interrupt), pytest.raises(KeyboardInterrupt), watch.servers_watched("") as watching:
            server.kill()
            server.wait()
            time.sleep(10)
    assert f"sleep (pid {server.pid}) on this host has died" in watching.problem


def test_the_report_in_a_new_process_has_this_exit_code_and_no_file_of_the_old_one(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom study.cli import process\nfrom study.orchestrate import local_ray\n"
        "local_ray.kill_local = lambda: None\nfile = open(sys.argv[1], 'w'); os.set_inheritable(file.fileno(), True)\n"
        "process._REPORT = 'import os, sys; print(sys.argv[1]); print(*map(os.path.realpath, "
        '(f"/dev/fd/{name}" for name in os.listdir("/dev/fd")))); sys.exit(int(sys.argv[2]))\'\n'
        "process.report_in_new_process('OUT', 4)\n"
    )
    log = tmp_path / "driver.log"
    done = subprocess.run([sys.executable, "-c", code, str(log)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (4, ["OUT"]), done.stderr
    assert log.exists() and str(log) not in done.stdout


def test_the_processes_that_write_into_a_session_are_killed_and_its_readers_are_not(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with (
        log.open("w") as file,
        subprocess.Popen(["sleep", "60"], stdout=file) as writer,
        subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL) as reader,
    ):
        reaper.kill_session(str(tmp_path))
        assert writer.wait(10) == -signal.SIGKILL
        assert reader.poll() is None
        reader.kill()


def test_the_reaper_waits_for_the_end_of_its_driver_and_then_kills_the_session(tmp_path: Path) -> None:
    with (tmp_path / "agent.log").open("w") as file:  # closed before the reaper runs: this process writes there too
        agent = subprocess.Popen(["sleep", "60"], stdout=file)
    with agent:
        with reaper.reaper(str(tmp_path)):
            pass
        assert agent.poll() is None, "the driver has ended it itself"
        command = [sys.executable, "-P", reaper.__file__, str(tmp_path)]
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=True)
        assert agent.wait(10) == -signal.SIGKILL
