"""Join the Ray cluster of a study, or start a local one."""

import logging
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.capacity import NodeCapacity, cpus, gpus
from study.errors import counted
from study.orchestrate.discovery.address import ClusterError, Target
from study.orchestrate.discovery.gcs import Say, reachable_target
from study.orchestrate.local_ray import set_environment, start_local, temporary_folder
from study.orchestrate.processes.reaper import reaper
from study.orchestrate.processes.watch import SERVERS, servers_of
from study.plan.placement import ProcessKind, imports
from trainables.trial import Trial


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


@dataclass
class SharedKeeper:
    """A keeper for several runs of trials on one cluster, so that the ranks of one run serve the next one too."""

    stack: ExitStack
    """closes the keeper"""
    actor: Any = None
    """None before the first run"""


def find_cluster(address: str | None, say: Say) -> Target:
    """Return the cluster that a command uses, without joining it. `run`, `plan` and `doctor` all ask here.

    `address` "local" is a local Ray, "HOST:PORT" that cluster, and "auto" the running cluster of this host. None means
    RAY_ADDRESS, else the running cluster of this host, else a local Ray. `say` gets lines about what is being waited
    for. Raises ClusterError.
    """
    set_environment()
    return reachable_target(address, say)


@contextmanager
def connect(
    target: Target | str | None = None, say: Say = lambda line: None, trials: Sequence[Trial] = ()
) -> Iterator[Cluster]:
    """Connect to a cluster within a `with` block; see `find_cluster` for an address. Raises ClusterError.

    trials: those that will run. If Ray starts here, the modules of their ranks are imported meanwhile.
    """
    if not isinstance(target, Target):
        target = find_cluster(target, say)
    set_environment()
    messages: list[str] = []
    with nullcontext({}) if target.address else _server_for(trials) as variables:
        import ray

        with _failures_explained(target):
            context = _join(target.address, messages) if target.address else start_local(variables, say)
        try:
            with nullcontext() if target.address else reaper(context.address_info["session_dir"]):
                with _failures_explained(target):
                    cluster = _connected(context, target)
                yield cluster
        finally:
            ray.shutdown()


def _server_for(trials: Sequence[Trial]) -> AbstractContextManager[dict[str, str]]:
    """Start a process from which ranks of these trials can be forked, if any can. See `offered_server`."""
    from study.orchestrate.processes.fork_server import RANK_MODULES, offered_server  # only a run needs it

    forked = [trial for trial in trials if ProcessKind.of(trial).forks_ranks]
    if not forked:
        return nullcontext({})
    modules, loader_modules = imports(forked)
    return offered_server([*RANK_MODULES, *modules, *(loader_modules or ())], forked[0].cpus_per_rank)


@contextmanager
def _failures_explained(target: Target) -> Iterator[None]:
    """Raise ClusterError, with a line for the user, instead of any other error."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:  # Ray raises bare Exceptions if a node does not start in time
        reason = str(error).strip() or type(error).__name__
        raise ClusterError(_explain(target, reason)) from error


def _join(address: str, messages: list[str]) -> Any:
    """Join a running cluster and return Ray's context. Append the output of Ray's native code to `messages`."""
    import ray

    with _native_messages(messages):
        return ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def _connected(context: Any, target: Target) -> Cluster:
    import ray

    nodes = alive_nodes()
    driver_address = ray.util.get_node_ip_address()
    size = f"{counted(len(nodes), 'node')}, {counted(gpus(nodes), 'GPU')}, {counted(cpus(nodes), 'CPU')}"
    url = context.address_info.get("webui_url")
    return Cluster(
        nodes=nodes,
        description=f"{target}: {size}, Ray {ray.__version__}",
        dashboard_url=f"http://{url}" if url else None,
        driver_resource={f"node:{driver_address}": 0.001},
        log_dir=str(Path(context.address_info["session_dir"]) / "logs"),
        is_local=target.address is None,
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


def _explain(target: Target, error: str) -> str:
    """Return one line on why Ray cannot start here, or cannot join a cluster that answers."""
    import ray

    versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", error)
    if "Version mismatch" in error and versions:
        return (
            f"{target} runs Ray {versions[0][0]} on Python {versions[0][1]}, and this process Ray {ray.__version__} on "
            f"Python {platform.python_version()}; fix: install the same requirements.lock, on the same Python, here "
            "and on all nodes"
        )
    log = "" if target.address else f"; log: {temporary_folder()}/session_latest/logs"
    return f"cannot use {target}: {error.splitlines()[0]}{log}; fix: see python -m study.scaling doctor, then try again"


def has_lost_servers(cluster: Cluster) -> bool:
    """Return True if a server of a local Ray has died. Ray then aborts this process soon."""
    names = {process.name() for process in servers_of(cluster.log_dir)} if cluster.log_dir else set(SERVERS)
    return cluster.is_local and names != set(SERVERS)


def held_resources() -> str:
    """Describe the CPUs and GPUs of the cluster that other jobs hold; empty if there are none. Ask before any trial."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    held = {name: total.get(name, 0) - free.get(name, 0) for name in ("CPU", "GPU")}
    return " and ".join(f"{count:g} of {total[name]:g} {name}s" for name, count in held.items() if count)


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
