"""Communication breakdown: the parameters of generated studies are recovered."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.measure.communication import bucket_rows, communication_breakdown, step_rows
from analysis.read.results import load
from analysis.study import Analysis, analyse
from analysis.verdict.communication import late_ranks
from tests.support.frames import MIB, grid, write_results

GPU = {"device": "cuda", "steps": 4, "cpus_per_rank": 8}
TRIALS = pd.DataFrame({"trial_id": ["gpu", "cpu"], "device": ["cuda", "cpu"], "world_size": 2})


def study(directory: Path, base: dict[str, Any], law: dict[int, Any], **axes: Any) -> Analysis:
    """Return trials on 1 and 2 ranks.

    law: the keyword arguments of `frames.steps`, and `communication`, by number of ranks.
    """

    def law_of(fields: dict[str, Any]) -> dict[str, Any]:
        return dict(law[fields["world_size"]])

    trials = grid(base, **({"world_size": [1, 2]} | axes))
    return analyse(load(write_results(directory / "results", trials, law_of, spread=0.0)))


def frames(trial_id: str, ready: list[list[float]], end: list[list[float]], last: list[float]) -> pd.DataFrame:
    """Return `bucket_rows` of one step from every rank's bucket ready and end times and last gradient, in seconds."""
    common = {"trial_id": trial_id, "window": "communication", "step": 7}
    buckets = [
        common | {"rank": rank, "bucket": k, "bytes": 4, "ready_s": r, "end_s": e}
        for rank, stamps in enumerate(zip(ready, end, strict=True))
        for k, (r, e) in enumerate(zip(*stamps, strict=True))
    ]
    steps = [common | {"rank": rank, "last_gradient_s": stamp} for rank, stamp in enumerate(last)]
    return bucket_rows(pd.DataFrame(buckets), pd.DataFrame(steps), TRIALS)


def test_nccl_buckets_start_when_the_previous_one_ends() -> None:
    rows = frames("gpu", [[1.0, 2.0, 6.0], [3.0, 3.5, 6.0]], [[4.0, 5.0, 7.0]] * 2, [6.0, 6.0])
    assert rows["start_s"].tolist() == [1.0, 4.0, 6.0, 3.0, 4.0, 6.0]
    assert rows["queueing_s"].tolist() == [0.0, 2.0, 0.0, 0.0, 0.5, 0.0]
    assert rows["wire_s"].tolist() == [1.0, 1.0, 1.0] * 2
    assert rows["wait_s"].tolist() == [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert rows["hidden_s"].tolist() == [3.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert rows["exposed_s"].tolist() == [0.0, 0.0, 1.0] * 2


def test_a_bucket_first_waits_then_transfers() -> None:
    rows = frames("gpu", [[1.0], [4.0]], [[6.0], [6.0]], [3.0, 4.0])
    first = rows.iloc[0]
    assert (first["wire_s"], first["wait_s"]) == (2.0, 3.0)
    assert (first["hidden_s"], first["exposed_wait_s"], first["exposed_wire_s"]) == (2.0, 1.0, 2.0)


def test_overlapping_gloo_buckets_count_once() -> None:
    rows = frames("cpu", [[1.0, 2.0, 6.0], [1.0, 2.0, 6.0]], [[5.0, 4.0, 7.0]] * 2, [3.0, 6.5])
    assert rows["queueing_s"].isna().all()
    totals = step_rows(rows)
    assert totals["communication_s"].tolist() == [5.0, 5.0]
    assert totals["hidden_s"].tolist() == [2.0, 4.5]
    assert totals["exposed_s"].tolist() == [3.0, 0.5]
    assert totals["wire_s"].tolist() == [5.0, 5.0]


def test_without_the_last_gradient_stamp_hidden_and_exposed_are_unknown() -> None:
    totals = step_rows(frames("gpu", [[1.0], [1.0]], [[2.0], [2.0]], [np.nan, np.nan]))
    assert totals["communication_s"].tolist() == [1.0, 1.0]
    assert totals[["hidden_s", "exposed_s", "exposed_wire_s", "exposed_wait_s"]].isna().all(axis=None)


def test_a_missing_column_is_an_error_with_its_name() -> None:
    with pytest.raises(ValueError, match="the frame of buckets lacks the columns bucket, bytes, ready_s, end_s"):
        bucket_rows(pd.DataFrame(columns=["trial_id", "window", "rank", "step"]), pd.DataFrame(), TRIALS)


@st.composite
def any_step(draw: st.DrawFn) -> tuple[str, list[list[float]], list[list[float]], list[float]]:
    ranks, count = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    times = st.floats(0, 10, allow_nan=False).map(lambda value: round(value, 3))
    ready = [sorted(draw(st.lists(times, min_size=count, max_size=count))) for _ in range(ranks)]
    durations = draw(st.lists(times, min_size=count, max_size=count))
    last_ready = np.max(ready, axis=0)
    trial_id = draw(st.sampled_from(["gpu", "cpu"]))
    ends = last_ready + durations
    if trial_id == "gpu":  # NCCL reduces one bucket after another
        ends = np.maximum.accumulate(ends)
    last = [draw(times) for _ in range(ranks)]
    return trial_id, ready, [ends.tolist()] * ranks, last


@settings(max_examples=60, deadline=None)
@given(any_step())
def test_hidden_and_exposed_add_up_to_the_union_and_so_do_wire_and_wait(step: Any) -> None:
    rows = frames(*step)
    totals = step_rows(rows)
    for _, total in totals.iterrows():
        rank_rows = rows[rows["rank"] == total["rank"]].sort_values("start_s")
        union, latest_end = 0.0, -np.inf
        for start_s, end_s in rank_rows[["start_s", "end_s"]].to_numpy():
            union += max(0.0, end_s - max(start_s, latest_end))
            latest_end = max(latest_end, end_s)
        assert total["communication_s"] == pytest.approx(union, abs=1e-9)
    assert np.allclose(totals["hidden_s"] + totals["exposed_s"], totals["communication_s"])
    assert np.allclose(totals["wire_s"] + totals["wait_s"], totals["communication_s"])
    assert np.allclose(totals["exposed_wire_s"] + totals["exposed_wait_s"], totals["exposed_s"])
    parts = ["hidden_s", "exposed_s", "wire_s", "wait_s", "exposed_wire_s", "exposed_wait_s"]
    assert (totals[parts] >= -1e-9).all(axis=None)
    assert (rows["wait_s"] >= 0).all()
    assert (rows["start_s"] >= rows["ready_s"]).all()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_wire_and_exposed_time_of_a_generated_study_are_recovered(tmp_path: Path, device: str) -> None:
    sizes, alone_s = [32 * MIB, 8 * MIB], np.array([32 * MIB, 8 * MIB]) / 10e9 + 50e-6
    law = {"last_gradient_s": 0.08, "bucket_bytes": sizes, "contention": 1.25}
    analysis = study(tmp_path, {"device": device}, {1: {"step_s": 0.1}, 2: {"step_s": 0.102, "communication": law}})
    (row,) = (row for _, row in analysis.communication.breakdown.iterrows())
    assert row["gradient_bytes"] == 40 * MIB
    assert row["buckets"] == 2
    assert row["wire_s"] == pytest.approx(1.25 * alone_s.sum())
    assert row["wait_s"] == pytest.approx(0.0)
    assert row["hidden_s"] == pytest.approx(1.25 * alone_s[0])
    assert row["exposed_s"] == pytest.approx(1.25 * alone_s[1])
    assert row["last_gradient_s"] == pytest.approx(0.08)
    assert pd.isna(row["waited_for_rank"])
    assert pd.isna(row["queueing_s"]) == (device == "cpu")
    assert analysis.communication.buckets["utilisation"].tolist() == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_that_is_20_ms_late_causes_wait_on_the_others(tmp_path: Path, device: str) -> None:
    law = {"last_gradient_s": 0.08, "bucket_bytes": [8 * MIB], "straggler": 2, "late_s": 0.020}
    base = {"device": device, "world_size": 4}
    analysis = study(tmp_path, base, {4: {"step_s": 0.1, "communication": law}}, world_size=[4])
    (row,) = (row for _, row in analysis.communication.breakdown.iterrows())
    assert row["waited_for_rank"] == 2
    transfer_s = 1.25 * (8 * MIB / 10e9 + 50e-6)
    assert row["lateness_s"] == pytest.approx(0.020)
    assert row["exposed_wait_s"] == pytest.approx(0.020)
    assert row["exposed_wire_s"] == pytest.approx(transfer_s)
    assert row["exposed_s"] == pytest.approx(0.020 + transfer_s)
    assert row["no_sync_step_s"] == pytest.approx(0.081), "of the ranks that wait"


def test_a_late_rank_delays_every_bucket_but_costs_its_lateness_once(tmp_path: Path) -> None:
    law = {"last_gradient_s": 0.2, "straggler": 1, "late_s": 0.020, "bandwidth": 1e12, "latency_s": 1e-6}
    analysis = study(tmp_path, GPU, {1: {"step_s": 0.2}, 2: {"step_s": 0.22, "communication": law}})
    (row,) = (row for _, row in analysis.communication.breakdown.iterrows())
    assert row["wait_s"] == pytest.approx(4 * 0.020, rel=0.01)
    assert row["exposed_wait_s"] == pytest.approx(0.020, rel=0.01)
    assert row["lateness_s"] == pytest.approx(0.020, rel=0.01)


def test_what_others_lose_while_they_wait_for_a_late_rank_counts_as_wait(tmp_path: Path) -> None:
    """Rank 1 is 20 ms late. Waiting all-reduces slow the other rank by 15 of them until its last gradient."""
    law = {"straggler": 1, "late_s": 0.005, "slowed_s": 0.015, "bandwidth": 1e12, "latency_s": 1e-6}
    steps = {1: {"step_s": 0.2}, 2: {"step_s": 0.22, "communication": law | {"last_gradient_s": 0.199}}}
    analysis = study(tmp_path, GPU, steps)
    (row,) = (row for _, row in analysis.communication.breakdown.iterrows())
    assert row["waited_for_rank"] == 1
    assert row["lateness_s"] == pytest.approx(0.005, rel=0.01)
    assert row["hidden_lateness_s"] == pytest.approx(0.015, rel=0.01)
    (causes,) = (row for _, row in analysis.communication.slowdown.iterrows())
    noise_s = 0.004 * 0.22  # the communication window has longer steps
    assert causes["growth_s"] == pytest.approx(0.020, rel=0.01)
    assert causes["wait_s"] == pytest.approx(0.020, abs=noise_s)
    assert causes["slower_compute_s"] == pytest.approx(0.0, abs=noise_s)
    assert causes["remainder_s"] == pytest.approx(0.0, abs=noise_s)
    assert "up to 20.0\xa0ms at earlier buckets" in str(late_ranks(analysis))


def test_a_late_rank_that_catches_up_by_itself_costs_only_its_last_lateness(tmp_path: Path) -> None:
    """The other rank computes as fast as one rank alone, so it lost nothing while it waited."""
    law = {"straggler": 1, "late_s": 0.005, "slowed_s": 0.015, "bandwidth": 1e12, "latency_s": 1e-6}
    steps = {1: {"step_s": 0.2}, 2: {"step_s": 0.205, "communication": law | {"last_gradient_s": 0.184}}}
    analysis = study(tmp_path, GPU, steps)
    (causes,) = (row for _, row in analysis.communication.slowdown.iterrows())
    assert causes["wait_s"] == pytest.approx(0.005, rel=0.02)


def test_exposed_cost_has_three_estimates_with_intervals(tmp_path: Path) -> None:
    law = {"last_gradient_s": 0.08, "bucket_bytes": [8 * MIB]}
    exposed_s = 1.25 * (8 * MIB / 10e9 + 50e-6)
    steps = {1: {"step_s": 0.1}, 2: {"step_s": 0.13, "communication": law}}
    analysis = study(tmp_path, GPU, steps, repeat=range(3))
    (row,) = (row for _, row in analysis.communication.exposed.iterrows())
    assert row["n"] == 3
    for name, cost_s in {"exposed_s": exposed_s, "difference_s": exposed_s, "step_time_difference_s": 0.03}.items():
        assert row[[name, f"{name}_low", f"{name}_high"]].tolist() == pytest.approx([cost_s] * 3)


def test_one_repeat_has_a_cost_but_no_interval(tmp_path: Path) -> None:
    steps = {1: {"step_s": 0.1}, 2: {"step_s": 0.13, "communication": {"last_gradient_s": 0.08}}}
    (row,) = (row for _, row in study(tmp_path, GPU, steps).communication.exposed.iterrows())
    assert row[["exposed_s", "difference_s", "step_time_difference_s"]].notna().all()
    assert row[[f"{name}_low" for name in ("exposed_s", "difference_s", "step_time_difference_s")]].isna().all()


def test_costs_of_repeats_are_the_median_of_their_costs(tmp_path: Path) -> None:
    """No geometric mean of 1 + cost / base: repeats of 8, 10 and 30 ms cost 10 ms, whatever their base."""
    sizes = {0: 8, 1: 10, 2: 30}

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        repeat = fields["repeat"]
        communication = {
            "last_gradient_s": 0.05 + 0.1 * repeat,
            "bucket_bytes": [sizes[repeat] * 10**6],
            "latency_s": 0.0,
        }
        return {"step_s": 0.1, "communication": communication | {"bandwidth": 1e9, "contention": 1.0}}

    trials = grid(GPU, world_size=[2], repeat=range(3))
    [(_, row)] = analyse(
        load(write_results(tmp_path / "results", trials, law, spread=0.0))
    ).communication.exposed.iterrows()
    assert row["exposed_s"] == pytest.approx(0.010)
    assert row["difference_s"] == pytest.approx(0.010)
    assert row["exposed_s_low"] < 0.010 < row["exposed_s_high"]


def test_hidden_and_exposed_add_up_to_the_all_reduces(tmp_path: Path) -> None:
    law = {"last_gradient_s": 0.08, "straggler": 1, "late_s": 0.004, "noise": 0.2}
    steps = {1: {"step_s": 0.1}, 2: {"step_s": 0.1, "communication": law}}
    exposed = study(tmp_path, GPU, steps, repeat=range(3)).communication.exposed
    assert np.allclose(exposed["hidden_s"] + exposed["exposed_s"], exposed["communication_s"])


def test_a_study_on_one_rank_has_no_breakdown(tmp_path: Path) -> None:
    analysis = study(tmp_path, GPU, {1: {"step_s": 0.1}}, world_size=[1]).communication
    for frame in (
        analysis.breakdown,
        analysis.exposed,
        analysis.slowdown,
        analysis.buckets,
        analysis.sweep,
        analysis.fits,
    ):
        assert frame.empty


def test_the_profiled_window_has_its_own_breakdown(tmp_path: Path) -> None:
    law = {1: {"step_s": 0.1}, 2: {"step_s": 0.1, "communication": {"last_gradient_s": 0.08}}}
    results = study(tmp_path, GPU, law).results
    rows = bucket_rows(
        results.buckets.assign(window="profile"), results.steps.replace("communication", "profile"), results.trials
    )
    assert communication_breakdown(rows, results.windows).empty
    assert len(communication_breakdown(rows, results.windows.replace("communication", "profile"), "profile")) == 1
