"""Ranks of a local Ray are forked from a server of the command, and are as if their worker had forked them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from study.orchestrate.processes import fork_server
from study.orchestrate.processes.fork_server import OFFER, THREADS, offered_server
from tests.support.command import ROOT, Command
from tests.support.forked import FOLDER, hanging

pytestmark = [pytest.mark.xdist_group("own ray"), pytest.mark.timeout(600)]

WORKER = """
import multiprocessing, os, sys
from study.orchestrate.processes import fork_server
from tests.support.forked import print_state
os.nice(1)
fork_server.start_forkserver(sys.argv[1:], os.environ.pop(fork_server.OFFER, None))
os.environ["SET_BY_WORKER"] = "yes"
os.environ.pop("ONLY_IN_SERVER", None)
process = multiprocessing.get_context("forkserver").Process(target=print_state)
process.start()
process.join()
print(os.getpid())
"""


def forked_by_a_worker(folder: Path, *modules: str, **variables: str) -> tuple[dict[str, Any], int]:
    """Return the state of a process that a worker's fork server forks, and the worker's pid."""
    output = subprocess.run(
        [sys.executable, "-c", WORKER, *modules],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables, cwd=folder, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return json.loads(output[0]), int(output[1])


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The offer of a server that has imported `colorsys`, with one thread."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ONLY_IN_SERVER", "yes")
        monkeypatch.delenv(THREADS, raising=False)
        with offered_server([*fork_server.LOADER_MODULES, "colorsys"], threads=1) as offer:
            yield offer


def test_a_worker_uses_the_offered_server_and_its_processes_are_as_if_it_had_forked_them(
    server: dict[str, str], tmp_path: Path
) -> None:
    forked, worker = forked_by_a_worker(tmp_path, "colorsys", **server, **{THREADS: "1"})
    assert forked["parent"] == json.loads(server[OFFER])["pid"] != worker
    assert forked["variables"]["SET_BY_WORKER"] == "yes"
    assert not {OFFER, "ONLY_IN_SERVER"} & set(forked["variables"])
    assert forked["folder"] == str(tmp_path)
    assert forked["niceness"] == os.getpriority(os.PRIO_PROCESS, 0) + 1
    assert forked["outputs"][0] == os.devnull and forked["outputs"][1].startswith("pipe:"), "its output came here"
    assert forked["threads"] == 1


@pytest.mark.parametrize("module, threads", [("graphlib", "1"), ("colorsys", "2")])
def test_a_worker_with_other_modules_or_threads_starts_its_own_server(
    module: str, threads: str, server: dict[str, str], tmp_path: Path
) -> None:
    forked, worker = forked_by_a_worker(tmp_path, module, **server, **{THREADS: threads})
    assert forked["parent"] not in (json.loads(server[OFFER])["pid"], worker)
    assert forked["threads"] == int(threads)


def test_a_worker_whose_server_has_ended_starts_its_own(tmp_path: Path) -> None:
    with offered_server(["colorsys"], threads=1) as offer:
        pass
    ended = json.loads(offer[OFFER])
    assert not psutil.pid_exists(ended["pid"]) and not Path(ended["address"]).parent.exists()
    ended["modules"] += fork_server.LOADER_MODULES
    forked, worker = forked_by_a_worker(tmp_path, "colorsys", **{OFFER: json.dumps(ended), THREADS: "1"})
    assert forked["parent"] not in (ended["pid"], worker)


class Running:
    """A study on a local Ray whose rank and loader process report their state, and which hangs then."""

    def __init__(self, folder: Path, temporary: Path):
        self.folder, self.temporary = folder, temporary
        workload = f"{Path(hanging.__code__.co_filename)}:{hanging.__name__}"
        arguments = ["run", "--workload", workload, "--gpus", "1", "--loader-workers", "1", "--batch-per-gpu", "4"]
        self.command = Command(
            [*arguments, "--address", "local", "--out", str(folder / "results")],
            folder,
            TMPDIR=str(temporary),
            **{FOLDER: str(folder)},
        )

    def await_states(self) -> None:
        """Wait until rank and loader process have reported."""
        self.rank, self.loader = (self._state(name) for name in ("rank", "loader"))

    def _state(self, name: str) -> dict[str, Any]:
        path, deadline_s = self.folder / f"{name}.json", time.monotonic() + 300
        while not path.exists():
            assert self.command.process.poll() is None and time.monotonic() < deadline_s, self.command.log.read_text()
            time.sleep(0.1)
        state: dict[str, Any] = json.loads(path.read_text())
        return state

    def sockets(self) -> list[Path]:
        """Return the sockets of fork servers."""
        return [*self.temporary.glob("*/fork-server-*/socket")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:  # a short path, for sockets
        study = Running(tmp_path_factory.mktemp("running"), Path(temporary))
        try:
            study.await_states()
            yield study
        finally:
            study.command.process.kill()
            study.command.wait()


def test_a_rank_of_a_local_ray_is_forked_from_the_commands_server(running: Running) -> None:
    server = psutil.Process(running.rank["parent"])
    assert "fork_server import _serve" in server.cmdline()[-1]
    assert psutil.Process(running.command.process.pid) in server.parents()
    assert not [parent for parent in server.parents() if parent.name() == "raylet"]
    assert len(running.sockets()) == 1, "no worker has started another one"


def test_a_forked_rank_has_the_environment_of_its_worker(running: Running) -> None:
    variables = running.rank["variables"]
    assert variables["RAY_JOB_ID"] and variables["RANK"] == "0" and OFFER not in variables
    assert Path(variables["TMPDIR"]).name.startswith("rank-")
    assert running.rank["threads"] == int(variables[THREADS])
    raylet = next(process for process in running.command.family() if process.name() == "raylet")
    assert tuple(running.rank["open_files"]) == raylet.rlimit(psutil.RLIMIT_NOFILE)
    assert running.rank["oom_score"] == "1000", "Ray sets it for its workers"


def test_a_forked_rank_and_its_loader_processes_write_to_the_log_of_its_worker(running: Running) -> None:
    assert running.rank["outputs"] == running.loader["outputs"]
    assert running.rank["outputs"][0] == os.devnull
    for path, word in zip(running.rank["outputs"][1:], ("state", "error"), strict=True):
        assert Path(path).name.startswith("worker-")
        assert [line for line in Path(path).read_text().splitlines() if line.startswith(word)] == [
            f"{word} of the rank",
            f"{word} of the loader",
        ]


def test_a_loader_process_has_the_environment_of_its_rank_and_ends_with_it(running: Running) -> None:
    assert running.loader["variables"]["RANK"] == "0"
    assert running.loader["parent"] == running.rank["parent"]
    assert running.loader["group"] == running.rank["pid"] == running.rank["group"], "the rank's guard kills its group"


def test_a_killed_command_leaves_no_server_rank_or_socket(running: Running) -> None:
    family = running.command.family()
    pids = {process.pid for process in family}
    assert pids >= {running.rank["pid"], running.loader["pid"], running.rank["parent"]}
    os.kill(running.command.process.pid, signal.SIGKILL)
    running.command.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not running.sockets()
