"""Start a script in a fresh process, watch it, and return what it measured."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from trainables.clock import monotonic, unix_s
from trainables.probe import failures
from trainables.probe.child import END_FILE, ERROR_FILE, PROGRESS_FILE, RESULT_FILE, TRACE_FILE
from trainables.probe.job import FailureKind, RankPlace, ScriptFailure, ScriptJob, ScriptOutput
from trainables.probe.session import rank_tables
from trainables.scratch import has_room_for_sockets, scratch_folder

CHILD = Path(__file__).with_name("child.py")
PROJECT_ROOT = str(Path(__file__).resolve().parent.parent.parent)

POLL_S = 0.05
OTHER_RANKS_GRACE_S = 5.0
"""time in which a rank may fail by itself after another has failed, so that each reports its own reason"""

RESOURCE_TRACKER, TRACKER_GRACE_S = "multiprocessing.resource_tracker", 5.0
"""Python's process that removes shared memory which a program has left, and its time to do so"""


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a trial, which agree through a store."""

    store: dist.Store
    name: str
    place: RankPlace

    def key(self, what: str, rank: int | None = None) -> str:
        return f"{self.name}/{what}" + ("" if rank is None else f"/{rank}")

    def publish(self, what: str, value: Any) -> None:
        """Store this rank's value."""
        self.store.set(self.key(what, self.place.rank), json.dumps(value))

    def has(self, what: str, rank: int) -> bool:
        return self.store.check([self.key(what, rank)])

    def all_have(self, what: str) -> bool:
        return self.store.check([self.key(what, rank) for rank in range(self.place.world_size)])

    def collect(self, what: str) -> list[Any]:
        """Return the values of all ranks. Waits for them."""
        return [json.loads(self.store.get(self.key(what, rank))) for rank in range(self.place.world_size)]

    def failed(self) -> int | None:
        """Return a rank that has failed, or None."""
        return int(self.store.get(self.key("failed"))) if self.store.check([self.key("failed")]) else None


def run_script(
    job: ScriptJob,
    place: RankPlace,
    store: dist.Store,
    name: str,
    stop: Callable[[], bool] = lambda: False,
) -> ScriptOutput:
    """Run a script on this rank until its windows are complete, and return what it measured. Collective.

    Every rank of the trial calls this in the process that starts the script, with the same `name`, which is used once
    per `store`. The ranks communicate through `store` only (for example the default group's), under keys that start
    with `name`. The process need not have a process group and does not touch CUDA. Never raises for what a script does:
    see `ScriptOutput.failure`. `stop` is polled several times per second; the script is ended if it returns True.
    """
    ranks = _Ranks(store, name, place)
    started_at = unix_s()
    with scratch_folder("script") as path, _rendezvous(ranks) as master:
        folder = Path(path)
        environment = _environment(job, place, name, *master, _temporary_files(ranks, folder))
        failure = _watch(job, ranks, folder, environment, stop)
        result = _read(folder / RESULT_FILE)
        evaluated = _agree(ranks, result, failure)
        found = rank_tables(result, place.rank, evaluated, folder / TRACE_FILE, job.probe.keep_trace)
    span = (result.get("started_at") or started_at, result.get("ended_at") or unix_s())
    return ScriptOutput(found.tables, found.evidence, span, failure, found.trace)


@contextlib.contextmanager
def _rendezvous(ranks: _Ranks) -> Iterator[tuple[str, int]]:
    """Yield address and port of a store for the script's own process group, on rank 0's host, as torchrun provides it.

    Rank 0 binds the port itself, so that no other process can take it in between.
    """
    server = None
    if ranks.place.rank == 0:
        server = dist.TCPStore(ranks.place.address, 0, is_master=True, wait_for_workers=False)
        ranks.store.set(ranks.key("master"), json.dumps([ranks.place.address, server.port]))
    address, port = json.loads(ranks.store.get(ranks.key("master")))
    yield address, port
    del server


def _temporary_files(ranks: _Ranks, own: Path) -> dict[str, str]:
    """Return the variable that names the folder for temporary files, which the ranks of a host share.

    Under torchrun they share the system's. Libraries lock files in it, and rank 0 prepares data there. A new one per
    trial does not contain what an earlier trial, which was ended within a step, has left.
    """
    key = ranks.key("temporary", ranks.place.group_rank)
    if ranks.place.local_rank == 0:
        folder = own / "tmp"
        folder.mkdir()
        ranks.store.set(key, str(folder) if has_room_for_sockets(str(folder)) else "")
    folder_of_host = ranks.store.get(key).decode()
    return {"TMPDIR": folder_of_host} if folder_of_host else {}


def _environment(
    job: ScriptJob, place: RankPlace, name: str, address: str, port: int, more: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the script: torchrun's variables, those of the job, more, and this process's."""
    environment = dict(os.environ)
    paths = environment.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path and os.path.realpath(path) != os.path.realpath(PROJECT_ROOT)]
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    if job.threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.threads)
    ranks = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.group_rank,
        "GROUP_WORLD_SIZE": place.group_world_size,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "SCALING_STUDY_PARENT": os.getpid(),
    }
    return environment | dict(more) | dict(job.environment) | {key: str(value) for key, value in ranks.items()}


def _watch(
    job: ScriptJob, ranks: _Ranks, folder: Path, environment: dict[str, str], stop: Callable[[], bool]
) -> ScriptFailure | None:
    """Run the script until all ranks have measured, or one has failed. No process of it remains."""
    place = ranks.place
    directory = Path(job.directory or os.getcwd())

    def failure(kind: FailureKind, line: str, code: int | None = None) -> ScriptFailure:
        steps = _steps(folder)
        return ScriptFailure(kind, line, place.rank, job.log, code, steps, job.probe.needed_steps)

    if not job.is_module and not (directory / job.script).is_file():
        ranks.store.set(ranks.key("failed"), str(place.rank))
        return failure("not_found", f"the script {directory / job.script} does not exist")
    (folder / PROGRESS_FILE).write_bytes(bytes(8))
    (folder / "job.json").write_text(job.to_json())
    with open(job.log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", str(CHILD), str(folder / "job.json")],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        found = _until_end(job, ranks, folder, process, stop, failure)
    finally:
        _end_session(process)
    if found is not None and found.kind != "other_rank":
        ranks.store.set(ranks.key("failed"), str(place.rank))
    return found


def _until_end(
    job: ScriptJob,
    ranks: _Ranks,
    folder: Path,
    process: "subprocess.Popen[bytes]",
    stop: Callable[[], bool],
    failure: Callable[..., ScriptFailure],
) -> ScriptFailure | None:
    """Poll until the script has ended or must be ended, and return why it failed."""
    steps, since_s = 0, monotonic()
    measured_s = failed_s = None
    starts_processes = False
    while True:
        code = process.poll()
        now_s = monotonic()
        if measured_s is None and (folder / RESULT_FILE).exists() and _read(folder / RESULT_FILE).get("complete"):
            ranks.publish("measured", True)
            measured_s = now_s
        if measured_s is not None:
            if ranks.all_have("measured"):
                size = _read(folder / RESULT_FILE).get("evidence", {}).get("group_size")
                _finish(job, folder, process)
                is_alone = size is not None and size != ranks.place.world_size
                return failure(*failures.alone(ranks.place.world_size, size)) if is_alone else None
        elif code is not None:
            return failure(*_reason(job, folder, code, starts_processes), code)
        if measured_s is not None and code is not None and not _read(folder / RESULT_FILE).get("loop_ended"):
            return failure(*failures.exit_code(code, _tail(job.log)), code)
        if stop():
            return failure("stopped", "the script was ended by the study")
        other = ranks.failed()
        if other is not None:
            failed_s = failed_s or now_s
            if measured_s is not None or now_s - failed_s > OTHER_RANKS_GRACE_S:
                return failure("other_rank", f"rank {other} failed")
        if measured_s is None and steps == 0 and not starts_processes:
            starts_processes = _starts_python(process.pid)
        if (number := _steps(folder)) != steps:
            steps, since_s = number, now_s
        limit_s = job.step_timeout_s if steps else job.start_timeout_s
        if measured_s is None and now_s - since_s > limit_s:
            return failure(*failures.no_progress(steps, limit_s))
        time.sleep(POLL_S)


def _finish(job: ScriptJob, folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Let the script end after all ranks have measured."""
    (folder / END_FILE).touch()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(job.end_grace_s)


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kill the script and all processes of its session, such as loader processes.

    Resource trackers may end by themselves: a name that is left in shared memory, or that a tracker removes late, would
    disturb the next script that uses it.
    """
    trackers = []
    for member in _session(process.pid):
        with contextlib.suppress(psutil.Error):
            if any(RESOURCE_TRACKER in argument for argument in member.cmdline()):
                trackers.append(member)
            else:
                member.kill()
    psutil.wait_procs(trackers, TRACKER_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()  # last, because its process id may be given to others then


def _session(pid: int) -> Iterator[psutil.Process]:
    """Return the processes of a session."""
    for other in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(other) == pid:
                yield psutil.Process(other)


def _reason(job: ScriptJob, folder: Path, code: int, starts_processes: bool) -> tuple[FailureKind, str]:
    """Return why a script ended that had not measured everything."""
    error = _read(folder / ERROR_FILE)
    if error:
        return failures.exception(error)
    if code:
        return failures.exit_code(code, _tail(job.log))
    needed = _read(folder / RESULT_FILE).get("evidence", {}).get("steps_needed", job.probe.needed_steps)
    return failures.too_few_steps(_steps(folder), needed, starts_processes, _tail(job.log))


def _agree(ranks: _Ranks, result: dict[str, Any], failure: ScriptFailure | None) -> set[int]:
    """Return the steps in which any rank evaluated; of this rank only if a rank failed."""
    own = set(result.get("evaluated", ()))
    ranks.publish("evaluated", sorted(own))
    if failure is not None:
        return own
    return {step for steps in ranks.collect("evaluated") for step in steps}


def _starts_python(pid: int) -> bool:
    """Return True if the script has started a process that runs ranks."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = " ".join(child.cmdline())
                if "torch.distributed.run" in command or "torchrun" in command or "accelerate" in command:
                    return True
    return False


def _steps(folder: Path) -> int:
    """Return the steps that the script has run so far."""
    with contextlib.suppress(OSError, struct.error):
        return int(struct.unpack("q", (folder / PROGRESS_FILE).read_bytes())[0])
    return 0


def _tail(path: str) -> str:
    """Return the end of a log."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - failures.TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON file that the script's process wrote; empty if there is none."""
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value
