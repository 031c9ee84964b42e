"""Tables of hosts, GPUs and ranks, and caveats about their state."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.predict.inputs import ReportInputs, with_models
from analysis.read.results import load
from analysis.report.sections import TABLES
from analysis.study import analyse
from analysis.tables.environment import _as_ranges
from analysis.verdict.trust import caveats, commits
from tests.support.frames import grid, record, steps, trial_id, write_study, write_trial

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
[SLOWED] = [trial_id(trial) for trial in grid(GPU, world_size=[2])]


def analysed(
    directory: Path, change: Callable[[int, dict[str, Any]], None] = lambda n, e: None, **fields: Any
) -> ReportInputs:
    """Analyse one trial each on 1 and 2 GPUs; `change(world_size, environment)` modifies the recorded environment."""
    write_study(directory)
    for trial in grid(GPU | fields, world_size=[1, 2]):
        content = record(trial)
        change(trial["world_size"], content["environment"])
        write_trial(directory, content, steps(trial, 0.1))
    return with_models(analyse(load(directory)))


def slow_down(world_size: int, environment: dict[str, Any]) -> None:
    """Let the second of two GPUs reach its power limit, so that its clock drops."""
    if world_size == 2:
        environment["ranks"][1]["after"] |= {
            "throttle_reasons": ["power limit"],
            "sm_clock_mhz": 1755,
            "power_w": 700.0,
        }


def test_commits_are_a_caveat_if_the_measuring_code_may_differ(tmp_path: Path) -> None:
    def later(world_size: int, environment: dict[str, Any]) -> None:
        environment["git"]["commit"] = f"{world_size}123abcd"

    def older(world_size: int, environment: dict[str, Any]) -> None:
        later(world_size, environment)
        if world_size == 1:
            del environment["measuring_code"]

    assert commits(analysed(tmp_path / "one")) is None
    assert commits(analysed(tmp_path / "known", later)) is None
    text = commits(analysed(tmp_path / "unknown", older))
    assert text is not None
    assert "2 commits" in text and "1123abcd (1) and 2123abcd (1)" in text


def test_gpus_are_listed_by_uuid_with_ranges_of_readings(tmp_path: Path) -> None:
    def warmer(world_size: int, environment: dict[str, Any]) -> None:
        slow_down(world_size, environment)
        environment["ranks"][0]["after"]["temperature_c"] = 50 + world_size

    cells = TABLES["gpus"](analysed(tmp_path / "results", warmer)).cells()
    assert cells.iloc[0].to_dict() == {
        "host": "node-a0",
        "UUID": "GPU-0-0",
        "GPU": "NVIDIA H200",
        "driver": "570.86",
        "PCIe": "5 x16",
        "NVLinks": "18",
        "NVLink version": "4.0",
        "SM clock before (MHz)": "1,980",
        "SM clock after (MHz)": "1,965",
        "memory clock (MHz)": "3,201",
        "power (W)": "612",
        "temperature (°C)": "51–52",
        "throttled by": "nothing",
        "trials": "2",
    }
    second = cells.iloc[1]
    assert (second["UUID"], second["SM clock after (MHz)"], second["throttled by"]) == (
        "GPU-0-1",
        "1,755",
        "power limit (1)",
    )
    assert second["trials"] == "1"


def test_ranks_have_host_device_and_peak_memory(tmp_path: Path) -> None:
    cells = TABLES["ranks"](analysed(tmp_path / "results")).cells()
    assert cells.to_dict("records") == [
        {
            "rank": str(rank),
            "host": "node-a0",
            "device": f"GPU-0-{rank}",
            "threads": "8",
            "CPU affinity": "0–15",
            "peak allocated (GiB)": "1.38",
            "peak reserved (GiB)": "1.62",
            "trials": str(2 - rank),
        }
        for rank in (0, 1)
    ]


def test_hosts_have_their_load(tmp_path: Path) -> None:
    def busier(world_size: int, environment: dict[str, Any]) -> None:
        environment["ranks"][0]["after"]["load_average_1min"] = 8.0 * world_size

    cells = TABLES["hosts"](analysed(tmp_path / "results", busier)).cells()
    assert cells.to_dict("records") == [
        {
            "host": "node-a0",
            "CPU": "AMD EPYC 9554 64-Core Processor",
            "cores": "16",
            "memory (GiB)": "128",
            "load before": "3.5",
            "load after": "3.5–16.0",
            "trials": "2",
        }
    ]


def test_quiet_trials_have_no_caveats(tmp_path: Path) -> None:
    assert caveats(analysed(tmp_path / "results")) == []


def test_throttled_gpus_and_clock_drops_are_caveats(tmp_path: Path) -> None:
    throttled, dropped = caveats(analysed(tmp_path / "results", slow_down))
    assert throttled.startswith("In 1 of 2 trials") and "power limit (1)" in throttled
    assert dropped.startswith("In 1 of 2 trials") and "from 1,980 to 1,755 MHz" in dropped
    assert all(line.endswith(f" {SLOWED}.") for line in (throttled, dropped))


def test_only_the_first_of_many_throttled_trials_are_named(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "results")
    for trial in grid(GPU, world_size=[2], repeat=range(5)):
        content = record(trial)
        slow_down(2, content["environment"])
        write_trial(directory, content, steps(trial, 0.1))
    [line] = [line for line in caveats(with_models(analyse(load(directory)))) if "throttled" in line]
    assert line.startswith("In 5 of 5 trials") and line.endswith(" and 2 more.")
    assert sum(trial_id(trial) in line for trial in grid(GPU, world_size=[2], repeat=range(5))) == 3


def test_load_above_the_number_of_cores_is_a_caveat(tmp_path: Path) -> None:
    def crowded(world_size: int, environment: dict[str, Any]) -> None:
        environment["ranks"][0]["before"]["load_average_1min"] = 12.0 * world_size

    (line,) = caveats(analysed(tmp_path / "results", crowded))
    assert line.startswith("In 1 of 2 trials the load average") and "24.0 on 16" in line


def test_ranks_with_niceness_are_a_caveat(tmp_path: Path) -> None:
    def nice(world_size: int, environment: dict[str, Any]) -> None:
        environment["ranks"][0]["niceness"] = 15 * (world_size - 1)

    (line,) = caveats(analysed(tmp_path / "results", nice))
    assert line.startswith("In 1 of 2 trials") and "RAY_worker_niceness=0" in line


def test_results_older_than_these_readings_are_shown_with_what_they_have(tmp_path: Path) -> None:
    def forget(world_size: int, environment: dict[str, Any]) -> None:
        for rank in environment["ranks"]:
            for name in ("before", "after", "affinity", "niceness"):
                del rank[name]
        for gpu in environment["nodes"][0]["gpus"]:
            for name in ("pcie_generation", "pcie_width", "nvlinks", "nvlink_version"):
                del gpu[name]

    found = analysed(tmp_path / "results", forget)
    assert list(TABLES["gpus"](found).cells().columns) == ["host", "UUID", "GPU", "driver", "trials"]
    assert list(TABLES["hosts"](found).cells().columns) == ["host", "CPU", "cores", "memory (GiB)", "trials"]
    assert caveats(found) == []


def test_gpus_without_readings_are_listed(tmp_path: Path) -> None:
    def silent(world_size: int, environment: dict[str, Any]) -> None:
        for rank in environment["ranks"]:
            for when in ("before", "after"):
                rank[when] = json.loads(json.dumps(dict.fromkeys(rank[when])))
            rank["gpu_uuid"] = f"MIG-{rank['rank']}"  # NVML lists whole GPUs

    cells = TABLES["gpus"](analysed(tmp_path / "results", silent)).cells()
    assert cells[["UUID", "GPU"]].to_numpy().tolist() == [["MIG-0", "NVIDIA H200"], ["MIG-1", "NVIDIA H200"]]
    assert not {"driver", "throttled by"} & {*cells}


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_ranges_round_trip(cpus: set[int]) -> None:
    text = _as_ranges(cpus)
    assert text is not None
    read: list[int] = []
    for part in text.split(", "):
        low, _, high = part.partition("–")
        read += range(int(low), int(high or low) + 1)
    assert read == sorted(cpus)


@pytest.mark.parametrize(("cpus", "text"), [([], None), ([3], "3"), ([0, 1, 2, 8], "0–2, 8")])
def test_consecutive_cpus_form_ranges(cpus: list[int], text: str | None) -> None:
    assert _as_ranges(cpus) == text


def on_two_nodes(directory: Path, change: Callable[[list[dict[str, Any]]], None]) -> list[str]:
    """Return the caveats of a trial on two nodes whose records `change` has modified."""
    write_study(directory)
    (trial,) = grid(GPU, world_size=[4], nodes=[2])
    content = record(trial)
    change(content["environment"]["nodes"])
    write_trial(directory, content, steps(trial, 0.1))
    return caveats(with_models(analyse(load(directory))))


def test_differing_nodes_are_listed_with_their_differences(tmp_path: Path) -> None:
    def other_kind(nodes: list[dict[str, Any]]) -> None:
        nodes[1] |= {"cpu_count": 8, "memory_bytes": 64 * 2**30}
        for node, version in zip(nodes, ("2.60.0", "2.59.0"), strict=True):
            node["versions"] = {"python": "3.11.9", "ray": version}

    (line,) = on_two_nodes(tmp_path / "results", other_kind)
    assert line.startswith("In 1 of 1 trials")
    assert (
        "(cores: 16 on node-a0 and 8 on node-a1; memory: 128 GiB on node-a0 and 64 GiB on node-a1; "
        "ray: 2.60.0 on node-a0 and 2.59.0 on node-a1)"
    ) in line


def test_slightly_different_memory_is_no_caveat(tmp_path: Path) -> None:
    def a_little_less(nodes: list[dict[str, Any]]) -> None:
        nodes[1]["memory_bytes"] = int(0.97 * nodes[0]["memory_bytes"])

    assert on_two_nodes(tmp_path / "results", a_little_less) == []
