"""What the driver's own library says about a GPU. Whatever it does not say on this GPU or driver is None."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pynvml

SLOWED_BY = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""bits of NVML's clocks event reasons (nvml.h) that slow a working GPU; idle and settings that the owner made do not"""


@functools.cache
def trouble() -> str | None:
    """Why there is no driver to ask, or None. Opens the library, once for the life of this process."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return None


def asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """The library's answer to one of its functions, or None where this GPU or driver does not know."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def energy(uuid: str | None) -> dict[str, float | None]:
    """The energy counter of the GPU with this UUID.

    `energy_j` counts since the driver was loaded; `at` is when it was read, in seconds since 1970: both None where the
    driver does not say, as before Volta. Two readings give the mean power between them.
    """
    handle = _handle(uuid)
    energy_mj = None if handle is None else asked(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    if energy_mj is None:
        return {"energy_j": None, "at": None}
    return {"energy_j": energy_mj / 1000, "at": time.time()}


def state(uuid: str | None) -> dict[str, Any]:
    """Clocks, power, energy (see `energy`) and temperature of the GPU with this UUID right now, and the names of what
    slows it down."""
    handle = _handle(uuid)

    def of_gpu(question: Callable[..., Any], *arguments: Any) -> Any:
        return None if handle is None else asked(question, handle, *arguments)

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
    """What NVML knows a GPU by; None where there is none. By UUID, for CUDA_VISIBLE_DEVICES and CUDA's own order make its
    numbers others than NVML's."""
    return asked(pynvml.nvmlDeviceGetHandleByUUID, uuid) if uuid and not trouble() else None


def throttle_reasons(mask: int | None) -> list[str] | None:
    """The names of `SLOWED_BY` in a bit mask of clocks event reasons."""
    return None if mask is None else [name for bit, name in SLOWED_BY.items() if mask & bit]


def links(handle: Any) -> dict[str, Any]:
    """PCIe generation and width, at most, of a GPU in its slot (idle ones step down), and its NVLinks that are up."""
    every = range(pynvml.NVML_NVLINK_MAX_LINKS)
    states = [asked(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in every]
    up = [link for link in every if states[link]]
    return {
        "pcie_generation": asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width": asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "nvlinks": None if set(states) == {None} else len(up),
        "nvlink_version": nvlink_version(asked(pynvml.nvmlDeviceGetNvLinkVersion, handle, up[0])) if up else None,
    }


def nvlink_version(code: int | None) -> str | None:
    """A version such as "4.0" from NVML's own number of it (nvml.h, nvmlNvlinkVersion_t)."""
    prefix = "NVML_NVLINK_VERSION_"
    names = {getattr(pynvml, name): name.removeprefix(prefix) for name in dir(pynvml) if name.startswith(prefix)}
    name = names.get(code)
    return None if name in (None, "INVALID") else name.replace("_", ".")
