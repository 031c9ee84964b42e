"""What bounds a step: each region on a configuration that it bounds and one that it does not, and the verdict's words."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare.bottleneck import REGIONS, at_most, fewer_launches, regions
from analysis.compare.communication import Communication
from analysis.load.results import load
from analysis.load.schema import PHASES
from analysis.measure.communication import ACCOUNT_COLUMNS
from analysis.measure.measures import HOST_BOUND_STEP_SHARE, summarise
from analysis.study import analyse
from analysis.text import telling_fields
from analysis.verdict.answer import growth
from analysis.verdict.bottleneck import bounds
from analysis.verdict.trust import without_throughput
from tests.support.frames import grid, record, steps, trial_id, write_results, write_study, write_trial

NONE = pd.DataFrame()


def configuration(**changes: Any) -> tuple[pd.DataFrame, Communication]:
    """100 ms on two ranks: 5 ms load, 2 ms copy, 90 ms of kernels, 4 ms exposed wire, 2 ms exposed wait."""
    row = dict.fromkeys(PHASES, 0.0) | {
        "load_wait_s": 0.005, "host_to_device_s": 0.002, "forward_s": 0.03, "backward_s": 0.055, "optimizer_s": 0.008,
        "phases_step_s": 0.1, "step_s": 0.1, "busy_s": 0.087, "host_bound": False, "world_size": 2,
        "exposed_wire_s": 0.004, "exposed_wait_s": 0.002,
    } | changes  # fmt: skip
    found = pd.DataFrame([row])
    exposed = found.reindex(columns=list(ACCOUNT_COLUMNS))
    return found.drop(columns=["exposed_wire_s", "exposed_wait_s"]), Communication(
        NONE, exposed, NONE, NONE, NONE, NONE, NONE
    )


def bound(**changes: Any) -> Any:
    return regions(*configuration(**changes))["bound"].iloc[0]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    shares = regions(*configuration())[list(REGIONS)].iloc[0]
    assert shares.sum() == pytest.approx(1)
    assert shares.to_dict() == pytest.approx(
        {"host": 0, "load": 0.05, "transfer": 0.02, "wire": 0.04, "wait": 0.02, "idle": 0, "compute": 0.87}
    )


def test_an_account_of_slower_steps_than_the_plain_ones_takes_its_share_of_those() -> None:
    # 0.3 s after a last gradient at 0.1 s, where a plain step took 0.1 s: a socket's transfers are never twice the same
    slower = {"exposed_wire_s": 0.3, "exposed_wait_s": 0.0, "exposed_s": 0.3, "last_gradient_s": 0.1}
    shares = regions(*configuration(**slower)).iloc[0]
    assert shares["wire"] == pytest.approx(0.75)
    assert at_most(shares["wire"]) == pytest.approx(4)


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
        ({"host_bound": None}, "compute"),
        ({"busy_s": 0.6e-1}, "idle"),
        ({"busy_s": 0.7e-1}, "compute"),
        ({"busy_s": None}, "compute"),
        ({"world_size": 1, "exposed_wire_s": None, "exposed_wait_s": None}, "compute"),
        ({"phases_step_s": None}, None),
    ],
)
def test_a_region_bounds_a_step_where_its_rule_holds_and_only_there(
    changes: dict[str, Any], expected: str | None
) -> None:
    assert bound(**changes) == expected


def test_what_the_host_costs_is_the_time_for_which_the_device_has_nothing_to_run() -> None:
    shares = regions(*configuration(host_bound=True, busy_s=0.047)).iloc[0]
    assert shares["host"] == pytest.approx(1 - 0.47 - 0.05 - 0.02 - 0.04 - 0.02)
    assert shares[list(REGIONS)].astype(float).sum() == pytest.approx(1)
    assert pd.isna(regions(*configuration(host_bound=True, busy_s=None))["host"].iloc[0])


def test_compute_is_no_more_than_its_kernels_took() -> None:
    shares = regions(*configuration(busy_s=0.047)).iloc[0]
    assert shares["compute"] == pytest.approx(0.47)
    assert shares["idle"] == pytest.approx(1 - 0.47 - 0.05 - 0.02 - 0.04 - 0.02)


def test_communication_that_was_not_measured_is_unknown_on_several_ranks_and_nothing_on_one() -> None:
    several = regions(*configuration(exposed_wire_s=None, exposed_wait_s=None)).iloc[0]
    assert pd.isna(several["wire"])
    one = regions(*configuration(exposed_wire_s=None, exposed_wait_s=None, world_size=1)).iloc[0]
    assert one["wire"] == 0


def test_removing_a_part_brings_at_most_what_amdahl_says() -> None:
    assert at_most(0.5) == 2
    assert at_most(0.0) == 1
    assert at_most(1.0) == float("inf")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (
            (0.0, 0.4, 0.2, 0.02, 0.3, 0.08),
            (
                "The fastest configuration is bound by the copy to the device: copying the batch to the device takes 40\u00a0% of a "
                "step. What helps most is pinned memory, copies ahead of the step (copy_ahead), or smaller samples; without that part a step "
                "would be at most 1.67 times as fast."
            ),
        ),
        (
            (0.1, 0.0, 0.3, 0.02, 0.5, 0.08),
            (
                "The fastest configuration is bound by compute: kernels of forward, loss, backward and optimizer take 86\u00a0% of a "
                "step. What helps is lower precision, compilation or a faster device; the largest other part is waiting for a batch, "
                "10\u00a0%, without which a step would be at most 1.11 times as fast."
            ),
        ),
    ],
)
def test_the_verdict_says_what_would_help_and_how_much_at_most(
    tmp_path: Path, shares: tuple[float, ...], expected: str
) -> None:
    trials = grid({"device": "cuda", "steps": 4, "cpus_per_rank": 8})
    analysis = analyse(load(write_results(tmp_path / "r", trials, lambda _: {"step_s": 0.1, "shares": shares})))
    assert bounds(analysis) == expected


GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
BUSY = (0.0, 0.05, 0.3, 0.05, 0.5, 0.1)


def test_of_several_kinds_of_work_none_is_called_the_fastest(tmp_path: Path) -> None:
    trials = grid(GPU, model=["resnet18", "resnet50"])
    found = analyse(load(write_results(tmp_path / "r", trials, lambda _: {"step_s": 0.1, "shares": BUSY})))
    assert bounds(found) == "All 2 configurations are bound by compute."


def test_idling_without_a_known_reason_is_no_change_that_could_be_made(tmp_path: Path) -> None:
    trials = grid(GPU, batch_per_gpu=[8, 64])
    shape = {8: {"busy_ratio": 0.2, "launch_ratio": 0.1}, 64: {"busy_ratio": 1.0}}
    found = analyse(
        load(
            write_results(
                tmp_path / "r", trials, lambda trial: {"step_s": 0.1, "shares": BUSY, **shape[trial["batch_per_gpu"]]}
            )
        )
    )
    told = bounds(found)
    assert told is not None and "1 is bound by something unmeasured" in told
    assert "One change could bring most" not in told


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        ("eager", "a larger batch, compilation or CUDA graphs"),
        ("compile", "a larger batch or CUDA graphs"),
        ("compile_graph", "a larger batch"),
    ],
)
def test_what_a_configuration_does_already_is_no_advice_for_it(execution: str, expected: str) -> None:
    assert fewer_launches(pd.Series({"execution": execution})) == expected


@pytest.mark.parametrize(("share", "host_bound"), [(0.01, True), (-0.01, False)])
def test_without_kernel_times_too_issuing_must_take_most_of_the_plain_step(share: float, host_bound: bool) -> None:
    [trial] = grid(GPU)
    frame = steps(trial, 0.1, launch_ratio=0.95, previous_done=1.0)
    frame = frame[~frame["window"].isin(["busy", "transfer_synced"])]
    issued_s = summarise(frame)["step_launch_s"]
    assert issued_s is not None
    plain = frame["window"] == "plain"
    longer = issued_s / (HOST_BOUND_STEP_SHARE + share) / 0.1
    frame.loc[plain, "window_s"] *= longer
    assert summarise(frame)["host_bound"] is host_bound


def test_a_done_trial_without_a_throughput_is_named(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "r")
    whole, broken = grid(GPU, repeat=[0, 1])
    write_trial(directory, record(whole), steps(whole, 0.1))
    frame = steps(broken, 0.1)
    frame.loc[frame["window"] == "plain", "window_s"] = float("nan")
    write_trial(directory, record(broken), frame)
    found = analyse(load(directory))
    assert without_throughput(found) == (
        "1 of 2 trials has no throughput, for the time of a rank is unknown, and no part in any comparison: look at the steps of "
        f"{trial_id(broken)}."
    )


def test_trials_of_a_program_that_knows_no_strategies_have_a_verdict(tmp_path: Path) -> None:
    directory = write_study(tmp_path / "r")
    for trial in grid(GPU, world_size=[1, 2]):
        fields = {name: value for name, value in trial.items() if name != "parallel"}
        write_trial(directory, record(fields), steps(fields, 0.1 * fields["world_size"], BUSY))
    found = analyse(load(directory))
    told = growth(found)
    assert told is not None and "the phase that grows most is" in told


def test_of_many_fields_a_configuration_is_named_by_those_that_set_it_apart() -> None:
    found = pd.DataFrame([{name: 0 for name in "abcdefghij"} for _ in range(3)])
    found.loc[2, "c"] = 1
    assert telling_fields(found, found.iloc[2], list("abcdefghij")) == ["c"]
    assert telling_fields(found, found.iloc[2], list("abc")) == ["a", "b", "c"]
