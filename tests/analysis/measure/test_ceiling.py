"""The measured all-reduce limit: recovery of known latency and bandwidth, and interpolation between sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.measure.allreduce import fit, fits, limit_seconds, measured_limits, sweep_seconds
from analysis.read.results import Results, load
from tests.support.frames import MIB, grid, write_results

SIZES = np.array([4.0**k for k in range(1, 16)])


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_latency_and_bandwidth_are_recovered(latency_s: float, bandwidth: float) -> None:
    result = fit(SIZES, latency_s + SIZES / bandwidth)
    assert result[0] == pytest.approx(latency_s, rel=1e-3)
    if SIZES[-1] / bandwidth > 0.1 * latency_s:  # otherwise the data does not show the bandwidth
        assert result[1] == pytest.approx(bandwidth, rel=1e-3)


def test_noise_changes_the_fit_by_no_more_than_itself() -> None:
    noise = np.exp(0.05 * np.random.default_rng(1).standard_normal(len(SIZES)))
    latency_s, bandwidth = fit(SIZES, (30e-6 + SIZES / 200e9) * noise)
    assert latency_s == pytest.approx(30e-6, rel=0.05)
    assert bandwidth == pytest.approx(200e9, rel=0.1)


def test_time_per_size_is_the_median_over_repetitions_of_the_mean_over_ranks() -> None:
    sweep = pd.DataFrame(
        [
            {"trial_id": "a", "rank": rank, "bytes": 4, "repetition": repetition, "seconds": seconds}
            for repetition, pair in enumerate([(1.0, 3.0), (9.0, 11.0), (2.0, 6.0)])
            for rank, seconds in enumerate(pair)
        ]
    )
    assert sweep_seconds(sweep).to_dict("records") == [{"trial_id": "a", "bytes": 4, "seconds": 4.0}]


def test_sizes_between_those_of_the_sweep_are_interpolated() -> None:
    sweep = pd.DataFrame({"trial_id": "a", "bytes": [4, 16, 64], "seconds": [1.0, 2.0, 8.0]})
    buckets = pd.DataFrame({"trial_id": ["a", "a", "a", "a", "b"], "bytes": [8, 16, 32, 128, 8]}, index=[3, 1, 4, 9, 2])
    expected = [np.sqrt(2.0), 2.0, 4.0, np.nan, np.nan]
    assert limit_seconds(sweep, buckets).tolist() == pytest.approx(expected, nan_ok=True)


def test_a_bucket_without_bytes_has_no_limit() -> None:
    sweep = pd.DataFrame({"trial_id": "a", "bytes": [4, 16], "seconds": [1.0, 2.0]})
    buckets = pd.DataFrame({"trial_id": "a", "bytes": [0, 16]})
    with np.errstate(all="raise"):
        assert limit_seconds(sweep, buckets).tolist() == pytest.approx([np.nan, 2.0], nan_ok=True)


def study_with_sweep(directory: Path, law: dict[str, Any], **axes: Any) -> Results:
    trials = grid({"device": "cuda", "steps": 2}, **axes)
    return load(
        write_results(directory, trials, lambda _: {"step_s": 0.1, "communication": {"last_gradient_s": 0.09} | law})
    )


def test_busbw_follows_from_algbw_and_trials_of_the_same_ranks_are_pooled(tmp_path: Path) -> None:
    results = study_with_sweep(
        tmp_path,
        {"latency_s": 20e-6, "bandwidth": 100e9},
        world_size=[1, 2, 4],
        batch_per_gpu=[32, 64],
        repeat=range(2),
    )
    result = measured_limits(results.trials, results.sweep)
    assert result["n"].eq(4).all()
    at_25_mib = result[result["bytes"] == 25 * MIB].set_index("world_size")
    algbw = 25 * MIB / (20e-6 + 25 * MIB / 100e9)
    assert at_25_mib["algorithm_bytes_per_s"].tolist() == pytest.approx([algbw, algbw])
    assert at_25_mib["bus_bytes_per_s"].tolist() == pytest.approx([algbw, 1.5 * algbw])
    fitted = fits(result).set_index("world_size")
    assert fitted["latency_s"].tolist() == pytest.approx([20e-6] * 2)
    assert fitted["bus_bytes_per_s"].tolist() == pytest.approx([100e9, 150e9])
    assert fitted["largest_error"].max() < 1e-6


def test_ranks_on_other_gpus_have_their_own_limit(tmp_path: Path) -> None:
    results = study_with_sweep(tmp_path, {}, world_size=[2], repeat=range(2))
    environment = results.trials["environment"].iloc[1]
    environment["ranks"] = [rank | {"gpu_uuid": f"GPU-other-{i}"} for i, rank in enumerate(environment["ranks"])]
    result = measured_limits(results.trials, results.sweep)
    assert sorted(result["place"].unique()) == [1, 2]
    assert result["n"].eq(1).all()


def test_a_fit_reports_its_error() -> None:
    keys = {"interconnect": "auto", "cpus_per_rank": 1, "place": 1, "nodes": 1, "world_size": 2, "n": 1}
    seconds = 10e-6 + SIZES / 1e9
    seconds[5] *= 2
    sweep = pd.DataFrame(keys | {"bytes": SIZES, "seconds": seconds}).assign(
        trial_ids=pd.Series([("a", "b")] * len(SIZES))
    )
    (row,) = fits(sweep).to_dict("records")
    assert 0.3 < row["largest_error"] < 0.5
    assert row["median_error"] < 0.15
    assert fits(sweep[:2]).empty
    assert row["trial_ids"] == ("a", "b")
