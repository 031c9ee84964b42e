"""The command as users run it: in a separate process, with a local Ray that it starts."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.command import Command, finished
from tests.support.orchestration import WORKLOADS, processes_of
from trainables.scratch import user_folder

pytestmark = [pytest.mark.xdist_group("own ray"), pytest.mark.timeout(1800)]

SLOW = [
    "run",
    "smoke",
    "--workload",
    f"{WORKLOADS}:slow",
    "--gpus",
    "1,2",
    "--batch-per-gpu",
    "4",
    "--repeats",
    "2",
    "--steps",
    "8",
]


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, or "" if it has ended or is a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def assert_gone(family: list[psutil.Process], timeout_s: float = 180) -> None:
    """Assert that all these processes end."""
    _, alive = psutil.wait_procs(family, timeout=timeout_s)
    left = {process.pid: command_line(process) for process in alive if command_line(process)}
    assert not left


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not processes_of(str(tmp_path))


def test_killed_and_interrupted_studies_lose_nothing_and_the_same_command_completes_them(folder: Path) -> None:
    out = folder / "results"
    command = [*SLOW, "--out", str(out)]

    first = Command(command, folder, "killed")
    first.wait_for(1, out)
    orphans = first.family()
    [raylet] = [process for process in orphans if process.name() == "raylet"]
    assert f"{user_folder()}/ray/session_" in command_line(raylet), "Ray's own folder is open to every user"
    kept = finished(out)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    assert_gone(orphans, timeout_s=20)
    assert kept.items() <= finished(out).items()

    second = Command(command, folder, "interrupted")
    second.wait_for(2, out)
    family = second.family()
    kept = finished(out)
    os.killpg(second.process.pid, signal.SIGINT)  # like Ctrl-C in a terminal: to all foreground processes
    status, _, stderr = second.wait()
    assert status == 130
    assert f"--out {out}" in stderr
    assert_gone(family)
    assert kept.items() <= finished(out).items()
    assert {record["status"] for record in finished(out).values()} == {"done"}, "the trial that was cut short is none"
    assert "partial" in (out / "report" / "index.html").read_text().lower()

    third = Command(command, folder, "terminated while its group starts")
    third.wait_for(2, out, line="starting a worker group")
    family = third.family()
    kept = finished(out)
    third.process.send_signal(signal.SIGTERM)  # like a batch system that ends a job
    status, _, stderr = third.wait()
    assert status == 130
    assert f"--out {out}" in stderr
    assert "SIGTERM" not in stderr, "a stack trace of Ray's"
    assert_gone(family)
    assert kept.items() <= finished(out).items()

    slow_to_end: list[psutil.Process] = []  # Ray's agents take over a minute to notice that their raylet was killed
    for name, line in (("before Tune starts", "cluster: "), ("while trials run", "starting a worker group")):
        lost = Command(command, folder, name)
        lost.wait_for(2, out, line=line)
        family = lost.family()
        [raylet] = [process for process in family if process.name() == "raylet"]
        raylet.kill()
        status, stdout, stderr = lost.wait()
        assert status == 4, stderr
        [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert re.search(r"raylet (\(pid \d+\) )?on this host has died|one of its servers has died", line)
        assert "; log: " in line and f"--out {out}" in line
        assert "Traceback" not in stderr and "[20" not in stderr, "output of Ray"
        assert stdout.strip() == str(out / "report" / "index.html")
        assert "partial" in (out / "report" / "index.html").read_text().lower()
        slow_to_end += family
        assert kept.items() <= finished(out).items()

    status, stdout, stderr = Command(command, folder, "resumed").wait()
    assert status == 0, stderr
    records = finished(out)
    assert len(records) == 4
    assert {record["status"] for record in records.values()} == {"done"}
    assert {trial: records[trial]["started_at"] for trial in kept} == {
        trial: kept[trial]["started_at"] for trial in kept
    }
    assert stdout.strip().splitlines()[-1] == str(out / "report" / "index.html")
    assert "partial" not in (out / "report" / "index.html").read_text().lower()
    assert not list((out / "trials").glob(".*")), "a half-written folder was left behind"
    assert_gone(slow_to_end)


@contextlib.contextmanager
def forwarded(address: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield an address whose connections are forwarded to another one, and a function that cuts them."""
    host, _, port = address.rpartition(":")
    ends: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    def cut() -> None:
        for end in (server, *ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    with socket.create_server((host, 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{host}:{server.getsockname()[1]}", cut
        cut()


@pytest.mark.xdist_group("shared ray")
def test_a_head_that_no_longer_answers_ends_a_study_with_one_line_and_a_partial_report(
    local_ray: str, folder: Path
) -> None:
    out = folder / "results"
    with forwarded(local_ray) as (address, cut):
        command = [*SLOW, "--out", str(out), "--address", address]
        study = Command(command, folder, RAY_gcs_rpc_server_reconnect_timeout_s="3")
        study.wait_for(1, out)
        kept = finished(out)
        cut()
        status, stdout, stderr = study.wait()
    assert status == 4, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(
        "error: the head of the cluster (its GCS) no longer answers; finished trials are saved; log: "
    )
    assert "; fix: " in line and f"--out {out}" in line
    assert "Traceback" not in stderr and "[20" not in stderr, "output of Ray"
    assert stdout.strip() == str(out / "report" / "index.html")
    assert "partial" in (out / "report" / "index.html").read_text().lower()
    assert kept.items() <= finished(out).items()


@pytest.mark.xdist_group("shared ray")
def test_a_user_workload_runs_with_loader_processes(local_ray: str, folder: Path) -> None:
    out = folder / "results"
    arguments = [
        "run", "--workload", "examples/own_workload.py:tiny", "--gpus", "1,2", "--batch-per-gpu", "8",
        "--precision", "fp32", "--loader-workers", "1", "--repeats", "1", "--steps", "4",
        "--address", local_ray, "--out", str(out),
    ]  # fmt: skip
    status, stdout, stderr = Command(arguments, folder).wait()
    assert status == 0, stderr
    assert "tiny" in stderr
    records = finished(out)
    assert len(records) == 2
    assert all(
        record["status"] == "done" and str(record["trial_id"]).startswith("tiny-ddp") for record in records.values()
    )
    assert stdout.strip().endswith("index.html")


def test_too_many_ranks_are_refused_before_anything_starts(folder: Path) -> None:
    out = folder / "results"
    began_s = time.monotonic()
    status, _, stderr = Command(
        ["run", "smoke", "--gpus", "1,4096", "--address", "local", "--out", str(out)], folder
    ).wait()
    assert status == 3
    assert "does not fit: --gpus 4096" in stderr
    assert time.monotonic() - began_s < 20
    assert not out.exists()
