"""Find the Ray cluster of a study, or start a local one."""

import logging
import os
import platform
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.capacity import NodeCapacity, count_cpus, count_gpus
from study.errors import NO_CLUSTER, counted
from study.store.redaction import token_path

BOOTSTRAP_FILE = Path("/tmp/ray/ray_current_cluster")
"""File in which `ray start` stores the address of this host's cluster."""


class ClusterError(Exception):
    """No cluster, or no access to it. The message is one line: what was tried and how to fix it."""

    exit_code = NO_CLUSTER


@dataclass(frozen=True)
class Cluster:
    """A connected cluster."""

    nodes: list[NodeCapacity]
    description: str
    dashboard_url: str | None
    driver_resource: dict[str, float]
    """Ray resource that pins an actor to this host without using a CPU."""
    log_dir: str
    is_local: bool = False
    """True if this process started Ray, on this host only."""


def is_local(address: str | None) -> bool:
    """Return True if `connect` is certain to start a local Ray. Contacts no cluster."""
    return address == "local" or (address is None and not os.environ.get("RAY_ADDRESS") and not BOOTSTRAP_FILE.exists())


@contextmanager
def connect(address: str | None = None) -> Iterator[Cluster]:
    """Connect to a cluster within a `with` block.

    `address` "local" starts a local Ray, "HOST:PORT" joins that cluster, and "auto" joins the running cluster of this
    host. None means RAY_ADDRESS, else the running cluster of this host, else a local Ray. Raises ClusterError.
    """
    _set_environment()
    import ray

    target = _target(address)
    messages: list[str] = []
    try:
        source = "--address" if address else "RAY_ADDRESS"
        context = _start_local() if target == "local" else _join(target, source, messages)
    except ClusterError:
        raise
    except Exception as error:  # Ray raises bare Exceptions if a node does not start in time
        reason = str(error).strip() or type(error).__name__
        raise ClusterError(_explain(target, reason, "".join(messages))) from error
    try:
        yield _connected(context, target)
    finally:
        ray.shutdown()


def _target(address: str | None) -> str:
    """Return "local" or the HOST:PORT to join. Raises ClusterError if there is no running cluster for "auto"."""
    target = address or os.environ.get("RAY_ADDRESS") or _running_cluster() or "local"
    if target != "auto":
        return target
    running = _running_cluster()
    if running is None:
        raise ClusterError(
            "no running Ray cluster on this host (--address auto); start one with `ray start --head`, or use "
            "--address local"
        )
    return running


def _start_local() -> Any:
    """Start a local Ray and return Ray's context."""
    import ray

    make_token()
    return ray.init(
        address="local",
        num_cpus=count_cpus(),
        num_gpus=count_gpus(),
        include_dashboard=True,  # Ray Train frees a stopped trial's resources through the dashboard's state API
        dashboard_host="127.0.0.1",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _join(address: str, source: str, messages: list[str]) -> Any:
    """Join a running cluster and return Ray's context. Append the output of Ray's native code to `messages`."""
    import ray

    _probe(address, source)
    with _native_messages(messages):
        return ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _connected(context: Any, target: str) -> Cluster:
    import ray

    nodes = alive_nodes()
    driver_address = ray.util.get_node_ip_address()
    name = "a local Ray" if target == "local" else f"the Ray cluster at {target}"
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    size = f"{counted(len(nodes), 'node')}, {counted(gpus, 'GPU')}, {counted(cpus, 'CPU')}"
    url = context.address_info.get("webui_url")
    return Cluster(
        nodes=nodes,
        description=f"{name}: {size}, Ray {ray.__version__}",
        dashboard_url=f"http://{url}" if url else None,
        driver_resource={f"node:{driver_address}": 0.001},
        log_dir=str(Path(context.address_info["session_dir"]) / "logs"),
        is_local=target == "local",
    )


@contextmanager
def _native_messages(messages: list[str]) -> Iterator[None]:
    """Capture stderr, where Ray's native code repeats its messages every second. Print it only if nothing failed."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            messages.append(file.read())
            if not failed:
                sys.stderr.write(messages[-1])


def _explain(address: str, error: str, messages: str) -> str:
    """Return one line on why a reachable cluster cannot be joined, from Ray's error and its native messages."""
    import ray

    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", error)
    if "Version mismatch" in error and versions:
        return (
            f"the Ray cluster at {address} runs Ray {versions[0][0]} on Python {versions[0][1]}, and this process Ray "
            f"{ray.__version__} on Python {platform.python_version()}: install the same requirements.lock, on the same "
            "Python, here and on all nodes"
        )
    copy = (
        "copy ~/.ray/auth_token from the cluster's head to this host (chmod 600), "
        "or set RAY_AUTH_TOKEN to what is in it"
    )
    if "no authentication token was found" in error:
        return f"the Ray cluster at {address} wants a token, and there is none here: {copy}"
    if "InvalidAuthToken" in messages and os.environ.get("RAY_AUTH_MODE") != "token":
        mode = f"RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE')}"
        return f"the Ray cluster at {address} wants a token, and {mode} sends none: export RAY_AUTH_MODE=token"
    if "InvalidAuthToken" in messages:
        source = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else token_path(os.environ)
        return f"the Ray cluster at {address} refuses the token in {source}: {copy}"
    first_line = error.splitlines()[0]
    return (
        f"cannot use the Ray cluster at {address}: {first_line}; check that it runs Ray {ray.__version__}, "
        "and that RAY_AUTH_MODE=token and its token (~/.ray/auth_token) are the cluster's"
    )


def make_token() -> None:
    """Create a token for a local Ray unless there is one. Only its owner can read it, unlike a token of Ray."""
    is_set = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if is_set or os.environ.get("RAY_AUTH_MODE") != "token":
        return
    path = token_path(os.environ)
    with suppress(OSError):  # the file exists, or Ray reports what is wrong with the folder
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def _set_environment() -> None:
    """Set variables that Ray reads when it is imported or started, unless the user has set them."""
    if "ray" not in sys.modules:  # Ray reads it on import; by default only local clusters require a token
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's default of 15 gives every other process of a host priority over the ranks; torchrun's ranks have 0
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else each worker resolves its own environment
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "1")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    # workers import this project, whatever the working directory of the command
    root = str(Path(__file__).resolve().parent.parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)


def _running_cluster() -> str | None:
    """Return the address that `ray start` stored on this host if a cluster answers there, else None."""
    try:
        address = BOOTSTRAP_FILE.read_text().strip()
    except OSError:
        return None
    try:
        _probe(address)
    except ClusterError:
        return None
    return address


def _probe(address: str, source: str = "--address") -> None:
    """Raise ClusterError with the source of the address if it is invalid or if nothing answers there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ClusterError(
            f"{source} {address!r} is not an address; use auto, local or HOST:PORT (port of Ray's GCS, default 6379)"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start it with `ray up cluster.yaml` or "
            "`ray start --head`, or use --address local"
        ) from error


def alive_nodes() -> list[NodeCapacity]:
    """Return the alive nodes in a fixed order, so that a layout always takes the same ones."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(
        (
            NodeCapacity(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in alive
        ),
        key=lambda node: (node.address, node.node_id),
    )
