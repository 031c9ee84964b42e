"""Describe the environment of a measurement: nodes, ranks, versions, environment variables and code."""

import ast
import contextlib
import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pynvml

from study.store import nvml

RECORDED_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE",
    "TORCH_NCCL_ENABLE_TIMING",
)
RECORDED_PREFIXES = ("NCCL_", "GLOO_")
"""environment variables to record; all others may contain secrets"""

OPTIONAL_LIBRARIES = {"nvimagecodec": "nvidia-nvimgcodec-cu13", "torchcodec": "torchcodec", "torchao": "torchao"}
"""optional packages that decode JPEG (`trainables/data/images/gpu/jpeg.py`) or multiply in fp8"""

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINABLES = ROOT / "trainables"


def node_facts(node_id: str) -> dict[str, Any]:
    """Describe the host of this process: operating system, CPU and its governor, memory, GPUs with UUID and driver."""
    return {
        "node_id": node_id,
        "host": socket.gethostname(),
        "os": operating_system(),
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "cpu_governor": cpu_governor(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def rank_facts(rank: int, node_id: str, device: Any) -> dict[str, Any]:
    """Describe a rank's device (name and UUID on CUDA, else "cpu") and process (allowed CPUs, niceness)."""
    import torch

    return {
        "rank": rank,
        "node_id": node_id,
        "device": torch.cuda.get_device_properties(device).name if device.type == "cuda" else "cpu",
        "gpu_uuid": _uuid(device),
        "pid": os.getpid(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
    }


def readings(device: Any) -> dict[str, Any]:
    """Read the current state of a rank's GPU and host. GPU values are None on CPU ranks or if the driver has none.

    `load_average_1min` counts running and waiting processes, including the study's own (getloadavg(3)).
    """
    return nvml.state(_uuid(device)) | {"load_average_1min": os.getloadavg()[0]}


def energies(devices: Sequence[Any]) -> list[dict[str, float | None]]:
    """Read the energy counter of each GPU, with the time of the reading. None on CPUs."""
    return [nvml.energy(_uuid(device)) for device in devices]


def package_versions() -> dict[str, str]:
    """Return the versions of the packages installed on the driver's host, without importing them."""
    installed = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "ray", "numpy", "pandas", "pyarrow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that ranks compute with. Imports torch."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a str subclass, which needs torch to unpickle
        "torchvision": metadata.version("torchvision"),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": ".".join(str(part) for part in nccl) if nccl else None,
        "cudnn": str(cudnn) if cudnn else None,
        "ray": _version("ray"),
    } | {name: _version(package) for name, package in OPTIONAL_LIBRARIES.items() if _version(package)}


def variables() -> dict[str, str]:
    """Return the recorded environment variables of this process."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in RECORDED_VARIABLES or name.startswith(RECORDED_PREFIXES)
    }


def git_state() -> dict[str, Any]:
    """Return the commit of this checkout, and whether it has changes. Both are None outside a checkout."""

    def git(*arguments: str) -> str | None:
        try:
            completed = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return completed.stdout.strip() if completed.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def operating_system() -> str:
    """Return distribution and kernel, as in "Debian GNU/Linux 12 (bookworm), Linux 6.1.0"."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def lock_file(path: Path = ROOT / "requirements.lock") -> str | None:
    """Return a digest of the lock file, which pins every dependency. None if it is missing."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def measuring_code(root: Path = TRAINABLES) -> str:
    """Return a digest of the modules that ranks run. Equal digests mean equal measured code, even across commits.

    Comments, docstrings, formatting and the paths of modules do not change it.
    """
    modules = sorted(_code_of(file.read_text(), f"{root.name}.") for file in root.rglob("*.py"))
    return hashlib.sha256("\0".join(modules).encode()).hexdigest()[:12]


def _code_of(text: str, package: str) -> str:
    """Return a module's code without docstrings and without the paths of modules in `package` ("trainables.")."""
    tree = ast.parse(text)
    imported: list[str] = []
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [part for part in statements if not _is_text(part)])
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(package):
            imported += map(ast.unparse, node.names)
            node.module, node.names = package, []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(package):
            node.value = node.value.rpartition(".")[2]
    lines = [line for line in ast.unparse(tree).splitlines() if line.strip() != f"from {package} import"]
    return "\n".join([*lines, *sorted(imported)])


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cpu_governor(folder: Path = Path("/sys/devices/system/cpu/cpu0/cpufreq")) -> str | None:
    """Return what chooses the clock of the CPU, such as "powersave", which slows down steps that the host bounds.

    None if the system does not say, as in most virtual machines.
    """
    with contextlib.suppress(OSError):
        return (folder / "scaling_governor").read_text().strip()
    return None


def _uuid(device: Any) -> str | None:
    """Return the UUID that identifies a GPU in both CUDA and NVML, or None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _gpus() -> list[dict[str, Any]]:
    if nvml.initialization_error():
        return []
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
            | nvml.links(handle)
        )
    return gpus


def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed: one-rank benchmarks need no Ray."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
