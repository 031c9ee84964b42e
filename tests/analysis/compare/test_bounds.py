"""Bottlenecks of a step: every region on a configuration that it bounds and on one that it does not."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare.bottleneck import (
    REGIONS,
    WORDS,
    faster_compute,
    fewer_launches,
    gain_rows,
    larger_compute,
    largest_gain,
    regions,
    removable,
    removed_words,
)
from analysis.compare.communication import Communication
from analysis.measure.communication import BREAKDOWN_COLUMNS
from analysis.measure.measures import HOST_BOUND_STEP_SHARE, summarise
from analysis.read.results import load
from analysis.read.schema import PHASES
from analysis.report.report import write_report
from analysis.study import analyse
from analysis.text import telling_fields
from analysis.verdict.answer import growth
from analysis.verdict.bottleneck import bounds
from analysis.verdict.trust import without_throughput
from tests.support.frames import grid, record, steps, trial_id, write_results, write_study, write_trial
from trainables.registry import PARALLEL

EMPTY = pd.DataFrame()


def configuration(**changes: Any) -> tuple[pd.DataFrame, Communication]:
    """100 ms on two ranks: 5 ms load, 2 ms copy, 90 ms kernels, 4 ms exposed wire, 2 ms exposed wait."""
    row = dict.fromkeys(PHASES, 0.0) | {
        "load_wait_s": 0.005, "host_to_device_s": 0.002, "forward_s": 0.03, "backward_s": 0.055, "optimizer_s": 0.008,
        "phases_step_s": 0.1, "step_s": 0.1, "busy_s": 0.087, "host_bound": False, "world_size": 2,
        "exposed_wire_s": 0.004, "exposed_wait_s": 0.002, "communication_step_s": 0.1,
    } | changes  # fmt: skip
    row.setdefault("longest_load_wait_s", row["load_wait_s"])
    result = pd.DataFrame([row])
    exposed = result.reindex(columns=[*BREAKDOWN_COLUMNS, "difference_s"])
    own = ["exposed_wire_s", "exposed_wait_s", "communication_step_s", "difference_s", "synchronised_step_s", "traced"]
    return result.drop(columns=own, errors="ignore"), Communication(
        EMPTY, exposed, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, pd.Series(dtype=float)
    )


def bound(**changes: Any) -> Any:
    return regions(*configuration(**changes))["bound"].iloc[0]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    shares = regions(*configuration())[list(REGIONS)].iloc[0]
    assert shares.sum() == pytest.approx(1)
    assert shares.to_dict() == pytest.approx(
        {
            "host": 0,
            "load": 0.05,
            "transfer": 0.02,
            "wire": 0.04,
            "wait": 0.02,
            "contention": 0,
            "idle": 0,
            "compute": 0.87,
        }
    )


def test_shares_of_communication_refer_to_a_step_of_its_window() -> None:
    # 0.3 s of a step of 0.4 s, but a plain step takes 0.1 s: the transfers of a socket vary
    slower = {"exposed_wire_s": 0.3, "exposed_wait_s": 0.0, "communication_step_s": 0.4}
    shares = regions(*configuration(**slower)).iloc[0]
    assert shares["wire"] == pytest.approx(0.75)
    assert largest_gain(shares["wire"]) == pytest.approx(4)


LOADING = {
    "load_wait_s": 0.3,
    "forward_s": 0.2,
    "backward_s": 0.4,
    "optimizer_s": 0.1,
    "busy_s": 0.8,
    "step_s": 1.0,
    "phases_step_s": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "compute"),
        (LOADING, "load"),
        (LOADING | {"load_wait_s": 0.05}, "compute"),
        (LOADING | {"load_wait_s": 0.05, "host_to_device_s": 0.25}, "transfer"),
        ({"exposed_wire_s": 0.03}, "wire"),
        ({"exposed_wire_s": 0.015}, "compute"),
        ({"exposed_wait_s": 0.03}, "wait"),
        ({"exposed_wait_s": 0.015, "exposed_wire_s": 0.001}, "compute"),
        ({"host_bound": True}, "host"),
        ({"host_bound": True, "busy_s": None, "load_wait_s": 0.05}, "host"),
        ({"host_bound": None}, "compute"),
        (LOADING | {"host_bound": True, "busy_s": 0.5}, "load"),
        (LOADING | {"host_bound": True, "busy_s": 0.1}, "host"),
        ({"busy_s": 0.6e-1}, "idle"),
        ({"busy_s": 0.7e-1}, "compute"),
        ({"busy_s": None}, "compute"),
        ({"world_size": 1, "exposed_wire_s": None, "exposed_wait_s": None}, "compute"),
        ({"phases_step_s": None}, None),
    ],
)
def test_a_region_bounds_a_step_only_if_its_rule_applies(changes: dict[str, Any], expected: str | None) -> None:
    assert bound(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        (LOADING, [66]),
        (LOADING | {"load_wait_s": 0.15, "longest_load_wait_s": 0.15, "host_to_device_s": 0.1}, [26, 69]),
        ({"host_bound": True}, [87]),
    ],
)
def test_a_bound_that_takes_less_than_compute_states_the_share_of_compute(
    changes: dict[str, Any], expected: list[int]
) -> None:
    shares = regions(*configuration(**changes)).iloc[0]
    assert [int(value) for value in re.findall(r"(\d+)\s%", larger_compute(shares))] == expected


def test_the_host_share_is_the_idle_time_of_the_device_and_the_wait_for_other_hosts() -> None:
    shares = regions(*configuration(host_bound=True, busy_s=0.047)).iloc[0]
    assert shares["host"] == pytest.approx(1 - 0.47 - 0.05 - 0.02 - 0.04)
    assert shares["wait"] == 0
    assert shares[list(REGIONS)].astype(float).sum() == pytest.approx(1)
    assert pd.isna(regions(*configuration(host_bound=True, busy_s=None))["host"].iloc[0])


def test_compute_is_at_most_its_kernel_time() -> None:
    shares = regions(*configuration(busy_s=0.047)).iloc[0]
    assert shares["compute"] == pytest.approx(0.47)
    assert shares["idle"] == pytest.approx(1 - 0.47 - 0.05 - 0.02 - 0.04 - 0.02)


def test_a_step_that_communication_lengthens_beyond_its_exposed_part_computes_more_slowly() -> None:
    # 25 ms longer than without communication, of which 6 ms are exposed; 8 ms more are without a measured cause
    slowed = {"busy_s": 0.06, "difference_s": 0.025, "synchronised_step_s": 0.1}
    shares = regions(*configuration(**slowed)).iloc[0]
    assert shares["contention"] == pytest.approx(0.25 - 0.06)
    assert shares["idle"] == pytest.approx(1 - 0.6 - 0.05 - 0.02 - 0.06 - 0.19)
    assert bound(**slowed) == "contention"
    assert regions(*configuration(**slowed, traced=True))["contention"].iloc[0] == 0
    assert regions(*configuration(**slowed | {"busy_s": 0.087}))["contention"].iloc[0] == pytest.approx(0)


def test_gradients_that_need_no_transfer_slow_nothing_down() -> None:
    slowed = {"busy_s": 0.06, "difference_s": 0.025, "synchronised_step_s": 0.1}
    shares = regions(*configuration(**slowed))
    parts = removable(shares).iloc[0]
    assert parts["wire"] == pytest.approx(0.04 + 0.19)
    assert parts.to_dict().keys() == {"host", "load", "transfer", "wire", "wait", "idle"}
    assert parts.sum() + shares["compute"].iloc[0] == pytest.approx(1)
    assert removed_words("wire", shares.iloc[0]) != WORDS["wire"].takes
    assert removed_words("wire", regions(*configuration()).iloc[0]) == WORDS["wire"].takes


@pytest.mark.parametrize(
    ("changes", "is_partial"),
    [
        ({}, True),
        ({"difference_s": 0.025, "synchronised_step_s": 0.1}, False),
        ({"difference_s": 0.025, "synchronised_step_s": 0.1, "traced": True}, True),
    ],
)
def test_a_bound_without_a_step_free_of_communication_covers_what_is_exposed_only(
    changes: dict[str, Any], is_partial: bool
) -> None:
    configurations, traffic = configuration(**changes)
    rows = gain_rows(regions(configurations, traffic), pd.DataFrame(), configurations, 0, ("GPU", "GPUs"))
    partial = rows.set_index("change")["is_partial"].to_dict()
    assert partial[f"no {WORDS['wire'].takes}"] is is_partial
    assert not any(value for name, value in partial.items() if name != f"no {WORDS['wire'].takes}")
    alone = regions(*configuration(exposed_wire_s=None, exposed_wait_s=None, world_size=1))
    assert not alone["slower_unknown"].iloc[0]


def test_communication_slows_compute_at_most_as_far_as_the_step_is_longer_than_on_one_rank() -> None:
    configurations, traffic = configuration(busy_s=0.06, difference_s=0.025, synchronised_step_s=0.1)
    for reference, growth_s, contention in ((1, 0.01, 0.04), (1, 0.004, 0.0), (2, 0.004, 0.19)):
        pairs = [{"configuration": 0, "reference_world_size": reference, "growth_s": growth_s}]
        shares = regions(configurations, replace(traffic, slowdown=pd.DataFrame(pairs))).iloc[0]
        assert shares["contention"] == pytest.approx(contention), "0.06 of the step is exposed"
        assert shares[list(REGIONS)].astype(float).sum() == pytest.approx(1)


def test_unmeasured_communication_is_unknown_on_several_ranks_and_zero_on_one() -> None:
    several = regions(*configuration(exposed_wire_s=None, exposed_wait_s=None)).iloc[0]
    assert pd.isna(several["wire"])
    one = regions(*configuration(exposed_wire_s=None, exposed_wait_s=None, world_size=1)).iloc[0]
    assert one["wire"] == 0


def test_the_largest_gain_follows_amdahls_law() -> None:
    assert largest_gain(0.5) == 2
    assert largest_gain(0.0) == 1
    assert largest_gain(1.0) == float("inf")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (
            (0.0, 0.4, 0.2, 0.02, 0.3, 0.08),
            (WORDS["transfer"].label, "takes 40\u00a0% of a step", WORDS["transfer"].change, "at most 1.67x"),
        ),
        (
            (0.1, 0.0, 0.3, 0.02, 0.5, 0.08),
            (WORDS["compute"].label, "take 86\u00a0% of a step", f"{WORDS['load'].takes}, 10\u00a0%", "at most 1.11x"),
        ),
    ],
)
def test_the_verdict_says_what_would_help_and_how_much_at_most(
    tmp_path: Path, shares: tuple[float, ...], expected: tuple[str, ...]
) -> None:
    trials = grid({"device": "cuda", "steps": 4, "cpus_per_rank": 8})
    analysis = analyse(load(write_results(tmp_path / "r", trials, lambda _: {"step_s": 0.1, "shares": shares})))
    text = bounds(analysis) or ""
    assert [part for part in expected if part not in text] == []


def test_parts_that_exceed_a_step_are_scaled_down_to_it() -> None:
    longer = {"load_wait_s": 0.1, "exposed_wire_s": 0.06, "exposed_wait_s": 0.0, "communication_step_s": 0.05}
    shares = regions(*configuration(**longer)).iloc[0][list(REGIONS)].astype(float)
    assert shares.sum() == pytest.approx(1)
    assert shares["compute"] == 0


def test_a_part_that_takes_the_whole_step_has_no_upper_bound_in_any_output(tmp_path: Path) -> None:
    # Steps of a tiny script on two processes that share a core, nearly all of which is waiting for a batch.
    trials = grid({"device": "cpu", "steps": 4}, batch_per_gpu=[16, 32])
    waiting = {"step_s": 0.01, "shares": (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)}
    folder = write_results(tmp_path / "r", trials, lambda _: waiting)
    analysis = analyse(load(folder))
    assert math.isinf(largest_gain(float(analysis.regions["load"].max())))
    assert "no upper bound" in (bounds(analysis) or "")
    report = write_report(folder)
    lines = {line["key"]: line for line in json.loads((Path(report.path).parent / "card.json").read_text())["lines"]}
    assert "no upper bound" in lines["do_next"]["text"]
    assert lines["do_next"]["quantities"][0]["value"] is None


GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
BUSY = (0.0, 0.05, 0.3, 0.05, 0.5, 0.1)


def test_with_several_workloads_no_configuration_is_the_fastest(tmp_path: Path) -> None:
    trials = grid(GPU, model=["resnet18", "resnet50"])
    found = analyse(load(write_results(tmp_path / "r", trials, lambda _: {"step_s": 0.1, "shares": BUSY})))
    assert bounds(found) == f"Both configurations are bound by {WORDS['compute'].label}."


def test_unexplained_idle_time_is_not_suggested_as_a_change(tmp_path: Path) -> None:
    trials = grid(GPU, batch_per_gpu=[8, 64])
    shape = {8: {"busy_ratio": 0.2, "launch_ratio": 0.1}, 64: {"busy_ratio": 1.0}}
    result = analyse(
        load(
            write_results(
                tmp_path / "r", trials, lambda trial: {"step_s": 0.1, "shares": BUSY, **shape[trial["batch_per_gpu"]]}
            )
        )
    )
    told = bounds(result)
    assert told is not None and f"1 is bound by {WORDS['idle'].label}" in told
    assert "Largest possible gain" not in told


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        ("eager", "a larger batch, compilation or CUDA graphs"),
        ("compile", "a larger batch or CUDA graphs"),
        ("compile_graph", "a larger batch"),
    ],
)
def test_changes_that_a_configuration_already_uses_are_not_suggested(execution: str, expected: str) -> None:
    assert fewer_launches(pd.Series({"execution": execution})) == expected


def test_threads_of_one_process_are_advised_to_become_processes() -> None:
    threads = pd.Series({"execution": "eager", "parallel": "dp", "world_size": 4, "precision": "bf16"})
    assert fewer_launches(threads) == "DDP in place of DataParallel, a larger batch or compilation"
    assert faster_compute(threads) == "DDP in place of DataParallel, compilation or a faster device"
    assert "DDP" not in fewer_launches(pd.Series({**threads, "world_size": 1}))


def test_cuda_graphs_are_advised_for_strategies_that_can_be_captured() -> None:
    advised = {
        name for name in PARALLEL
        if "CUDA graphs" in fewer_launches(pd.Series({"parallel": name, "world_size": 1, "execution": "eager"}))
    }  # fmt: skip
    assert advised == {name for name, facts in PARALLEL.items() if facts.capturable}


@pytest.mark.parametrize(("share", "host_bound"), [(0.01, True), (-0.01, False)])
def test_without_kernel_times_host_bound_requires_issuing_for_most_of_the_plain_step(
    share: float, host_bound: bool
) -> None:
    [trial] = grid(GPU)
    frame = steps(trial, 0.1, launch_ratio=0.95, previous_done=1.0)
    frame = frame[~frame["window"].isin(["busy", "transfer_synced"])]
    issue_s = summarise(frame)["step_launch_s"]
    assert issue_s is not None
    plain = frame["window"] == "plain"
    stretch = issue_s / (HOST_BOUND_STEP_SHARE + share) / 0.1
    frame.loc[plain, "window_s"] *= stretch
    assert summarise(frame)["host_bound"] is host_bound


@pytest.mark.parametrize(("share", "host_bound"), [(0.92, True), (0.88, False)])
def test_without_kernel_times_launching_for_nearly_the_plain_step_is_host_bound(share: float, host_bound: bool) -> None:
    """Replicas in threads of one process leave a long end of the span on an idle device, yet the host is busy."""
    [trial] = grid(GPU)
    frame = steps(trial, 0.1, launch_ratio=0.7, previous_done=1.0)
    frame = frame[~frame["window"].isin(["busy", "transfer_synced"])]
    issue_s = summarise(frame)["step_launch_s"]
    assert issue_s is not None
    frame.loc[frame["window"] == "plain", "window_s"] *= issue_s / share / 0.1
    assert summarise(frame)["host_bound"] is host_bound


def test_a_done_trial_without_throughput_is_reported(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "r")
    complete, broken = grid(GPU, repeat=[0, 1])
    write_trial(directory, record(complete), steps(complete, 0.1))
    frame = steps(broken, 0.1)
    frame.loc[frame["window"] == "plain", "window_s"] = float("nan")
    write_trial(directory, record(broken), frame)
    found = analyse(load(directory))
    text = without_throughput(found) or ""
    assert text.startswith("1 of 2 trials has no throughput") and trial_id(broken) in text


def test_trials_without_the_parallel_field_have_a_verdict(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "r")
    for trial in grid(GPU, world_size=[1, 2]):
        fields = {name: value for name, value in trial.items() if name != "parallel"}
        write_trial(directory, record(fields), steps(fields, 0.1 * fields["world_size"], BUSY))
    found = analyse(load(directory))
    told = growth(found)
    assert told is not None and "phase that grows most is" in told


def test_a_configuration_is_labelled_by_the_fields_that_distinguish_it() -> None:
    result = pd.DataFrame([{name: 0 for name in "abcdefghij"} for _ in range(3)])
    result.loc[2, "c"] = 1
    assert telling_fields(result, result.iloc[2], list("abcdefghij")) == ["c"]
    assert telling_fields(result, result.iloc[2], list("abc")) == ["a", "b", "c"]
    own = result.assign(script="/home/me/train.py")
    assert telling_fields(own, own.iloc[0], [*"abcdefghij", "script"]) == ["script"], "its file always names it"
