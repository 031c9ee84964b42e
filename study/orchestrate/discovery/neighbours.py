"""Other studies and other Rays on this host: they compete for its cores and GPUs.

A study holds a lock in its user's scratch folder while it measures. Studies of other users are known by their Ray.
"""

import contextlib
import fcntl
import getpass
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml

from study.orchestrate.discovery.address import is_this_host
from study.store import nvml
from trainables.scratch import open_regular, user_folder

LOCK_NAME = "measuring-{pid}.lock"
MAX_LOCK_BYTES = 10_000


@contextlib.contextmanager
def measuring(gpus: Sequence[str] = (), folder: Path | None = None) -> Iterator[None]:
    """Hold the lock that tells this user's other studies that one measures here, on GPUs with these UUIDs.

    It ends with this process. No error if it cannot be taken.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path = (folder or user_folder()) / LOCK_NAME.format(pid=os.getpid())
            file = held.enter_context(open_regular(path, os.O_RDWR | os.O_CREAT, os.getuid()))
            held.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate()
            facts = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M"), "gpus": list(gpus)}
            file.write(json.dumps(facts).encode())
            file.flush()
        yield


def other_studies(own_pid: int, gpus: Sequence[str] = (), folder: Path | None = None) -> list[str]:
    """Describe each study on this host besides that of process `own_pid`, and whether it uses any of `gpus`."""
    lines = []
    for facts in _locked(own_pid, folder):
        shared = " on the same GPUs" if set(gpus) & set(facts["gpus"]) else ""
        lines.append(f"pid {facts['pid']}, measures on this host{shared} since {facts['since']}")
    for raylet in _raylets():
        if raylet["study_pid"] not in (None, own_pid) and raylet["user"] != getpass.getuser():
            lines.append(
                f"pid {raylet['study_pid']} of user {raylet['user']}, runs on this host since {raylet['since']}"
            )
    return lines


def other_rays(own_pid: int, address: str | None = None) -> list[str]:
    """Describe each node of a Ray on this host that belongs to no study and not to the cluster at `address`."""
    return [
        f"pid {raylet['pid']} of user {raylet['user']}, cluster {raylet['address']}, since {raylet['since']}"
        for raylet in _raylets()
        if raylet["study_pid"] is None
        and own_pid not in raylet["ancestors"]
        and not _are_equal(raylet["address"], address)
    ]


def _are_equal(one: str, other: str | None) -> bool:
    """Return True if two addresses name the same server. This host has several names."""
    if other is None or one == other:
        return one == other
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    return port == other_port and is_this_host(host) and is_this_host(other_host)


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process may use."""
    if nvml.initialization_error():
        return []
    uuids = [
        str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return uuids
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        uuid
        for index, uuid in enumerate(uuids)
        if any(name == str(index) or (not name.isdecimal() and uuid.startswith(name)) for name in names)
    ]


def _locked(own_pid: int, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the facts of this user's other studies that hold their lock. Remove the locks of killed ones."""
    with contextlib.suppress(OSError):
        for path in sorted((folder or user_folder()).glob(LOCK_NAME.format(pid="*"))):
            if path.name == LOCK_NAME.format(pid=own_pid):
                continue
            with contextlib.suppress(OSError, ValueError), open_regular(path, owner=os.getuid()) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    yield json.loads(file.read(MAX_LOCK_BYTES))


def _raylets() -> Iterator[dict[str, Any]]:
    """Yield the nodes of Rays on this host: processes that any user may see, and none may imitate unseen."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() != "raylet":
                continue
            arguments = process.cmdline()
            parents = process.parents()
            studies = [parent.pid for parent in parents if "study.scaling" in parent.cmdline()]
            yield {
                "pid": process.pid,
                "user": process.username(),
                "since": time.strftime("%Y-%m-%d %H:%M", time.localtime(process.create_time())),
                "address": next((a.partition("=")[2] for a in arguments if a.startswith("--gcs-address=")), "unknown"),
                "ancestors": [parent.pid for parent in parents],
                "study_pid": studies[0] if studies else None,
            }
