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
    def connected(target: Any, **options: Any) -> Iterator[Cluster]:
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


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_stream_of_any_encoding_takes_every_text(encoding: str) -> None:
    code = (
        "from study.cli.process import standard_streams\n"
        "import sys\nwith standard_streams():\n    print('a \\u2013 b \\udcff')\n    print('\\u03c0', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == {
        "ascii": ("a \\u2013 b \\udcff\n", "\\u03c0\n"),
        "utf-8": ("a \u2013 b \\udcff\n", "\u03c0\n"),
    }[encoding]


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


def run_with_log(code: str, log: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python code with the path of a log as its argument."""
    return subprocess.run([sys.executable, "-c", code, str(log)], cwd=ROOT, capture_output=True, text=True, check=False)


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
    done = run_with_log(code, tmp_path / "ray.log")
    assert done.stderr.splitlines() == ["progress", "later"]
    assert (tmp_path / "ray.log").read_text().splitlines() == ["native", "of Tune"]


def test_what_ray_prints_to_standard_output_when_a_server_dies_goes_to_its_file(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nimport ray\n"
        "from ray._private.utils import publish_error_to_driver\n"
        "from study.orchestrate.processes.output import ray_output_in\n"
        "log = Path(sys.argv[1])\n"
        "with ray_output_in(log):\n"
        "    ray.init(address='local', num_cpus=0, include_dashboard=False, log_to_driver=False)\n"
        "    gcs = ray._private.worker.global_worker.gcs_client\n"
        "    for _ in range(600):\n"
        "        publish_error_to_driver('raylet_died', 'Raylet is terminated', gcs_client=gcs)\n"
        "        if 'Raylet is terminated' in log.read_text():\n"
        "            break\n"
        "        time.sleep(0.1)\n"
        "    print('the report'); ray.shutdown()\n"
    )
    done = run_with_log(code, tmp_path / "ray.log")
    assert (done.stdout, done.returncode) == ("the report\n", 0)
    assert "Raylet is terminated" in (tmp_path / "ray.log").read_text()


def test_the_death_of_a_server_interrupts_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as server:
        monkeypatch.setattr(watch, "servers_of", lambda log_dir: [psutil.Process(server.pid)])
        with (
            on_ending_signals(interrupt),
            pytest.raises(KeyboardInterrupt),
            watch.servers_watched("", is_local=False) as watching,
        ):
            server.kill()
            server.wait()
            time.sleep(10)
    assert f"sleep (pid {server.pid}) on this host has died" in watching.problem


def test_a_server_of_a_local_ray_that_has_died_before_the_watch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "servers_of", lambda log_dir: [SimpleNamespace(name=lambda: "gcs_server")])
    died = pytest.raises(watch.ServerDied, match="Ray's process raylet on this host has died")
    with died, watch.servers_watched("", is_local=True):
        pass


SUPERVISED = """
import os, signal, sys, threading, time, types
from study.cli.process import leave_report_to_parent, supervised, tell_parent
def write_report(out, partial):
    return types.SimpleNamespace(path=f"report of {out}, partial: {partial}")
sys.modules["analysis.report.report"] = types.SimpleNamespace(write_report=write_report)
sys.modules["study.orchestrate.local_ray"] = types.SimpleNamespace(kill_local=lambda: None)
def run(arguments):
    RUN
def slow_fork(fork=os.fork):
    child = fork()
    time.sleep(1.0 if child else 0.0)
    return child
def slow_notify(condition, notify=threading.Condition.notify_all):
    time.sleep(0.5)
    notify(condition)
if "slow fork" in sys.argv:
    os.fork = slow_fork
if "slow locks" in sys.argv:
    threading.Condition.notify_all = slow_notify
sys.exit(supervised(run, []))
"""
"""a command with a parent, whose report is one line"""

WAIT = "\n    ".join(
    [
        "from study.cli.process import interrupt, on_ending_signals",
        "with on_ending_signals(interrupt):",
        "    try: print('ready', flush=True); time.sleep(30)",
        "    except KeyboardInterrupt: print('interrupted', flush=True)",
        "    time.sleep(0.3)",
        "return 130",
    ]
)
STARTED = "tell_parent(out='OUT', command='COMMAND', log='/nowhere'); "


def supervised(run: str, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISED.replace("RUN", run), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.abort()", 4),
        ("os._exit(1)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", 70),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 70),
    ],
)
def test_a_process_that_ray_or_the_kernel_ends_leaves_a_partial_report_and_one_line(end: str, code: int) -> None:
    process = supervised(STARTED + end)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    [line] = stderr.splitlines()
    assert line.startswith("error: ")
    assert "; finished trials are saved; log: /nowhere; fix: " in line
    assert line.endswith("; resume with: COMMAND")
    assert stdout == "report of OUT, partial: True\n"


def test_a_process_that_ends_before_its_study_starts_leaves_one_line_and_no_report() -> None:
    process = supervised("os._exit(1)")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 4
    assert stdout == ""
    [line] = stderr.splitlines()
    assert line.startswith("error: ") and "; fix: " in line


def test_the_line_names_the_head_of_a_cluster_that_does_not_answer(tmp_path: Path) -> None:
    log = tmp_path / "ray.log"
    log.write_text("[2026] gcs_rpc_client.h:208: Failed to connect to GCS at address 10.0.0.1:6379 within 60 seconds.")
    process = supervised(f"tell_parent(log={str(log)!r}); os._exit(1)")
    assert "the head of the cluster (its GCS) no longer answers" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return 0", 0),
        ("return 130", 130),
        ("sys.exit(3)", 3),
        ("tell_parent(exit_code=1); os.abort()", 1),
    ],
)
def test_a_process_that_has_said_how_it_ended_is_not_explained(end: str, code: int) -> None:
    process = supervised(STARTED + end)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == code


def test_a_process_that_has_printed_its_error_leaves_the_report_to_its_parent() -> None:
    process = supervised(STARTED + "print('error: mine', file=sys.stderr); leave_report_to_parent(4)")
    assert process.communicate(timeout=60) == ("report of OUT, partial: True\n", "error: mine\n")
    assert process.returncode == 4


@pytest.mark.parametrize("to_group", [False, True], ids=["to the parent", "to all of the terminal"])
@pytest.mark.parametrize("number", [signal.SIGINT, *ENDING])
def test_a_signal_interrupts_the_supervised_process_once(number: signal.Signals, to_group: bool) -> None:
    process = supervised(WAIT, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    (os.killpg if to_group else os.kill)(process.pid, number)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert process.returncode == 130


def test_a_signal_that_arrives_while_another_is_handled_does_not_stop_the_end() -> None:
    """As by `timeout -s INT`, which signals its process, and then all processes of its group."""
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(2); return 130"
    process = supervised(ignores, "slow locks", start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def test_a_signal_is_an_interruption_even_if_rays_servers_end_before_the_study_does() -> None:
    """As by `timeout` or a job's end, which signal every process: Ray then aborts the one that it serves."""
    aborts = "signal.signal(signal.SIGTERM, lambda *_: os.abort()); print('ready', flush=True); time.sleep(30)"
    process = supervised(STARTED + aborts, start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=60) == (
        "report of OUT, partial: True\n",
        "warning: interrupted; resume with: COMMAND\n",
    )
    assert process.returncode == 130


def test_a_signal_in_the_moment_of_the_fork_interrupts_the_supervised_process_too() -> None:
    process = supervised(WAIT, "slow fork", start_new_session=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGQUIT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert process.returncode == 130


def test_a_signal_without_a_handler_ends_both_processes_by_that_signal() -> None:
    process = supervised("print('ready', flush=True); time.sleep(30)")
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGTERM


def test_a_supervised_process_ends_with_its_parent() -> None:
    process = supervised("print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    child.wait(10)


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
