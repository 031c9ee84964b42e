"""Processes that a rank starts end with it, and a rank that starts them without end is killed with all of them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]
MOST = 20
RANK = f"""
import os, sys, time
from study.orchestrate.processes.guard import guard_this_process
guard_this_process({MOST}, int(sys.argv[2]) or None)
children = int(sys.argv[1])
for number in range(children):
    if not os.fork():
        os.fork()  # the second one becomes an orphan when the first one is killed
        time.sleep(120)
        os._exit(0)
    print(number + 1, flush=True)
    time.sleep(0.02)
sys.stdin.read()
"""


def start_rank(children: int, host: int = 0) -> "subprocess.Popen[str]":
    """Start a rank that starts `children` processes, each of which starts another one. They end after two minutes."""
    command = [sys.executable, "-c", RANK, str(children), str(host)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("end", ["exit", "killed"])
def test_processes_that_a_rank_started_end_with_it(end: str) -> None:
    with start_rank(MOST // 4) as process:
        assert process.stdin and process.stdout
        assert [int(process.stdout.readline()) for _ in range(MOST // 4)][-1] == MOST // 4
        if end == "killed":
            process.kill()
        process.communicate(timeout=30)  # reads until no process is left that may write
        assert process.returncode == (0 if end == "exit" else -signal.SIGKILL)


def test_a_stopped_rank_ends_with_its_host() -> None:
    with subprocess.Popen(["sleep", "60"]) as host, start_rank(1, host.pid) as process:
        assert process.stdout and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        host.kill()
        host.wait()
        assert process.wait(30) == -signal.SIGKILL
        process.communicate(timeout=30)


def test_a_rank_that_starts_processes_without_end_is_killed_with_all_of_them() -> None:
    with start_rank(10 * MOST) as process:
        assert process.stdout
        started = process.stdout.read().split()
        assert process.wait(10) == -signal.SIGKILL
        assert MOST // 2 <= len(started) < 10 * MOST
