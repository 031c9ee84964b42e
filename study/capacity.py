"""CPUs and GPUs per node, counted without starting Ray or CUDA."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeCapacity:
    """One host: its node id in Ray (empty without a cluster), address, CPU cores and GPUs."""

    node_id: str
    address: str
    cpus: int
    gpus: int


def count_gpus() -> int:
    """Return the number of GPUs of this host by NVML, limited by `CUDA_VISIBLE_DEVICES`. Return 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = None if visible is None else len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    if limit == 0:
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        return count if limit is None else min(limit, count)
    finally:
        pynvml.nvmlShutdown()


def count_cpus() -> int:
    """Return the number of CPU cores in this process' affinity mask, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def local_capacity() -> list[NodeCapacity]:
    """Return this host as the only node."""
    return [NodeCapacity(node_id="", address=socket.gethostname(), cpus=count_cpus(), gpus=count_gpus())]


Capacity = Sequence[NodeCapacity]


def cpus(capacity: Capacity) -> int:
    """Return the number of CPU cores of all nodes."""
    return sum(node.cpus for node in capacity)


def gpus(capacity: Capacity) -> int:
    """Return the number of GPUs of all nodes."""
    return sum(node.gpus for node in capacity)


def default_cpus_per_rank(device: str, capacity: Capacity) -> int:
    """Return the CPU cores per rank: for GPUs the smallest share of cores per GPU in the cluster, else 1."""
    shares = [node.cpus // node.gpus for node in capacity if node.gpus]
    return max(1, min(shares, default=1)) if device == "cuda" else 1
