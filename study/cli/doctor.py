"""What is wrong with this machine or its cluster, and the mend of each trouble."""

import os
import shutil
import socket
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

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
LEAST_SHM_BYTES = GIB
LEAST_DISK_BYTES = 2 * GIB


@dataclass(frozen=True)
class Check:
    """One thing looked at: what was found, whether it is right, and what mends it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


def examine(address: str | None = None) -> list[Check]:
    """All checks, in the order in which to mend what they find. `address` as for a run; a cluster is asked."""
    checks: list[Check] = []
    for look in (versions, gpus, processors, shared_memory, disk, shipped_data, authentication, left_behind):
        checks += look()
    return checks + cluster(address)


# ------------------------------------------------------------------------------------------------------- software


def versions(pyproject: Path = ROOT / "pyproject.toml") -> Iterable[Check]:
    """Python and every package against the ranges that the project declares."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    project = tomllib.loads(pyproject.read_text())["project"]
    python = ".".join(map(str, sys.version_info[:3]))
    wanted = project["requires-python"]
    if SpecifierSet(wanted).contains(python):
        yield Check("python", "ok", python)
    else:
        yield Check(
            "python",
            "fail",
            f"{python}; this project needs {wanted}",
            "make a .venv with such a Python: make clean study",
        )
    wrong, named = [], []
    for requirement in map(Requirement, project["dependencies"]):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.name in ("torch", "ray", "torchvision"):
            named.append(f"{requirement.name} {found}")
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found} is not {requirement.specifier}")
    if wrong:
        yield Check("packages", "fail", "; ".join(wrong), "install requirements.lock again: make study")
    else:
        yield Check("packages", "ok", ", ".join(named))


def shipped_data(sample: Path = ROOT / "trainables" / "data" / "fashion_mnist_sample.parquet") -> Iterable[Check]:
    """Can the images that the project ships be read?"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(sample, columns=["label"]).num_rows
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        yield Check("data sample", "fail", f"{sample} cannot be read: {reason}", "restore the file from the repository")
    else:
        yield Check("data sample", "ok", f"{rows} images in {sample.name}")


# ------------------------------------------------------------------------------------------------------- hardware


def gpus() -> Iterable[Check]:
    """Every GPU by NVML: name, driver, clocks, what throttles it, free memory, links."""
    if trouble := nvml.trouble():
        yield Check("GPUs", "ok", f"none ({trouble}); studies use CPU ranks")
        return
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    narrowed = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    yield Check("GPUs", "ok" if count else "warn", f"{count}, driver {pynvml.nvmlSystemGetDriverVersion()}{narrowed}")
    if count and "+cpu" in _torch_version():
        yield Check(
            "torch build",
            "fail",
            f"torch {_torch_version()} cannot use GPUs",
            "install the CUDA build: make clean study",
        )
    for index in range(count):
        yield from _gpu(index)


def _gpu(index: int) -> Iterable[Check]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    now = nvml.state(pynvml.nvmlDeviceGetUUID(handle))
    most_mhz = nvml.asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
    found = (
        f"{pynvml.nvmlDeviceGetName(handle)}, SM clock {_known(now['sm_clock_mhz'])} of {_known(most_mhz)} MHz, "
        f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    )
    name = f"GPU {index}"
    if memory.free < 0.9 * memory.total:
        yield Check(name, "warn", found, "another process holds its memory and will disturb timings: see nvidia-smi")
    elif now["throttle_reasons"]:
        mend = "cool the GPU or raise its power limit; timings of throttled GPUs drift: nvidia-smi -q -d PERFORMANCE"
        yield Check(name, "warn", f"{found}, throttled: {', '.join(now['throttle_reasons'])}", mend)
    else:
        yield Check(name, "ok", found)
    links = nvml.links(handle)
    width = nvml.asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    generation = nvml.asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    nvlinks = "no NVLink" if links["nvlinks"] is None else f"{links['nvlinks']} NVLinks active"
    if links["nvlink_version"]:
        nvlinks += f" (version {links['nvlink_version']})"
    told = (
        f"PCIe generation {_known(generation)} of {_known(links['pcie_generation'])}, "
        f"x{_known(width)} of x{_known(links['pcie_width'])}, {nvlinks}"
    )
    if width is not None and links["pcie_width"] is not None and width < links["pcie_width"]:
        mend = "a narrow slot or riser halves copies to the GPU: nvidia-smi topo -m"
        yield Check(f"{name} links", "warn", told, mend)
    else:
        yield Check(f"{name} links", "ok", told)


def _known(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "missing"


def processors() -> Iterable[Check]:
    """Cores that this process may use, and whether somebody else is using them."""
    cores, load = count_cpus(), os.getloadavg()[0]
    found = f"{cores} cores, load {load:.1f}"
    if load > 0.5 * cores:
        yield Check("CPU", "warn", found, "something else is running and will disturb timings: see top")
    else:
        yield Check("CPU", "ok", found)


def shared_memory(path: str = "/dev/shm", least_bytes: int = LEAST_SHM_BYTES) -> Iterable[Check]:
    """Loader processes and Ray's object store hand over data there."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        yield Check(
            path,
            "warn",
            f"cannot be asked: {error.strerror}",
            "loader processes need shared memory: mount a tmpfs there",
        )
        return
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < least_bytes:
        yield Check(path, "warn", found, "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm")
    else:
        yield Check(path, "ok", found)


def disk(least_bytes: int = LEAST_DISK_BYTES) -> Iterable[Check]:
    """Room for results here, and for Ray's session files."""
    for path, what in ((Path.cwd(), "results"), (Path("/tmp"), "Ray's session files")):
        usage = shutil.disk_usage(path)
        found = f"{usage.free / GIB:.1f} GiB free for {what} in {path}"
        if usage.free < least_bytes:
            yield Check("disk", "warn", found, f"free some space in {path}, or choose another --out")
        else:
            yield Check("disk", "ok", found)


# -------------------------------------------------------------------------------------------------------- cluster


def authentication() -> Iterable[Check]:
    """Ray's token: which file, and who may read it."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is not None and mode != "token":
        mend = "export RAY_AUTH_MODE=token: without it whoever reaches Ray's ports runs code here"
        yield Check("Ray authentication", "warn", f"RAY_AUTH_MODE={mode}", mend)
        return
    if os.environ.get("RAY_AUTH_TOKEN"):
        yield Check("Ray authentication", "ok", "token from RAY_AUTH_TOKEN")
        return
    path = token_path(os.environ)
    try:
        permissions = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        yield Check("Ray authentication", "ok", f"no token yet in {path}; a local Ray makes one")
        return
    if permissions & 0o077:
        yield Check(
            "Ray authentication",
            "warn",
            f"{path} has mode {permissions:o}: others can read the token",
            f"chmod 600 {path}",
        )
    else:
        yield Check("Ray authentication", "ok", f"token in {path}")


def left_behind(bootstrap: Path | None = None) -> Iterable[Check]:
    """The address that `ray start` left here: does anybody answer?"""
    from study.orchestrate.cluster import BOOTSTRAP_FILE

    path = bootstrap or BOOTSTRAP_FILE
    try:
        address = path.read_text().strip()
    except OSError:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError):
        found = f"{path} names {address or 'nothing'}, where no Ray answers"
        yield Check("stale Ray address", "warn", found, f"ray stop, or rm {path}")


def cluster(address: str | None) -> list[Check]:
    """The cluster that a run would use; it is asked only where there may be one."""
    from study.orchestrate.cluster import ClusterError, connect, is_local

    local = Check("cluster", "ok", "a run starts a local Ray")
    if is_local(address):
        return [local]
    asked = address or os.environ.get("RAY_ADDRESS")
    try:
        with connect(asked or "auto") as found:
            nodes = [f"{node.address} ({node.gpus} GPUs, {node.cpus} CPUs)" for node in found.nodes]
            return [Check("cluster", "ok", f"{found.description}: {', '.join(nodes)}")]
    except ClusterError as error:
        if asked is None:  # what an ended cluster left behind, which is a check of its own
            return [local]
        return [Check("cluster", "fail", str(error), "start the cluster, or give its --address and token")]
