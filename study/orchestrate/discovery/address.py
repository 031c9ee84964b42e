"""Decide which cluster a command uses: that of --address or RAY_ADDRESS, else that of this host, else a local Ray."""

import ipaddress
import os
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from study.errors import NO_CLUSTER

BOOTSTRAP_FILE = Path("/tmp/ray/ray_current_cluster")
"""File in which `ray start` stores the address of this host's cluster. Any user may create it."""

SOCKET_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
"""Linux, include/net/tcp_states.h"""


class ClusterError(Exception):
    """No cluster, or no access to it. The message is one line: what was tried and how to fix it."""

    exit_code = NO_CLUSTER


@dataclass(frozen=True)
class Target:
    """The cluster that a command uses."""

    address: str | None = None
    """HOST:PORT; None for a local Ray."""
    source: str = ""
    """Where the address is from: --address, RAY_ADDRESS or the file of `ray start`."""
    ignored: str = ""
    """Why the address that `ray start` stored on this host is not used; empty if there is none."""

    @property
    def ignored_fix(self) -> str:
        return f"rm {BOOTSTRAP_FILE}, or give --address HOST:PORT to join that cluster"

    def __str__(self) -> str:
        return f"the Ray cluster at {self.address}" if self.address else "a local Ray"


def is_local(address: str | None) -> bool:
    """Return True if a command is certain to use a local Ray. Contacts no cluster."""
    return address == "local" or (address is None and not os.environ.get("RAY_ADDRESS") and not BOOTSTRAP_FILE.exists())


def requested_target(address: str | None) -> Target:
    """Return the target of --address and the environment. It may not answer.

    "local" is a local Ray, "HOST:PORT" that cluster, and "auto" the running cluster of this host. None means
    RAY_ADDRESS, else the running cluster of this host, else a local Ray. Raises ClusterError.
    """
    requested = address or os.environ.get("RAY_ADDRESS")
    if requested == "local":
        return Target()
    if requested and requested != "auto":
        source = "--address" if address else "RAY_ADDRESS"
        split_address(requested, source)
        return Target(requested, source)
    stored, problem = _stored_address()
    if stored is not None and not problem:
        return Target(stored, str(BOOTSTRAP_FILE))
    if requested:
        raise no_cluster_for_auto(problem)
    return Target(ignored=problem)


def no_cluster_for_auto(problem: str = "") -> ClusterError:
    """Return the error for `--address auto` without a running cluster."""
    return ClusterError(
        f"no running Ray cluster on this host (--address auto){problem and f': {problem}'}; fix: start one with "
        "`ray start --head`, or use --address HOST:PORT or --address local"
    )


def split_address(address: str, source: str) -> tuple[str, int]:
    """Return host and port. Raises ClusterError with the source of the address if it is invalid."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ClusterError(
            f"{source} {address!r} is not an address; use auto, local or HOST:PORT (port of Ray's GCS, default 6379)"
        )
    return host, int(port)


def _stored_address() -> tuple[str | None, str]:
    """Return the address that `ray start` stored on this host, and why it is not used, empty if it is.

    Any user of this host can create the file, and listen on the port of a cluster that has ended. Whoever does gets
    Ray's token, so both must belong to this user or root.
    """
    try:
        descriptor = os.open(BOOTSTRAP_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{BOOTSTRAP_FILE} cannot be opened: {error.strerror}"
    with open(descriptor, errors="replace") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None, f"{BOOTSTRAP_FILE} is not a regular file"
        if not _is_trusted(status.st_uid):
            return None, f"{BOOTSTRAP_FILE} belongs to another user (uid {status.st_uid})"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None, f"other users can write to {BOOTSTRAP_FILE}: chmod go-w"
        address = file.read(300).strip()
    try:
        host, port = split_address(address, str(BOOTSTRAP_FILE))
    except ClusterError:
        return address, f"no Ray answers at {address or 'the empty address'} in {BOOTSTRAP_FILE}"
    strangers = sorted(uid for uid in listeners(port) if not _is_trusted(uid)) if is_this_host(host) else []
    if strangers:
        return address, f"another user (uid {strangers[0]}) listens at {address}, which {BOOTSTRAP_FILE} names"
    return address, ""


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


def listeners(port: int, tables: Iterable[Path] = SOCKET_TABLES) -> set[int]:
    """Return the user ids of this host's processes that listen on a TCP port. Empty on systems without /proc."""
    uids = set()
    for table in tables:
        try:
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
        except OSError:
            continue
        uids |= {int(row[7]) for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], base=16) == port}
    return uids


def is_this_host(host: str) -> bool:
    """Return True if a name or address belongs to this host."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    parsed = [ipaddress.ip_address(ip.partition("%")[0]) for ip in found]
    return bool(found & own) or any(ip.is_loopback or ip.is_unspecified for ip in parsed)
