"""Query GPUs through NVML. A value that this GPU or driver does not support is None."""

import functools
from collections.abc import Callable
from typing import Any

import pynvml

from trainables.clock import unix_s

THROTTLE_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""bits of NVML's clocks event reasons (nvml.h) that mean throttling; idle and user-set clocks do not"""


@functools.cache
def initialization_error() -> str | None:
    """Initialize NVML once per process. Return the error, or None on success."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return None


def query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function. Return None if this GPU or driver does not support it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def energy(uuid: str | None) -> dict[str, float | None]:
    """Read the energy counter of the GPU with this UUID.

    `energy_j` counts since the driver was loaded. `at` is the time of the reading in seconds since 1970. Both are None
    if the GPU has no counter (before Volta). Two readings give the mean power between them.
    """
    handle = _handle(uuid)
    energy_mj = None if handle is None else query(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    if energy_mj is None:
        return {"energy_j": None, "at": None}
    return {"energy_j": energy_mj / 1000, "at": unix_s()}


def state(uuid: str | None) -> dict[str, Any]:
    """Read clocks, power, energy (see `energy`), temperature and throttle reasons of the GPU with this UUID."""
    handle = _handle(uuid)

    def of_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
        return None if handle is None else query(function, handle, *arguments)

    power_mw = of_gpu(pynvml.nvmlDeviceGetPowerUsage)
    return {
        "sm_clock_mhz": of_gpu(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": of_gpu(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        "throttle_reasons": throttle_reasons(of_gpu(pynvml.nvmlDeviceGetCurrentClocksEventReasons)),
        "power_w": None if power_mw is None else power_mw / 1000,
        **energy(uuid),
        "temperature_c": of_gpu(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    }


def _handle(uuid: str | None) -> Any:
    """Return NVML's handle of a GPU, or None if there is none.

    By UUID, because CUDA_VISIBLE_DEVICES and CUDA's device order make CUDA's indices differ from NVML's.
    """
    return query(pynvml.nvmlDeviceGetHandleByUUID, uuid) if uuid and not initialization_error() else None


def throttle_reasons(mask: int | None) -> list[str] | None:
    """Return the names of the throttle reasons in a bit mask of clocks event reasons."""
    return None if mask is None else [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def links(handle: Any) -> dict[str, Any]:
    """Return the maximum PCIe generation and width of a GPU in its slot, and its active NVLinks.

    The current PCIe values are lower on an idle GPU.
    """
    indices = range(pynvml.NVML_NVLINK_MAX_LINKS)
    states = [query(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in indices]
    active = [link for link in indices if states[link]]
    return {
        "pcie_generation": query(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": query(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "nvlinks": None if set(states) == {None} else len(active),
        "nvlink_version": nvlink_version(query(pynvml.nvmlDeviceGetNvLinkVersion, handle, active[0]))
        if active
        else None,
    }


def nvlink_version(code: int | None) -> str | None:
    """Convert NVML's code of an NVLink version (nvml.h, nvmlNvlinkVersion_t) to a version such as "4.0"."""
    prefix = "NVML_NVLINK_VERSION_"
    names = {getattr(pynvml, name): name.removeprefix(prefix) for name in dir(pynvml) if name.startswith(prefix)}
    name = names.get(code)
    return None if name in (None, "INVALID") else name.replace("_", ".")
