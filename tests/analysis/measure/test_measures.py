"""Measures of one trial: hand-made steps, values worked out by hand."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.load.results import load
from analysis.load.schema import PHASES
from analysis.measure.measures import BUSY, LAUNCHES, MEASURES, summaries, summarise
from tests.support.frames import FIELDS, gpu_study, steps

CUDA = FIELDS | {"device": "cuda", "world_size": 2, "batch_per_gpu": 8, "steps": 4, "image_size": 16}
CPU = FIELDS | {"world_size": 2, "batch_per_gpu": 8, "steps": 4}


def in_window(frame: pd.DataFrame, window: str, rank: int) -> pd.Series:
    return (frame["window"] == window) & (frame["rank"] == rank)


def test_throughput_is_all_samples_over_the_slowest_ranks_time() -> None:
    frame = steps(CPU, 0.5)
    frame.loc[in_window(frame, "plain", 1), "window_s"] = 4.0  # rank 0: 4 steps of 0.5 s
    found = summarise(frame)
    assert found["throughput_samples_per_s"] == pytest.approx(2 * 4 * 8 / 4.0)
    assert found["step_s"] == pytest.approx(1.0)
    assert (found["slowest_rank"], found["fastest_rank"]) == (1, 0)
    assert found["rank_window_ratio"] == pytest.approx(2.0)


def test_warm_up_steps_do_not_count() -> None:
    frame = steps(CPU, 0.5)
    slow = frame.copy()
    slow.loc[slow["window"] == "warmup", ["step_s", "backward_s", "samples"]] *= 100
    assert summarise(slow) == summarise(frame)


def test_a_rank_without_a_time_leaves_throughput_unknown() -> None:
    frame = steps(CPU, 0.5)
    frame.loc[in_window(frame, "plain", 1), "window_s"] = float("nan")
    found = summarise(frame)
    assert found["throughput_samples_per_s"] is None
    assert found["step_s"] is None
    assert found["slowest_rank"] is None


def test_phases_are_medians_of_each_rank_then_means_over_ranks() -> None:
    frame = steps(CPU, 0.5, (0.1, 0.0, 0.25, 0.05, 0.5, 0.1), instruments=1.0)
    one_slow_step = in_window(frame, "phases", 0) & (
        frame["step"] == frame.loc[in_window(frame, "phases", 0), "step"].max()
    )
    frame.loc[one_slow_step, "backward_s"] = 60.0
    frame.loc[in_window(frame, "phases", 1), "backward_s"] = 0.35
    found = summarise(frame)
    assert found["backward_s"] == pytest.approx((0.25 + 0.35) / 2)
    assert found["forward_s"] == pytest.approx(0.125)
    assert found["loss_s"] == pytest.approx(0.025)
    assert found["load_wait_s"] == pytest.approx(0.05)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    found = summarise(steps(CUDA, 0.5))
    parts = [found[name] for name in PHASES]
    assert sum(part for part in parts if part is not None) == pytest.approx(found["phases_step_s"])


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    found = summarise(steps(CPU, 0.5))
    unknown = {name for name, value in found.items() if value is None}
    assert unknown == {
        "host_to_device_s", "host_to_device_bytes", "host_to_device_bytes_per_s", "host_transfer_s",
        "synced_host_transfer_s", "synced_host_to_device_s", "synced_forward_s", "synced_step_s", "forward_launch_s", "loss_launch_s", "backward_launch_s",
        "optimizer_launch_s", "step_launch_s", "issue_step_s", "forward_busy_s", "loss_busy_s", "backward_busy_s",
        "optimizer_busy_s", "busy_s", "busy_fraction", "previous_step_done_share", "host_bound", "peak_memory_bytes",
        "peak_reserved_bytes", "communication_ratio", "scatter_s", "replicate_s", "gather_s", "reduce_s", "graph_s",
    }  # fmt: skip


def test_a_trial_without_rows_has_no_measure() -> None:
    assert summarise(steps(CPU, 0.5).iloc[:0]) == dict.fromkeys(MEASURES)


def test_the_copy_is_in_bytes_per_second() -> None:
    found = summarise(steps(CUDA, 0.5, (0.0, 0.1, 0.35, 0.05, 0.4, 0.1), instruments=1.0))
    assert found["host_to_device_bytes_per_s"] == pytest.approx(8 * 16**2 * 4 / 0.05)


def test_instruments_are_charged_with_what_they_add() -> None:
    assert summarise(steps(CPU, 0.5, instruments=1.02))["instruments_ratio"] == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("launch_ratio", "busy_ratio", "host_bound"),
    [(0.95, 0.4, True), (0.8, 0.4, True), (0.8, 0.95, False), (0.6, 0.4, False), (0.5, 0.95, False)],
)
def test_host_bound_needs_a_host_slower_than_the_device_that_fills_the_step(
    launch_ratio: float, busy_ratio: float, host_bound: bool
) -> None:
    found = summarise(steps(CUDA, 0.5, launch_ratio=launch_ratio, busy_ratio=busy_ratio, previous_done=0.5))
    assert found["host_bound"] is host_bound


@pytest.mark.parametrize(
    ("launch_ratio", "previous_done", "host_bound"),
    [(0.95, 1.0, True), (0.95, 0.0, False), (0.5, 1.0, False), (0.5, 0.0, False)],
)
def test_without_kernel_busy_time_host_bound_needs_slow_issue_and_an_idle_device(
    launch_ratio: float, previous_done: float, host_bound: bool
) -> None:
    frame = steps(CUDA, 0.5, launch_ratio=launch_ratio, previous_done=previous_done)
    found = summarise(frame[frame["window"] != "busy"])
    assert found["host_bound"] is host_bound
    assert found["step_launch_s"] == pytest.approx(0.5 * launch_ratio)
    assert found["issue_step_s"] == pytest.approx(0.5)


def test_what_the_host_needs_to_issue_a_phase_stands_beside_what_the_device_needs() -> None:
    shares = (0.0, 0.1, 0.25, 0.05, 0.5, 0.1)
    found = summarise(steps(CUDA, 0.5, shares, launch_ratio=0.8, busy_ratio=0.4))
    assert [found[name] for name in LAUNCHES] == pytest.approx([0.152, 0.008, 0.16, 0.08])
    assert [found[name] for name in BUSY] == pytest.approx([0.05, 0.01, 0.1, 0.02])
    assert found["busy_s"] == pytest.approx(0.18)


def test_the_device_is_busy_with_kernels_and_the_batchs_copy() -> None:
    shares = (0.0, 0.1, 0.25, 0.05, 0.5, 0.1)
    found = summarise(steps(CUDA, 0.5, shares, busy_ratio=0.4, instruments=1.0))
    assert found["busy_fraction"] == pytest.approx((0.18 + 0.05) / 0.5)
    resident = summarise(steps(CUDA | {"dataset": "synthetic"}, 0.5, shares, busy_ratio=0.4, instruments=1.0))
    assert resident["busy_fraction"] == pytest.approx(0.18 / 0.5)


def test_a_step_whose_hold_ended_early_does_not_count_and_a_phase_without_any_leaves_the_sum_unknown() -> None:
    frame = steps(CUDA, 0.5)
    busy = frame["window"] == "busy"
    first = frame["step"] == frame.loc[busy, "step"].min()
    lost = frame.copy()
    lost.loc[busy & first, "backward_s"] = float("nan")
    assert summarise(lost)["busy_s"] == pytest.approx(summarise(frame)["busy_s"])
    lost.loc[busy, "backward_s"] = float("nan")
    found = summarise(lost)
    assert (found["backward_busy_s"], found["busy_s"], found["busy_fraction"]) == (None, None, None)
    assert found["forward_busy_s"] is not None


def test_steps_that_wait_for_their_copy_are_told_apart() -> None:
    found = summarise(steps(CUDA, 0.5, (0.0, 0.1, 0.35, 0.05, 0.4, 0.1), instruments=1.0, synced_ratio=1.2))
    assert found["phases_step_s"] == pytest.approx(0.5)
    assert found["synced_step_s"] == pytest.approx(0.6)
    assert found["synced_forward_s"] == pytest.approx(0.175 + 0.1)
    assert found["synced_host_to_device_s"] == pytest.approx(0.05)
    assert (found["host_transfer_s"], found["synced_host_transfer_s"]) == pytest.approx((20e-6, 0.05))
    assert found["host_to_device_bytes"] == 8 * 16**2 * 4


def test_results_older_than_the_loss_phase_still_read() -> None:
    frame = steps(CUDA, 0.5, (0.0, 0.1, 0.4, 0.0, 0.4, 0.1), instruments=1.0)
    found = summarise(frame[~frame["window"].isin(["busy", "transfer_synced"])].assign(loss_s=float("nan")))
    assert found["loss_s"] is None
    assert found["forward_s"] == pytest.approx(0.2)
    assert (found["busy_s"], found["busy_fraction"], found["synced_step_s"]) == (None, None, None)
    assert found["host_bound"] is False


def test_the_first_step_of_a_window_says_nothing_about_the_one_before() -> None:
    frame = steps(CUDA, 0.5, previous_done=0.0)
    first = frame["step"] == frame.loc[frame["window"] == "phases", "step"].min()
    frame.loc[first, "previous_step_done"] = True
    assert summarise(frame)["previous_step_done_share"] == 0.0


def test_memory_is_that_of_the_fullest_rank() -> None:
    frame = steps(CUDA, 0.5)
    frame.loc[in_window(frame, "phases", 1), "peak_memory_bytes"] = 7 * 2**30
    frame.loc[in_window(frame, "phases", 0), "peak_reserved_bytes"] = 8 * 2**30
    found = summarise(frame)
    assert (found["peak_memory_bytes"], found["peak_reserved_bytes"]) == (7 * 2**30, 8 * 2**30)


def test_missing_columns_are_named() -> None:
    frame = steps(CPU, 0.5).drop(columns=["samples", "backward_s"])
    with pytest.raises(ValueError, match="^the frame of steps lacks the columns samples, backward_s$"):
        summarise(frame)


def test_all_trials_at_once_are_as_each_alone(tmp_path: Path) -> None:
    results = load(gpu_study(tmp_path / "results"))
    together = summaries(results.trials, results.windows)
    assert set(together["trial_id"]) == set(results.trials.loc[results.trials["status"] == "done", "trial_id"])
    for i in (0, 41, 160):
        row = together.iloc[i]
        alone = summarise(results.steps[results.steps["trial_id"] == row["trial_id"]])
        assert {name: None if pd.isna(row[name]) else row[name] for name in MEASURES} == pytest.approx(alone)
