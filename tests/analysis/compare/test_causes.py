"""Causes of a slowdown: known laws are recovered, and every cause is counted once."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.compare.causes import CAUSES, SLOWDOWN_PARTS
from analysis.compare.causes import slowdown as causes_of
from analysis.read.results import load
from analysis.study import analyse
from benchmarks.harness.known_law import KnownLaw, write_known_law
from benchmarks.truth.known_laws import LAWS, committed, law_figures, recovered, true_causes
from tests.support.frames import grid, write_results

ROOT = Path(__file__).parent.parent.parent.parent
STUDIES = 2
"""a tenth of those of the benchmark"""


def found(case: str, studies: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the samples of a case, and the values of its figures by the end of their names."""
    samples = list(recovered(case, studies))
    return samples, {figure["name"].removeprefix(case): figure["value"] for figure in law_figures(samples, [case])}


@pytest.mark.parametrize("case", LAWS)
def test_causes_of_a_known_law_are_recovered(case: str) -> None:
    samples, values = found(case, 0)
    assert values[", no noise: largest error"] < 1e-9
    assert values[": late rank named"] == 1
    for sample in samples:
        assert abs(sample["remainder_s"]) < 1e-9
        assert sum(sample["reported"].values()) == pytest.approx(sample["growth_s"])


def test_causes_are_recovered_from_noisy_studies() -> None:
    samples, values = found("everything", STUDIES)
    assert values[", noisy: largest error of a cause, median of studies"] < 0.1
    assert values[": late rank named"] == 1
    for sample in samples:
        assert sum(sample["reported"].values()) + sample["remainder_s"] == pytest.approx(sample["growth_s"])


def test_true_causes_add_up_to_the_growth() -> None:
    law = LAWS["everything"]
    causes = true_causes(law, 8)
    assert sum(causes.values()) == pytest.approx(law.step(8).step_s - law.step(1).step_s)
    assert causes["wait_s"] == law.late_s
    assert causes["load_s"] == law.load_s
    assert causes["slower_compute_s"] == law.slower_compute_s + law.contention_s
    assert causes["host_s"] == pytest.approx(0.0, abs=1e-12)


def test_the_generated_steps_are_those_of_the_audit() -> None:
    """28 ms to the last gradient + 2 ms; rank 2 is late by 6 ms; a ring of 25 GB/s and 30 us a hop."""
    law = KnownLaw(late_rank=2)
    assert [round(1e3 * law.step(ranks).step_s, 2) for ranks in (1, 2, 4, 8, 16)] == [30.0, 30.86, 37.38, 37.82, 38.4]


def test_a_repeated_measurement_of_a_law_has_worker_groups_and_no_noise(tmp_path: Path) -> None:
    write_known_law(tmp_path / "r", KnownLaw(), (1, 2), repeats_per_group=(2, 1))
    results = load(tmp_path / "r")
    assert (
        results.trials.groupby("world_size")["worker_group"].agg(list).map(sorted).tolist()
        == [["group-0", "group-0", "group-1"]] * 2
    )
    assert analyse(results).configurations["step_s"].tolist() == pytest.approx([0.030, 0.03086])


def slowdown(tmp_path: Path, several: dict[str, Any], base: dict[str, Any]) -> pd.Series:
    """Return the row of a study on 1 and 2 ranks from `tests.support.frames`."""
    law = {"last_gradient_s": 0.09, "tail_s": 0.01, "bucket_bytes": [8 * 2**20]}

    def law_of(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.1} if fields["world_size"] == 1 else several | {"communication": law}

    trials = grid({"steps": 4, "cpus_per_rank": 8} | base, world_size=[1, 2])
    [(_, row)] = analyse(
        load(write_results(tmp_path / "r", trials, law_of, spread=0.0))
    ).communication.slowdown.iterrows()
    assert row[list(SLOWDOWN_PARTS)].astype(float).sum() == pytest.approx(row["growth_s"])
    return row


def test_cpu_ranks_have_no_host_and_no_queueing(tmp_path: Path) -> None:
    row = slowdown(tmp_path, {"step_s": 0.1011}, {})
    assert pd.isna(row["host_s"])
    assert row["queueing_s"] == 0
    assert row["transfer_s"] == pytest.approx(0.0011, rel=0.02)


def test_a_longer_copy_counts_as_load(tmp_path: Path) -> None:
    shares = (0.02, 0.05, 0.25, 0.02, 0.59, 0.07)
    row = slowdown(tmp_path, {"step_s": 0.1, "shares": shares}, {"device": "cuda"})
    assert row["load_s"] == pytest.approx(0.004, rel=0.01)


def test_a_host_without_kernel_times_counts_by_its_time_to_issue(tmp_path: Path) -> None:
    trials = write_known_law(tmp_path / "r", KnownLaw(host_s=0.034), (1, 2), repeats_per_group=(1,))
    results = load(trials)
    without = results.steps[results.steps["window"] != "busy"]
    analysis = analyse(type(results)(results.study, results.trials, without, results.buckets, results.sweep))
    [(_, row)] = analysis.communication.slowdown.iterrows()
    assert row["host_bound"]
    assert row["host_s"] == pytest.approx(0.004)
    assert abs(row["remainder_s"]) < 1e-9


def test_a_difference_between_windows_is_a_remainder_only_in_its_compute(tmp_path: Path) -> None:
    """A slow network in the plain window scales transfers; slow compute there stays unexplained."""
    law = KnownLaw(bandwidth=1e9)
    directory = write_known_law(tmp_path / "r", law, (1, 2), repeats_per_group=(1,))
    results = load(directory)
    plain = (results.steps["window"] == "plain") & results.steps["trial_id"].str.contains("n1x2")
    results.steps.loc[plain, "window_s"] *= 1.1
    [(_, row)] = analyse(results).communication.slowdown.iterrows()
    step = law.step(2)
    exposed_s = float(step.end_s[-1] - step.last_gradient_s[0])
    assert row["transfer_s"] + row["queueing_s"] == pytest.approx(1.1 * exposed_s)
    assert row["remainder_s"] == pytest.approx(0.1 * (step.step_s - exposed_s))


def test_slower_compute_of_a_script_is_that_of_its_phases(tmp_path: Path) -> None:
    """Its steps without communication are unknown, and the instruments of both phases windows cost the same."""
    law = KnownLaw(slower_compute_s=0.004)
    results = load(write_known_law(tmp_path / "r", law, (1, 2), repeats_per_group=(1,)))
    without = results.steps[~results.steps["window"].isin(["synchronised", "no_sync"])].copy()
    without.loc[without["window"] == "phases", "step_s"] += 0.001
    analysis = analyse(type(results)(results.study, results.trials, without, results.buckets, results.sweep))
    [(_, row)] = analysis.communication.slowdown.iterrows()
    true = true_causes(law, 2)
    assert row["slower_compute_s"] == pytest.approx(true["slower_compute_s"], rel=0.05)
    assert row["transfer_s"] == pytest.approx(true["transfer_s"])
    assert abs(row["remainder_s"]) < 0.05 * row["growth_s"]


def test_kernel_time_is_known_of_a_step_without_a_function_after_the_backward_pass(tmp_path: Path) -> None:
    results = load(write_known_law(tmp_path / "r", KnownLaw(host_s=0.034), (1, 2), repeats_per_group=(1,)))
    assert results.steps["after_backward_s"].isna().all()
    [kernel_s] = analyse(results).communication.exposed["kernel_s"]
    assert kernel_s == pytest.approx(KnownLaw().step(1).step_s)


def test_committed_series_that_are_not_host_bound_have_small_remainders() -> None:
    rows = list(committed(("captured",), ROOT / "benchmarks" / "results"))
    shares = [abs(row["remainder_s"]) / row["growth_s"] for row in rows]
    assert len(shares) >= 8
    assert np.median(shares) < 0.05
    assert max(shares) < 0.12
    assert all(set(row["causes"]) == set(CAUSES) for row in rows)


def test_bursts_of_loaders_are_load_although_the_other_windows_miss_them() -> None:
    """Two ranks of 20 ms wait in turn: 10 ms of a step for batches, and 4 ms for a late rank. One rank waits for 2 ms.

    The communication and interleaved windows are short and see no burst.
    """
    measured = {"host_to_device_s": 0.0, "host_bound": None, "busy_s": np.nan, "step_launch_s": np.nan}
    configurations = pd.DataFrame(
        [
            measured | {"step_s": 0.022, "phases_step_s": 0.022, "longest_load_wait_s": 0.002},
            measured | {"step_s": 0.034, "phases_step_s": 0.034, "longest_load_wait_s": 0.010},
        ]
    )
    exposed = pd.DataFrame(
        {
            "exposed_wire_s": [0.0], "exposed_queueing_s": [0.0], "exposed_wait_s": [0.004], "lateness_s": [0.004],
            "communication_step_s": [0.024], "synchronised_step_s": [0.024], "no_sync_step_s": [0.020],
            "kernel_s": [np.nan], "traced": [0], "hidden_lateness_s": [0.0],
        },
        index=[1],
    )  # fmt: skip
    pairs = pd.DataFrame({"configuration": [1], "reference": [0], "world_size": [2], "reference_world_size": [1]})
    [(_, row)] = causes_of(exposed, configurations, pairs).iterrows()
    assert row["growth_s"] == pytest.approx(0.012)
    assert row["load_s"] == pytest.approx(0.008)
    assert row["wait_s"] == pytest.approx(0.004)
    assert row["slower_compute_s"] == pytest.approx(0.0, abs=1e-12)
    assert row["remainder_s"] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("alone_s", "wait_s", "host_s"), [(0.030, 0.0, -0.002), (0.024, 0.004, 0.0)])
def test_a_rank_that_waits_for_another_does_not_wait_for_its_host_meanwhile(
    alone_s: float, wait_s: float, host_s: float
) -> None:
    """Two host-bound ranks with kernels of 20 ms wait 4 ms for each other and 4 ms for the host, in 28 ms."""
    measured = {"host_to_device_s": 0.0, "host_bound": True, "busy_s": 0.02, "longest_load_wait_s": 0.0}
    steps = [{"step_s": step_s, "phases_step_s": step_s, "step_launch_s": step_s} for step_s in (alone_s, 0.028)]
    configurations = pd.DataFrame([measured | step for step in steps])
    exposed = pd.DataFrame(
        {
            "exposed_wire_s": [0.0], "exposed_queueing_s": [0.0], "exposed_wait_s": [0.004], "lateness_s": [0.004],
            "communication_step_s": [0.028], "synchronised_step_s": [0.028], "no_sync_step_s": [0.024],
            "kernel_s": [0.02], "traced": [0], "hidden_lateness_s": [0.0],
        },
        index=[1],
    )  # fmt: skip
    pairs = pd.DataFrame({"configuration": [1], "reference": [0], "world_size": [2], "reference_world_size": [1]})
    [(_, row)] = causes_of(exposed, configurations, pairs).iterrows()
    assert row["growth_s"] == pytest.approx(0.028 - alone_s)
    assert (row["wait_s"], row["host_s"]) == pytest.approx((wait_s, host_s))
    assert row["slower_compute_s"] == pytest.approx(0.0, abs=1e-12)
    assert row["remainder_s"] == pytest.approx(0.0, abs=1e-12)
