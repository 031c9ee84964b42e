"""What a number was measured on: every node, rank and version that took part."""

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

RECORDED_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_NCCL_ENABLE_TIMING",
)
RECORDED_PREFIXES = ("NCCL_", "GLOO_")
"""environment variables worth keeping; all others stay out of results, for they may hold secrets"""


def node_facts(node_id: str) -> dict[str, Any]:
    """The host that this process runs on: CPU, memory, GPUs with UUID and driver."""
    return {
        "node_id": node_id,
        "host": socket.gethostname(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def rank_facts(rank: int, node_id: str, device: Any) -> dict[str, Any]:
    """One rank's device (name and UUID on CUDA, else "cpu") and process."""
    import torch

    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "rank": rank,
        "node_id": node_id,
        "device": properties.name if properties else "cpu",
        "gpu_uuid": f"GPU-{properties.uuid}" if properties else None,
        "pid": os.getpid(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what computes; imports torch."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str that only unpickles where torch is
        "torchvision": metadata.version("torchvision"),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": ".".join(str(part) for part in nccl) if nccl else None,
        "ray": metadata.version("ray"),
    }


def variables() -> dict[str, str]:
    """The recorded environment variables of this process."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in RECORDED_VARIABLES or name.startswith(RECORDED_PREFIXES)
    }


def git_state() -> dict[str, Any]:
    """Commit of this project's checkout and whether it has changes; both None outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[dict[str, Any]]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(
                {
                    "name": pynvml.nvmlDeviceGetName(handle),
                    "uuid": pynvml.nvmlDeviceGetUUID(handle),
                    "driver": driver,
                    "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                }
            )
        return gpus
    finally:
        pynvml.nvmlShutdown()
