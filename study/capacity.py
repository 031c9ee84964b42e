"""What a machine can hold: nodes with CPUs and GPUs, counted without starting anything."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeCapacity:
    """One host: its identity in the cluster (empty before there is one), address, CPU cores and GPUs."""

    node_id: str
    address: str
    cpus: int
    gpus: int


def count_gpus() -> int:
    """GPUs of this host that a process may use, by NVML; `CUDA_VISIBLE_DEVICES` narrows them. 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = None if visible is None else len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    if named == 0:
        return 0
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        there = int(pynvml.nvmlDeviceGetCount())
        return there if named is None else min(named, there)
    finally:
        pynvml.nvmlShutdown()


def count_cpus() -> int:
    """CPU cores that this process may run on: its affinity, not the machine's number."""
    return len(os.sched_getaffinity(0))


def local_capacity() -> list[NodeCapacity]:
    """This host as the only node."""
    return [NodeCapacity(node_id="", address=socket.gethostname(), cpus=count_cpus(), gpus=count_gpus())]


Capacity = Sequence[NodeCapacity]


# ------------------------------------------------------------------------------------------------------ what fits


def default_cpus_per_rank(device: str, capacity: Capacity) -> int:
    """One core for a CPU rank; for a GPU its share of its node's cores, the smallest share in the cluster."""
    shares = [node.cpus // node.gpus for node in capacity if node.gpus]
    return max(1, min(shares, default=1)) if device == "cuda" else 1
