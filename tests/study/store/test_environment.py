"""Recorded environments: names and units of NVML's values, and None for values that it does not provide."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from study.cli import doctor
from study.store import environment, nvml
from study.store.environment import cpu_governor, measuring_code, node_facts, rank_facts, readings

CPU = torch.device("cpu")
UUID = "GPU-8f6c2d1a-0000-4000-8000-000000000001"
OF_GPU = ("sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "power_w", "energy_j", "at", "temperature_c")


def not_supported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def handle_of(uuid: str) -> str:
    return "handle" if uuid == UUID else not_supported()


HOPPER: dict[str, Any] = {
    "nvmlInit": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "580.1",
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: "handle",
    "nvmlDeviceGetHandleByUUID": handle_of,
    "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
    "nvmlDeviceGetUUID": lambda handle: UUID,
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150 * 2**30, free=149 * 2**30),
    "nvmlDeviceGetClockInfo": lambda handle, clock: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x1 | 0x4 | 0x40,
    "nvmlDeviceGetPowerUsage": lambda handle: 701_250,
    "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 86_400_125,
    "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 1,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
    "nvmlDeviceGetNvLinkState": lambda handle, link: int(link != 0) if link < 18 else not_supported(),
    "nvmlDeviceGetNvLinkVersion": lambda handle, link: pynvml.NVML_NVLINK_VERSION_4_0 if link else not_supported(),
}
"""a GPU of 18 NVLinks, the first of which is down, in a slot that gives it 8 of 16 lanes"""


def install(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    for name, answer in (HOPPER | changes).items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.fixture(autouse=True)
def reopened() -> Iterator[None]:
    nvml.initialization_error.cache_clear()
    yield
    nvml.initialization_error.cache_clear()


# ------------------------------------------------------------------------------------------------ without a GPU


def test_a_cpu_rank_reads_only_its_host() -> None:
    read = readings(CPU)
    assert {name: read.pop(name) for name in OF_GPU} == dict.fromkeys(OF_GPU)
    assert read.keys() == {"load_average_1min"}
    assert read["load_average_1min"] >= 0


def test_rank_facts_include_the_allowed_cpus() -> None:
    facts = rank_facts(3, "a", CPU)
    assert facts["affinity"] == sorted(os.sched_getaffinity(0))
    assert (facts["rank"], facts["device"], facts["gpu_uuid"]) == (3, "cpu", None)


def test_without_a_driver_all_gpu_values_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, nvmlInit=not_supported)
    assert nvml.state(UUID) == dict.fromkeys(OF_GPU)
    assert node_facts("a")["gpus"] == []
    [check] = doctor.gpus()
    assert (check.status, check.message) == ("ok", "none (Not Supported); studies use CPU ranks")


# -------------------------------------------------------------------------------------------------- with a GPU


def test_the_state_of_a_gpu_is_in_documented_units(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    started_at = time.time()
    found = nvml.state(UUID)
    assert started_at <= found.pop("at") <= time.time()
    assert found == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "throttle_reasons": ["power limit", "temperature (hardware)"],
        "power_w": 701.25,
        "energy_j": 86_400.125,
        "temperature_c": 61,
    }


def test_the_state_of_an_unknown_uuid_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert nvml.state("GPU-of-another-host") == dict.fromkeys(OF_GPU)


def test_energy_is_in_joules_with_the_time_of_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    started_at = time.time()
    found = nvml.energy(UUID)
    assert found["energy_j"] == 86_400.125
    assert found["at"] is not None and started_at <= found["at"] <= time.time()
    assert nvml.energy("GPU-of-another-host") == nvml.energy(None) == {"energy_j": None, "at": None}


@pytest.mark.parametrize(
    ("function", "unknown"),
    [
        ("nvmlDeviceGetClockInfo", {"sm_clock_mhz", "memory_clock_mhz"}),
        ("nvmlDeviceGetCurrentClocksEventReasons", {"throttle_reasons"}),
        ("nvmlDeviceGetPowerUsage", {"power_w"}),
        ("nvmlDeviceGetTotalEnergyConsumption", {"energy_j", "at"}),
        ("nvmlDeviceGetTemperature", {"temperature_c"}),
    ],
)
def test_unsupported_values_are_none_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, function: str, unknown: set[str]
) -> None:
    install(monkeypatch, **{function: not_supported})
    assert {name for name, value in nvml.state(UUID).items() if value is None} == unknown


def test_only_reasons_that_slow_a_working_gpu_count_as_throttling() -> None:
    assert nvml.throttle_reasons(None) is None
    assert nvml.throttle_reasons(0) == nvml.throttle_reasons(0x1 | 0x2) == []  # idle, and clocks that the owner set
    assert nvml.throttle_reasons(0x4 | 0x40) == ["power limit", "temperature (hardware)"]


def test_node_facts_report_the_maximum_of_each_link(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    [gpu] = environment.node_facts("a")["gpus"]
    assert gpu == {
        "name": "NVIDIA H200",
        "uuid": UUID,
        "driver": "580.1",
        "memory_bytes": 150 * 2**30,
        "pcie_generation": 5,
        "pcie_width": 16,
        "nvlinks": 17,
        "nvlink_version": "4.0",
    }


@pytest.mark.parametrize(
    ("states", "nvlinks"), [(not_supported, None), (lambda handle, link: 0 if link < 18 else not_supported(), 0)]
)
def test_no_nvlink_is_none_and_inactive_nvlinks_are_zero(
    monkeypatch: pytest.MonkeyPatch, states: Any, nvlinks: int | None
) -> None:
    install(monkeypatch, nvmlDeviceGetNvLinkState=states)
    assert nvml.links("handle") == {
        "pcie_generation": 5,
        "pcie_width": 16,
        "nvlinks": nvlinks,
        "nvlink_version": None,
    }


@pytest.mark.parametrize(("code", "version"), [(6, "4.0"), (3, "2.2"), (0, None), (99, None), (None, None)])
def test_nvlink_version_codes_are_converted_to_versions(code: int | None, version: str | None) -> None:
    assert nvml.nvlink_version(code) == version


def test_the_doctor_warns_about_throttling_and_narrow_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    checks = {check.name: check for check in doctor.gpus()}
    assert checks["GPU 0"].status == checks["GPU 0 links"].status == "warn"
    assert checks["GPU 0"].message.endswith("free, throttled: power limit, temperature (hardware)")
    assert checks["GPU 0 links"].message == ("PCIe generation 1 of 5, x8 of x16, 17 NVLinks active (version 4.0)")


def test_comments_and_docstrings_do_not_change_the_digest_of_the_code(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    code = 'STEPS = 10\n\n\ndef window(steps):\n    """Times steps."""\n    return 2 * steps\n'
    reworded = (
        '"""Windows."""\n\nSTEPS = 10\n"""of a window"""\n\n# see below\ndef window(steps):\n    return (2 * steps)\n'
    )
    for folder, text in ((first, code), (second, reworded), (third, code.replace("2 *", "3 *"))):
        folder.mkdir()
        (folder / "windows.py").write_text(text)
    assert measuring_code(first) == measuring_code(second) != measuring_code(third)


def test_moving_modules_does_not_change_the_digest_of_the_code(tmp_path: Path) -> None:
    flat, packages, other = (tmp_path / name / "trainables" for name in "abc")
    timing = "def seconds(first, second):\n    return second - first\n"
    windows = (
        "import time\nfrom trainables.{0}timing import seconds\nfrom trainables.trial import Trial\n"
        'MODEL = "trainables.{0}mlp:mlp"\n\ndef window():\n    return seconds(0, time.time())\n'
    )
    for root, package in ((flat, ""), (packages, "step."), (other, "")):
        folder = root / package.strip(".")
        folder.mkdir(parents=True)
        (folder / "timing.py").write_text(timing if root != other else timing.replace("-", "+"))
        (root / "windows.py").write_text(windows.format(package))
    moved = "from trainables.rules.trial import Trial\n" + windows.format("step.").replace(
        "from trainables.trial import Trial\n", ""
    )
    (packages / "windows.py").write_text(moved)
    assert measuring_code(flat) == measuring_code(packages) != measuring_code(other)


def test_the_governor_of_the_cpu_is_recorded_if_the_system_says_it(tmp_path: Path) -> None:
    assert cpu_governor(tmp_path) is None
    (tmp_path / "scaling_governor").write_text("powersave\n")
    assert cpu_governor(tmp_path) == "powersave"
    assert "cpu_governor" in node_facts("a")
