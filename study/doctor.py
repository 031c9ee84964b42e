"""What is wrong with this machine or its cluster, and the mend of each trouble."""

import os
import shutil
import socket
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from study.capacity import count_cpus

ROOT = Path(__file__).resolve().parent.parent
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
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Check("GPUs", "ok", f"none ({error}); studies use CPU ranks")
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        narrowed = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
        yield Check(
            "GPUs", "ok" if count else "warn", f"{count}, driver {pynvml.nvmlSystemGetDriverVersion()}{narrowed}"
        )
        if count and "+cpu" in _torch_version():
            yield Check(
                "torch build",
                "fail",
                f"torch {_torch_version()} cannot use GPUs",
                "install the CUDA build: make clean study",
            )
        for index in range(count):
            yield from _gpu(pynvml, index)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Iterable[Check]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    clock_mhz = _asked(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    most_mhz = _asked(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    reasons = _throttled_by(_asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
    found = (
        f"{nvml.nvmlDeviceGetName(handle)}, SM clock {_known(clock_mhz)} of {_known(most_mhz)} MHz, "
        f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    )
    name = f"GPU {index}"
    if memory.free < 0.9 * memory.total:
        yield Check(name, "warn", found, "another process holds its memory and will disturb timings: see nvidia-smi")
    elif reasons:
        mend = "cool the GPU or raise its power limit; timings of throttled GPUs drift: nvidia-smi -q -d PERFORMANCE"
        yield Check(name, "warn", f"{found}, throttled: {', '.join(reasons)}", mend)
    else:
        yield Check(name, "ok", found)
    width = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    most_width = _asked(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    generation = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))
    nvlinks = _active_nvlinks(nvml, handle)
    links = f"PCIe generation {_known(generation)} x{_known(width)}, " + (
        f"{nvlinks} NVLinks active" if nvlinks is not None else "no NVLink"
    )
    if width is not None and most_width is not None and width < most_width:
        yield Check(
            f"{name} links",
            "warn",
            f"{links}, of x{most_width}",
            "a narrow slot or riser halves copies to the GPU: nvidia-smi topo -m",
        )
    else:
        yield Check(f"{name} links", "ok", links)


def _throttled_by(mask: int | None) -> list[str]:
    """The reasons in NVML's bit mask that slow a working GPU; idle and settings that the owner made are none."""
    named = {
        0x4: "power limit",
        0x8: "hardware slowdown",
        0x20: "temperature (software)",
        0x40: "temperature (hardware)",
        0x80: "power brake",
    }  # nvml.h, nvmlClocksEventReasons
    return [name for bit, name in named.items() if (mask or 0) & bit]


def _active_nvlinks(nvml: Any, handle: Any) -> int | None:
    """Number of NVLinks that are up; None on a GPU without any."""
    states = [
        _asked(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link)) for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    known = [state for state in states if state is not None]
    return sum(known) if known else None


def _asked(nvml: Any, question: Callable[[], Any]) -> Any:
    """NVML's answer, or None where this GPU does not know."""
    try:
        return question()
    except nvml.NVMLError:
        return None


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
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
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
    from study.cluster import BOOTSTRAP_FILE

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
    from study.cluster import ClusterError, connect
    from study.session import is_local

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
