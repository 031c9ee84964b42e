"""A process that has imported the modules of a rank, from which ranks and their loader processes are forked.

Starting Python and importing torch takes 5 to 20 s. The server does it once. It runs no other code, uses no device and
has a single thread, so a process that is forked from it is as new as one after its imports.

A command that starts a local Ray starts one server for all ranks at the same time, and offers it to Ray's workers in a
variable. A worker of a cluster that the command joins starts a server of its own. The server is Python's
(multiprocessing.forkserver), except that a process may use one which another process has started. A new process then
gets from the process that requests it what it would get by a fork of that process: see `_Inheritance`.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

from trainables.scratch import scratch_folder

PROJECT_ROOT = str(Path(__file__).resolve().parent.parent.parent.parent)
LOADER_MODULES = ["torch", "pyarrow.dataset", "trainables.batch"]
"""Modules that every loader process needs for its first batch. Preloading them saves seconds per start."""

RANK_MODULES = [*LOADER_MODULES, "torch._dynamo", "study.orchestrate.rank"]
"""Modules that a rank would otherwise import in its first trial. Creating a DDP wrapper imports torch._dynamo."""

OFFER = "SCALING_STUDY_FORK_SERVER"
"""Variable of a local Ray's processes with the server of the command, in JSON. Ranks and user code do not get it."""

THREADS = "OMP_NUM_THREADS"
"""Libraries read it when they are imported, so it must be the same in the server as in the worker."""

OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Linux, proc_pid_oom_score_adj(5): Ray's workers end first if the memory of the host is full."""


_own: "list[subprocess.Popen[bytes]]" = []
"""the server that this process has started for itself, if it has"""


def _python_server() -> multiprocessing.forkserver.ForkServer:
    """Return the object that Python's functions use. Those of the module would start another server after `use`."""
    return multiprocessing.forkserver._forkserver


@dataclass(frozen=True)
class ForkServer:
    """A fork server of this host, for any process of this user.

    Python (3.11 to 3.13) has no public way to use the server of another process.
    """

    pid: int
    address: str
    """path of its socket"""

    @classmethod
    def running(cls) -> Self:
        """Return the server of this process, after starting it if necessary."""
        _python_server().ensure_running()
        values = vars(_python_server())
        return cls(values["_forkserver_pid"], values["_forkserver_address"])

    def use(self) -> None:
        """Let this process start its processes from this server."""
        values = {
            "_forkserver_pid": self.pid,
            "_forkserver_address": self.address,
            # what keeps Python's server alive; this one ends with the process that started it
            "_forkserver_alive_fd": os.open(os.devnull, os.O_RDONLY),
            "ensure_running": lambda: None,
        }
        vars(_python_server()).update(values)
        multiprocessing.spawn.get_preparation_data = _preparation_data


def start_forkserver(modules: Sequence[str], offer: str | None = None) -> None:
    """Let this process have a fork server with torch and `modules` imported for a fast start.

    Nothing happens if it has one. Use the server of an offer (see `offered_server`) if it is suitable and answers. Wait
    for its imports then.

    A forked process imports `__main__` again. In a Ray worker this is Ray's start script and takes seconds. Removing
    its file name prevents the import.
    """
    if vars(_python_server())["_forkserver_pid"] is not None:
        return
    vars(sys.modules["__main__"]).pop("__file__", None)
    # the server is a new interpreter, which finds this project only through its environment
    os.environ["PYTHONPATH"] = _python_path()
    modules = [*LOADER_MODULES, *modules]
    if offer is None or not _uses_offered(offer, modules):
        folder = tempfile.mkdtemp(prefix="fork-server-")
        _own.append(_started(modules, folder))
        ForkServer(_own[-1].pid, _socket(folder)).use()


def _uses_offered(offer: str, modules: Sequence[str]) -> bool:
    """Use an offered server. Return False if it has other threads, lacks a module, or has ended."""
    values = json.loads(offer)
    if values["threads"] != os.environ.get(THREADS) or not set(modules) <= set(values["modules"]):
        return False
    with contextlib.suppress(OSError, EOFError):
        ForkServer(values["pid"], values["address"]).use()
        await_forkserver()
        return True
    return False


def await_forkserver() -> None:
    """Wait until the fork server has imported its modules, so that processes start without delay.

    Raises OSError or EOFError if it has ended.
    """
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()
    if process.exitcode:
        raise ChildProcessError(f"a process of the fork server ended with status {process.exitcode}")


@contextlib.contextmanager
def offered_server(modules: Sequence[str], threads: int) -> Iterator[dict[str, str]]:
    """Start a server for the ranks of a local Ray, which runs until the context ends. Does not wait for its imports.

    Yield the variables that offer it to Ray's workers, none if it cannot start: they start their own then. threads: of
    a rank, unless OMP_NUM_THREADS is set.
    """
    # PYTHONUNBUFFERED as Ray sets it for its workers
    variables = {THREADS: os.environ.get(THREADS, str(threads)), "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as held:
        offer = {}
        with contextlib.suppress(OSError):  # such as a path that is too long for a socket
            folder = held.enter_context(scratch_folder("fork-server"))
            server = held.enter_context(_started(modules, folder, variables, subprocess.DEVNULL))
            held.callback(server.kill)
            facts = {"pid": server.pid, "address": _socket(folder), "modules": modules, "threads": variables[THREADS]}
            offer[OFFER] = json.dumps(facts)
        yield offer


def _started(
    modules: Sequence[str], folder: str, variables: Mapping[str, str] | None = None, output: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start a server with its socket in `folder`, without waiting for its imports.

    It ends when its standard input is closed, at the latest with this process, and then removes the folder. variables:
    additional ones of its environment. output: a file descriptor, None for the outputs of this process.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_socket(folder))
        listener.listen()
        arguments = f"{listener.fileno()}, {list(modules)!r}, {folder!r}"
        return subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import _serve; _serve({arguments})"],
            env=os.environ | (variables or {}),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C is for the command
        )


def _socket(folder: str) -> str:
    return f"{folder}/socket"


def _python_path() -> str:
    return os.pathsep.join(filter(None, [PROJECT_ROOT, os.environ.get("PYTHONPATH")]))


def _serve(listener: int, modules: Sequence[str], folder: str) -> None:
    """Be a server until its standard input is closed."""
    alive = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        multiprocessing.forkserver.main(listener, alive, modules)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_python_preparation_data = multiprocessing.spawn.get_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    """Return what Python sends to a new process before its target, with the inheritance, which acts when it arrives."""
    return _python_preparation_data(name) | {"inheritance": _Inheritance()}


class _Inheritance:
    """What a new process inherits: environment, outputs, niceness, limit of open files, and process group.

    Pickled by the process that requests it; unpickled, and thereby applied, by the new one.
    """

    def __reduce__(self) -> Any:
        if getattr(multiprocessing.context.get_spawning_popen(), "method", "") != "forkserver":
            return int, ()  # a process that inherits by itself
        oom_score = OOM_SCORE.read_text() if OOM_SCORE.exists() else ""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        outputs = [reduction.DupFd(1), reduction.DupFd(2)]
        return _inherit, (dict(os.environ), outputs, niceness, limit, oom_score, os.getpgrp())


def _inherit(
    environment: Mapping[str, str],
    outputs: Sequence[Any],
    niceness: int,
    limit: tuple[int, int],
    oom_score: str,
    group: int,
) -> None:
    """Apply an inheritance to this process."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # chosen anew
    for descriptor, output in enumerate(outputs, start=1):
        received = output.detach()
        os.dup2(received, descriptor)
        os.close(received)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    with contextlib.suppress(PermissionError):  # the server has less of it, and may not be raised
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text(oom_score)
    with contextlib.suppress(PermissionError):  # a group of another session
        os.setpgid(0, group)
