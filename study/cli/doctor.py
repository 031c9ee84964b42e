"""HealthCheck this machine and its cluster, and suggest a fix for each problem."""

import os
import shutil
import stat
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import pynvml

from study.capacity import count_cpus
from study.store import nvml
from study.store.redaction import token_path
from trainables.scratch import leftovers, user_folder

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
MIN_SHM_BYTES = GIB
MIN_DISK_BYTES = 2 * GIB
MOST_TEMPORARY_BYTES = GIB // 4


@dataclass(frozen=True)
class HealthCheck:
    """The result of one check, with a fix if there is a problem."""

    name: str
    status: Literal["ok", "warn", "fail"]
    message: str
    fix: str = ""

    @property
    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "found": self.message, "fix": self.fix}


def examine(address: str | None = None) -> list[HealthCheck]:
    """Run all checks, in the order in which to fix problems. `address` selects the cluster, as for a run."""
    results: list[HealthCheck] = []
    for check in (versions, gpus, processors, shared_memory, disk, temporary_files, shipped_data, authentication):
        results += check()
    return results + cluster(address)


# ------------------------------------------------------------------------------------------------------- software


def versions(pyproject: Path = ROOT / "pyproject.toml") -> Iterable[HealthCheck]:
    """Compare the versions of Python and of every package with the ranges in pyproject.toml."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads(pyproject.read_text())["project"]
    python = ".".join(map(str, sys.version_info[:3]))
    required = project["requires-python"]
    if SpecifierSet(required).contains(python):
        yield HealthCheck("python", "ok", python)
    else:
        yield HealthCheck(
            "python",
            "fail",
            f"{python}; this project requires {required}",
            "create the .venv with that version of Python: make clean study",
        )
    problems, main_packages = [], []
    for requirement in map(Requirement, project["dependencies"]):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if requirement.name in ("torch", "ray", "torchvision"):
            main_packages.append(f"{requirement.name} {installed}")
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    if problems:
        yield HealthCheck("packages", "fail", "; ".join(problems), "reinstall requirements.lock: make study")
    else:
        yield HealthCheck("packages", "ok", ", ".join(main_packages))


def shipped_data(sample: Path = ROOT / "trainables" / "data" / "fashion_mnist_sample.parquet") -> Iterable[HealthCheck]:
    """HealthCheck that the sample images in the repository can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(sample, columns=["label"]).num_rows
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        yield HealthCheck(
            "data sample", "fail", f"{sample} cannot be read: {reason}", "restore the file from the repository"
        )
    else:
        yield HealthCheck("data sample", "ok", f"{rows} images in {sample.name}")


# ------------------------------------------------------------------------------------------------------- hardware


def gpus() -> Iterable[HealthCheck]:
    """Query every GPU through NVML: name, driver, clocks, throttling, free memory, links."""
    if error := nvml.initialization_error():
        yield HealthCheck("GPUs", "ok", f"none ({error}); studies use CPU ranks")
        return
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    restriction = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    yield HealthCheck(
        "GPUs", "ok" if count else "warn", f"{count}, driver {pynvml.nvmlSystemGetDriverVersion()}{restriction}"
    )
    if count and "+cpu" in _torch_version():
        yield HealthCheck(
            "torch build",
            "fail",
            f"torch {_torch_version()} cannot use GPUs",
            "install the CUDA build of torch: make clean study",
        )
    for index in range(count):
        yield from _gpu(index)


def _gpu(index: int) -> Iterable[HealthCheck]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    now = nvml.state(pynvml.nvmlDeviceGetUUID(handle))
    max_mhz = nvml.query(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
    message = (
        f"{pynvml.nvmlDeviceGetName(handle)}, SM clock {_known(now['sm_clock_mhz'])} of {_known(max_mhz)} MHz, "
        f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    )
    name = f"GPU {index}"
    if memory.free < 0.9 * memory.total:
        yield HealthCheck(
            name, "warn", message, "stop the process that uses its memory, which disturbs timings: nvidia-smi"
        )
    elif now["throttle_reasons"]:
        fix = "cool the GPU or raise its power limit; timings drift while throttled: nvidia-smi -q -d PERFORMANCE"
        yield HealthCheck(name, "warn", f"{message}, throttled: {', '.join(now['throttle_reasons'])}", fix)
    else:
        yield HealthCheck(name, "ok", message)
    links = nvml.links(handle)
    width = nvml.query(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    generation = nvml.query(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    nvlinks = "no NVLink" if links["nvlinks"] is None else f"{links['nvlinks']} NVLinks active"
    if links["nvlink_version"]:
        nvlinks += f" (version {links['nvlink_version']})"
    message = (
        f"PCIe generation {_known(generation)} of {_known(links['pcie_generation'])}, "
        f"x{_known(width)} of x{_known(links['pcie_width'])}, {nvlinks}"
    )
    if width is not None and links["pcie_width"] is not None and width < links["pcie_width"]:
        fix = "move the GPU to a full-width slot; a narrow link slows copies to the GPU: nvidia-smi topo -m"
        yield HealthCheck(f"{name} links", "warn", message, fix)
    else:
        yield HealthCheck(f"{name} links", "ok", message)


def _known(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "missing"


def processors() -> Iterable[HealthCheck]:
    """Compare the load of this host with the cores that this process may use."""
    cores, load = count_cpus(), os.getloadavg()[0]
    message = f"{cores} cores, load {load:.1f}"
    if load > 0.5 * cores:
        yield HealthCheck("CPU", "warn", message, "stop other processes, which disturb timings: top")
    else:
        yield HealthCheck("CPU", "ok", message)


def shared_memory(path: str = "/dev/shm", min_bytes: int = MIN_SHM_BYTES) -> Iterable[HealthCheck]:
    """HealthCheck the space in shared memory, which loader processes and Ray's object store use."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield HealthCheck(
            path,
            "warn",
            f"cannot be read: {error.strerror}",
            "mount a tmpfs there; loader processes need shared memory",
        )
        return
    message = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < min_bytes:
        yield HealthCheck(
            path, "warn", message, "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        )
    else:
        yield HealthCheck(path, "ok", message)


def disk(min_bytes: int = MIN_DISK_BYTES) -> Iterable[HealthCheck]:
    """HealthCheck the disk space for results in the current folder, and for Ray's session files."""
    for path, purpose in ((Path.cwd(), "results"), (Path("/tmp"), "Ray's session files")):
        usage = shutil.disk_usage(path)
        message = f"{usage.free / GIB:.1f} GiB free for {purpose} in {path}"
        if usage.free < min_bytes:
            yield HealthCheck("disk", "warn", message, f"free some space in {path}, or choose another --out")
        else:
            yield HealthCheck("disk", "ok", message)


def temporary_files(most_bytes: int = MOST_TEMPORARY_BYTES) -> Iterable[HealthCheck]:
    """HealthCheck the size of what studies of this user have left in the temporary folder."""
    from analysis.text import size

    found = leftovers()
    message = f"{size(sum(leftover.size_bytes for leftover in found))} of studies in {user_folder()}"
    unused_bytes = sum(leftover.size_bytes for leftover in found if not leftover.needed_by)
    if unused_bytes > most_bytes:
        yield HealthCheck("temporary files", "warn", message, "python -m study.scaling clean")
    else:
        yield HealthCheck("temporary files", "ok", message)


# -------------------------------------------------------------------------------------------------------- cluster


def authentication() -> Iterable[HealthCheck]:
    """HealthCheck which file holds Ray's token, and that only its owner can read it."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None and mode != "token":
        fix = "export RAY_AUTH_MODE=token; without it, anyone who reaches Ray's ports can run code here"
        yield HealthCheck("Ray authentication", "warn", f"RAY_AUTH_MODE={mode}", fix)
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield HealthCheck("Ray authentication", "ok", "token from RAY_AUTH_TOKEN")
        return
    path = token_path(os.environ)
    try:
        permissions = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        yield HealthCheck("Ray authentication", "ok", f"no token in {path} yet; a local Ray creates one")
        return
    if permissions & 0o077:
        yield HealthCheck(
            "Ray authentication",
            "warn",
            f"other users can read the token in {path} (mode {permissions:o})",
            f"chmod 600 {path}",
        )
    else:
        yield HealthCheck("Ray authentication", "ok", f"token in {path}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cluster(address: str | None) -> list[HealthCheck]:
    """Find the cluster that a run would use, in the same way, and join it."""
    from study.orchestrate.cluster import connect, find_cluster
    from study.orchestrate.discovery.address import ClusterError

    try:
        target = find_cluster(address, say)
        if target.address is None:
            local = HealthCheck("cluster", "ok", "none; a run starts a local Ray")
            ignored = HealthCheck("Ray address", "warn", target.ignored, target.ignored_fix)
            return [ignored, local] if target.ignored else [local]
        with connect(target) as connection:
            nodes = [f"{node.address} ({node.gpus} GPUs, {node.cpus} CPUs)" for node in connection.nodes]
            return [HealthCheck("cluster", "ok", f"{connection.description}: {', '.join(nodes)}")]
    except ClusterError as error:
        message, _, fix = str(error).partition("; fix: ")
        return [HealthCheck("cluster", "fail", message, fix or "give the --address of a cluster")]
