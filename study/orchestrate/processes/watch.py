"""Notice that Ray's processes on this host have died, before Ray aborts the driver without a report."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.errors import NO_CLUSTER

POLL_S = 0.5
SERVERS = ("raylet", "gcs_server")


class ClusterLost(Exception):
    """The cluster ended, or has no room for the study's own processes. Finished trials are saved."""

    exit_code = NO_CLUSTER


class ServerDied(ClusterLost):
    """A server of the cluster on this host has died. Ray aborts this process seconds later."""

    exit_code = NO_CLUSTER


@dataclass
class Watch:
    """State of the watch. `problem` says which process has died, empty if none has."""

    servers: Sequence[tuple[psutil.Process, str]]
    problem: str = ""

    def has_lost_server(self) -> bool:
        """Return True if a server has died, and set `problem`."""
        for server, name in self.servers:
            if not is_running(server):
                self.problem = f"Ray's process {name} (pid {server.pid}) on this host has died"
        return bool(self.problem)


def servers_of(log_dir: str) -> list[psutil.Process]:
    """Return the raylets and the GCS on this host of the cluster with this folder for logs."""
    session, servers = str(Path(log_dir).parent), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.name() in SERVERS and any(session in argument for argument in process.cmdline()):
                servers.append(process)
    return servers


def is_running(process: psutil.Process) -> bool:
    """Return True if a process runs. Zombies do not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def servers_watched(log_dir: str, is_local: bool) -> Iterator[Watch]:
    """Interrupt the main thread if a server of the cluster on this host dies until the context ends.

    Without a server, calls of Ray do not return, and Ray aborts this process up to a minute later. Raises ServerDied if
    a server of a local Ray is not there any more.
    """
    watch = Watch([(server, server.name()) for server in servers_of(log_dir)])
    missing = set(SERVERS) - {name for _, name in watch.servers} if is_local else ()
    if missing:
        raise ServerDied(f"Ray's process {' and '.join(sorted(missing))} on this host has died; log: {log_dir}")
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_S):
            if watch.has_lost_server():
                os.kill(os.getpid(), signal.SIGTERM)  # its handler raises KeyboardInterrupt
                return

    thread = threading.Thread(target=poll, daemon=True, name="watch Ray's servers")
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
