"""The arithmetic and the registry of the benchmarks. Their measurements are not tested."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.all import NEED_ROOT, SMALL
from benchmarks.cost.clock import PARTS, start_times
from benchmarks.cost.start import components
from benchmarks.harness.common import abba_ratio
from benchmarks.harness.sides import BlockRates
from benchmarks.truth.stopping import generated, replayed, resampled

ROOT = Path(__file__).parent.parent.parent


def test_every_benchmark_has_a_small_form() -> None:
    programs = {
        f"{path.parent.name}.{path.stem}"
        for path in (ROOT / "benchmarks").glob("*/*.py")
        if "parse_args(" in path.read_text()
    }
    assert programs - {"all", *NEED_ROOT} == set(SMALL)


def test_packed_results_name_the_code_that_ran_relative_to_the_project() -> None:
    """A path of one machine would say nothing elsewhere."""
    absolute = []
    for path in (ROOT / "benchmarks" / "results").rglob("trials.parquet"):
        names = pq.read_schema(path).names
        columns = [f"trial.{name}" for name in ("script", "train_function", "workload") if f"trial.{name}" in names]
        for row in pq.read_table(path, columns=columns).to_pylist():
            absolute += [f"{path}: {value}" for value in row.values() if Path(str(value).strip('"')).is_absolute()]
    assert absolute == []


def test_the_ratio_cancels_a_steady_drift() -> None:
    # A B B A twice; each block is 1 % slower than the previous one, and A is twice as fast
    speeds = [0.99**block for block in range(8)]
    blocks = BlockRates({"ours": [2 * speeds[i] for i in (0, 3, 4, 7)], "bare": [speeds[i] for i in (1, 2, 5, 6)]})
    ratio, (low, high) = blocks.ratio()
    assert ratio == pytest.approx(2.0)
    assert low == pytest.approx(high)


def test_an_interval_over_process_starts_includes_their_variation() -> None:
    noise = np.random.default_rng(0)
    missed = {1: 0, 4: 0}
    for _ in range(300):
        of_starts = np.repeat(noise.normal(0, 0.05, 5), 4)  # 5 % between processes, 0.5 % between runs of one
        ours = np.exp(np.repeat(of_starts, 2) + noise.normal(0, 0.005, 40))
        for together in missed:
            _, (low, high) = abba_ratio(list(ours), [1.0] * 40, together)
            missed[together] += not low <= 1 <= high
    assert missed[4] / 300 == pytest.approx(0.05, abs=0.04)
    assert missed[1] / 300 > 0.2


def test_the_parts_of_the_start_add_up_to_the_total() -> None:
    times = {"process_began_at": 100.0, "ray_asked_at": 101.0, "connected_at": 104.0}
    names = ("process_began", "loop_began", "imported", "context", "grouped", "rehearsed")
    startup = [{f"{name}_at": 106.0 + number + late for number, name in enumerate(names)} for late in (0.0, 0.25)]
    first = {"environment": {"startup": startup, "group": {"asked_at": 105.0}}, "started_at": 113.0}
    known = start_times(times, first)
    assert known["imported"] == 108.25, "that of the slowest rank"
    assert sum(known[ends] - known[begins] for _, begins, ends in PARTS) == 13.0


def test_the_spread_between_launches_is_separated_from_that_between_their_groups() -> None:
    noise = np.random.default_rng(3)
    of_launches = noise.normal(0, 0.03, (400, 1))
    between, within = components((of_launches + noise.normal(0, 0.01, (400, 5))).tolist())
    assert (between, within) == (pytest.approx(0.03, rel=0.1), pytest.approx(0.01, rel=0.1))
    between, within = components(noise.normal(0, 0.01, (400, 5)).tolist())
    assert between < 0.003 and within == pytest.approx(0.01, rel=0.1)


def test_a_replay_of_steady_steps_stops_early_with_a_valid_interval() -> None:
    rng = np.random.default_rng(1)
    steady, unsteady = (
        replayed(generated(rng, 300, 100, 0.0, spread), np.zeros(300), width=0.01) for spread in (0.001, 0.2)
    )
    assert steady["steps_share"] == 0.26, "five blocks and the step before them"
    assert unsteady["steps_share"] == 1.05
    assert steady["coverage"] >= 0.95 <= unsteady["coverage"]
    assert steady["fixed_error"] == pytest.approx(steady["error"])


def test_generated_steps_have_the_requested_autocorrelation() -> None:
    logs = generated(np.random.default_rng(2), 400, 100, 0.8, 0.01)
    assert np.corrcoef(logs[:, :-1].ravel(), logs[:, 1:].ravel())[0, 1] == pytest.approx(0.8, abs=0.02)
    assert logs.std() == pytest.approx(0.01, rel=0.05)


def test_recorded_steps_are_resampled_in_contiguous_pieces() -> None:
    logs = np.arange(50.0)
    drawn = resampled(np.random.default_rng(3), logs, series=4, steps=23)
    assert drawn.shape == (4, 23)
    within = np.diff(drawn, axis=1)[:, [i for i in range(22) if (i + 1) % 5]]
    assert set(np.unique(within % 50)) == {1.0}
    assert math.isfinite(drawn.sum())
