"""Measures of one trial: hand-made steps with hand-computed values."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.measure.measures import MEASURES, cost_of_waiting_s, summaries, summarise
from analysis.read.reduce import windows
from analysis.read.results import load
from analysis.read.schema import PHASES
from tests.support.frames import FIELDS, gpu_study, steps

CUDA = FIELDS | {"device": "cuda", "world_size": 2, "batch_per_gpu": 8, "steps": 4, "image_size": 16}
CPU = FIELDS | {"world_size": 2, "batch_per_gpu": 8, "steps": 4}


def in_window(frame: pd.DataFrame, window: str, rank: int) -> pd.Series:
    return (frame["window"] == window) & (frame["rank"] == rank)


def test_throughput_is_all_samples_over_the_time_of_the_slowest_rank() -> None:
    frame = steps(CPU, 0.5)
    frame.loc[in_window(frame, "plain", 1), "window_s"] = 4.0  # rank 0: 4 steps of 0.5 s
    measures = summarise(frame)
    assert measures["throughput_samples_per_s"] == pytest.approx(2 * 4 * 8 / 4.0)
    assert measures["step_s"] == pytest.approx(1.0)
    assert (measures["slowest_rank"], measures["fastest_rank"]) == (1, 0)
    assert measures["rank_window_ratio"] == pytest.approx(2.0)


def test_warm_up_steps_are_ignored() -> None:
    frame = steps(CPU, 0.5)
    slow = frame.copy()
    slow.loc[slow["window"] == "warmup", ["step_s", "backward_s", "samples"]] *= 100
    assert summarise(slow) == summarise(frame)


def test_throughput_is_unknown_if_the_time_of_a_rank_is() -> None:
    frame = steps(CPU, 0.5)
    frame.loc[in_window(frame, "plain", 1), "window_s"] = float("nan")
    measures = summarise(frame)
    assert measures["throughput_samples_per_s"] is None
    assert measures["step_s"] is None
    assert measures["slowest_rank"] is None


def test_phases_are_means_over_ranks_of_medians_over_steps() -> None:
    frame = steps(CPU, 0.5, (0.1, 0.0, 0.25, 0.05, 0.5, 0.1), instruments=1.0)
    one_slow_step = in_window(frame, "phases", 0) & (
        frame["step"] == frame.loc[in_window(frame, "phases", 0), "step"].max()
    )
    frame.loc[one_slow_step, "backward_s"] = 60.0
    frame.loc[in_window(frame, "phases", 1), "backward_s"] = 0.35
    measures = summarise(frame)
    assert measures["backward_s"] == pytest.approx((0.25 + 0.35) / 2)
    assert measures["forward_s"] == pytest.approx(0.125)
    assert measures["loss_s"] == pytest.approx(0.025)
    assert measures["load_wait_s"] == pytest.approx(0.05)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    measures = summarise(steps(CUDA, 0.5))
    parts = [measures[name] for name in PHASES]
    assert sum(part for part in parts if part is not None) == pytest.approx(measures["phases_step_s"])


def test_bursts_of_slow_loaders_count_as_waiting_for_a_batch() -> None:
    """Of 8 loader processes that need 20 ms per batch for steps of 10 ms, every eighth step waits for 80 ms."""
    frame = pd.concat([steps(CUDA, 0.01, instruments=1.0)[lambda frame: frame["window"] == "phases"]] * 4)
    frame = frame.assign(step=range(len(frame)), load_wait_s=0.0, step_s=0.01)
    late = frame["step"] % 8 == 0
    frame.loc[late, ["load_wait_s", "step_s"]] = [0.08, 0.09]
    measures = summarise(frame)
    assert measures["load_wait_s"] == pytest.approx(0.08 * late.mean())
    assert measures["phases_step_s"] == pytest.approx(0.01 + 0.08 * late.mean())


@pytest.mark.parametrize("waiting", ["backward_s", "forward_s"])
def test_ranks_wait_for_bursts_of_the_loaders_of_others(waiting: str) -> None:
    """Each rank waits for 80 ms in every eighth step, in turn, and the other one for it in a collective."""
    phases = steps(CUDA, 0.01, instruments=1.0)[lambda frame: frame["window"] == "phases"]
    frame = pd.concat([phases.assign(step=phases["step"] + 100 * number) for number in range(8)])
    frame = frame.assign(load_wait_s=0.0, forward_s=0.003, backward_s=0.005, step_s=0.01).reset_index(drop=True)
    order = frame["step"].rank(method="dense").astype(int) - 1
    own = order % 8 == 4 * frame["rank"]
    others = order % 8 == 4 * (1 - frame["rank"])
    frame.loc[own, "load_wait_s"] = 0.08
    frame.loc[others, waiting] += 0.08
    frame.loc[own | others, "step_s"] += 0.08
    measures = summarise(frame)
    mean_s = 0.08 / 8
    assert measures["load_wait_s"] == pytest.approx(mean_s)
    assert measures["longest_load_wait_s"] == pytest.approx(2 * mean_s)
    assert measures["phases_step_s"] == pytest.approx(0.01 + 2 * mean_s) == frame["step_s"].mean()
    for name, without_s in {"forward_s": 0.003, "backward_s": 0.005}.items():
        assert measures[name] == pytest.approx(without_s + (mean_s if name == waiting else 0.0))


def test_steps_under_no_sync_wait_for_no_loaders_of_others() -> None:
    frame = steps(CPU, 0.01)[lambda frame: frame["window"] == "phases"].assign(window="no_sync", step_s=0.01)
    frame["load_wait_s"] = 0.005 * frame["rank"]
    assert windows(frame.assign(trial_id="one"))["step_s"].tolist() == pytest.approx([0.01, 0.01])


def test_the_cost_of_waiting_for_the_copy_excludes_waits_for_a_batch() -> None:
    rows = pd.DataFrame(
        {
            "synced_step_s": [0.013],
            "phases_step_s": [0.032],
            "synced_longest_load_wait_s": [0.0],
            "longest_load_wait_s": [0.02],
        }
    )
    assert cost_of_waiting_s(rows).tolist() == pytest.approx([0.001])


def test_unmeasured_values_are_none_not_zero() -> None:
    measures = summarise(steps(CPU, 0.5))
    unknown = {name for name, value in measures.items() if value is None}
    assert unknown == {
        "host_to_device_s", "host_to_device_bytes", "host_to_device_bytes_per_s", "host_transfer_s",
        "synced_host_transfer_s", "synced_host_to_device_s", "synced_forward_s",
        "synced_longest_load_wait_s", "synced_step_s",
        "forward_launch_s", "loss_launch_s", "backward_launch_s", "after_backward_launch_s", "optimizer_launch_s",
        "step_launch_s", "issue_step_s", "forward_busy_s", "loss_busy_s", "backward_busy_s", "after_backward_busy_s",
        "optimizer_busy_s", "busy_s", "busy_fraction", "after_backward_s", "other_s", "previous_step_done_share",
        "host_bound", "peak_memory_bytes",
        "peak_reserved_bytes", "communication_ratio", "scatter_s", "replicate_s", "gather_s", "reduce_s", "graph_s",
    }  # fmt: skip


def test_a_trial_without_rows_has_no_measures() -> None:
    assert summarise(steps(CPU, 0.5).iloc[:0]) == dict.fromkeys(MEASURES)


def test_copy_bandwidth_is_in_bytes_per_second() -> None:
    measures = summarise(steps(CUDA, 0.5, (0.0, 0.1, 0.35, 0.05, 0.4, 0.1), instruments=1.0))
    assert measures["host_to_device_bytes_per_s"] == pytest.approx(8 * 16**2 * 4 / 0.05)


def test_instruments_ratio_is_the_measurement_overhead() -> None:
    assert summarise(steps(CPU, 0.5, instruments=1.02))["instruments_ratio"] == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("launch_ratio", "busy_ratio", "host_bound"),
    [(0.95, 0.4, True), (0.8, 0.4, True), (0.8, 0.95, False), (0.6, 0.4, False), (0.5, 0.95, False)],
)
def test_host_bound_requires_issuing_slower_than_the_device_and_most_of_the_step(
    launch_ratio: float, busy_ratio: float, host_bound: bool
) -> None:
    measures = summarise(steps(CUDA, 0.5, launch_ratio=launch_ratio, busy_ratio=busy_ratio, previous_done=0.5))
    assert measures["host_bound"] is host_bound


@pytest.mark.parametrize(
    ("launch_ratio", "busy_ratio", "host_bound"), [(1.0, 0.98, False), (1.0, 0.9, True), (0.96, 0.975, True)]
)
def test_a_launch_that_ends_with_a_busy_device_waits_for_it(
    launch_ratio: float, busy_ratio: float, host_bound: bool
) -> None:
    measures = summarise(steps(CUDA, 0.5, launch_ratio=launch_ratio, busy_ratio=busy_ratio))
    assert measures["step_launch_s"] > measures["busy_s"]  # type: ignore[operator]
    assert measures["host_bound"] is host_bound


@pytest.mark.parametrize(
    ("launch_ratio", "previous_done", "host_bound"),
    [(0.95, 1.0, True), (0.95, 0.0, False), (0.5, 1.0, False), (0.5, 0.0, False)],
)
def test_without_kernel_time_host_bound_requires_slow_issuing_and_an_idle_device(
    launch_ratio: float, previous_done: float, host_bound: bool
) -> None:
    frame = steps(CUDA, 0.5, launch_ratio=launch_ratio, previous_done=previous_done)
    measures = summarise(frame[frame["window"] != "busy"])
    assert measures["host_bound"] is host_bound
    assert measures["step_launch_s"] == pytest.approx(0.5 * launch_ratio)
    assert measures["issue_step_s"] == pytest.approx(0.5)


def test_issue_and_kernel_times_per_phase() -> None:
    shares = (0.0, 0.1, 0.25, 0.05, 0.5, 0.1)
    measures = summarise(steps(CUDA, 0.5, shares, launch_ratio=0.8, busy_ratio=0.4))
    parts = ("forward", "loss", "backward", "optimizer")
    assert [measures[f"{name}_launch_s"] for name in parts] == pytest.approx([0.152, 0.008, 0.16, 0.08])
    assert [measures[f"{name}_busy_s"] for name in parts] == pytest.approx([0.05, 0.01, 0.1, 0.02])
    assert measures["busy_s"] == pytest.approx(0.18)


def test_kernel_time_is_known_for_a_step_without_a_separate_loss_and_with_clipping() -> None:
    frame = steps(CUDA, 0.5, (0.0, 0.1, 0.25, 0.05, 0.5, 0.1), busy_ratio=0.4).drop(columns="loss_s")
    frame["loss_s"] = float("nan")
    assert summarise(frame)["busy_s"] == pytest.approx(0.17)
    timed = frame["window"].isin(["phases", "busy"])
    frame["after_backward_s"] = pd.Series(0.03, frame.index).where(timed)
    assert summarise(frame)["busy_s"] == pytest.approx(0.2)
    frame.loc[frame["window"] == "busy", "after_backward_s"] = float("nan")
    assert summarise(frame)["busy_s"] is None, "a part that exists, but whose kernel time is unknown"


@pytest.mark.parametrize("window", ["profile", "communication", "busy"])
def test_traced_kernels_replace_those_of_held_steps_(window: str) -> None:
    frame = steps(CUDA, 0.5, launch_ratio=0.8, busy_ratio=0.95)
    assert summarise(frame)["host_bound"] is False
    traced = frame[frame["window"] == "phases"].assign(window=window, kernels_s=0.15)
    measures = summarise(pd.concat([frame, traced], ignore_index=True))
    assert measures["busy_s"] == pytest.approx(0.15)
    assert measures["backward_busy_s"] is None
    assert measures["host_bound"] is True


def test_busy_fraction_includes_kernels_and_the_copy_of_the_batch() -> None:
    shares = (0.0, 0.1, 0.25, 0.05, 0.5, 0.1)
    measures = summarise(steps(CUDA, 0.5, shares, busy_ratio=0.4, instruments=1.0))
    assert measures["busy_fraction"] == pytest.approx((0.18 + 0.05) / 0.5)
    resident = summarise(steps(CUDA | {"dataset": "synthetic"}, 0.5, shares, busy_ratio=0.4, instruments=1.0))
    assert resident["busy_fraction"] == pytest.approx(0.18 / 0.5)


def test_busy_time_ignores_missing_steps_and_is_unknown_without_a_phase() -> None:
    frame = steps(CUDA, 0.5)
    busy = frame["window"] == "busy"
    first = frame["step"] == frame.loc[busy, "step"].min()
    lost = frame.copy()
    lost.loc[busy & first, "backward_s"] = float("nan")
    assert summarise(lost)["busy_s"] == pytest.approx(summarise(frame)["busy_s"])
    lost.loc[busy, "backward_s"] = float("nan")
    measures = summarise(lost)
    assert (measures["backward_busy_s"], measures["busy_s"], measures["busy_fraction"]) == (None, None, None)
    assert measures["forward_busy_s"] is not None


def test_synced_steps_have_their_own_measures() -> None:
    measures = summarise(steps(CUDA, 0.5, (0.0, 0.1, 0.35, 0.05, 0.4, 0.1), instruments=1.0, synced_ratio=1.2))
    assert measures["phases_step_s"] == pytest.approx(0.5)
    assert measures["synced_step_s"] == pytest.approx(0.6)
    assert measures["synced_forward_s"] == pytest.approx(0.175 + 0.1)
    assert measures["synced_host_to_device_s"] == pytest.approx(0.05)
    assert (measures["host_transfer_s"], measures["synced_host_transfer_s"]) == pytest.approx((20e-6, 0.05))
    assert measures["host_to_device_bytes"] == 8 * 16**2 * 4


def test_results_without_the_loss_phase_are_read() -> None:
    frame = steps(CUDA, 0.5, (0.0, 0.1, 0.4, 0.0, 0.4, 0.1), instruments=1.0)
    measures = summarise(frame[~frame["window"].isin(["busy", "transfer_synced"])].assign(loss_s=float("nan")))
    assert measures["loss_s"] is None
    assert measures["forward_s"] == pytest.approx(0.2)
    assert (measures["busy_s"], measures["busy_fraction"], measures["synced_step_s"]) == (None, None, None)
    assert measures["host_bound"] is False


def test_the_first_step_of_a_window_does_not_count_for_previous_step_done() -> None:
    frame = steps(CUDA, 0.5, previous_done=0.0)
    first = frame["step"] == frame.loc[frame["window"] == "phases", "step"].min()
    frame.loc[first, "previous_step_done"] = True
    assert summarise(frame)["previous_step_done_share"] == 0.0


def test_peak_memory_is_the_maximum_over_ranks() -> None:
    frame = steps(CUDA, 0.5)
    frame.loc[in_window(frame, "phases", 1), "peak_memory_bytes"] = 7 * 2**30
    frame.loc[in_window(frame, "phases", 0), "peak_reserved_bytes"] = 8 * 2**30
    measures = summarise(frame)
    assert (measures["peak_memory_bytes"], measures["peak_reserved_bytes"]) == (7 * 2**30, 8 * 2**30)


def test_missing_columns_are_listed_in_the_error() -> None:
    frame = steps(CPU, 0.5).drop(columns=["samples", "backward_s"])
    with pytest.raises(ValueError, match="^the frame of steps lacks the columns samples, backward_s$"):
        summarise(frame)


def test_measures_of_all_trials_equal_those_of_single_trials(tmp_path: Path) -> None:
    results = load(gpu_study(tmp_path / "results"))
    all_measures = summaries(results.trials, results.windows)
    assert set(all_measures["trial_id"]) == set(results.trials.loc[results.trials["status"] == "done", "trial_id"])
    for i in (0, 41, 98):
        row = all_measures.iloc[i]
        single = summarise(results.steps[results.steps["trial_id"] == row["trial_id"]])
        assert {name: None if pd.isna(row[name]) else row[name] for name in MEASURES} == pytest.approx(single)
