"""Predictions: recovery of a known law, held-out errors, intervals, and the messages if nothing can be predicted."""

import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.figures.predictions import prediction_fan
from analysis.predict.fit import Spread, pool
from analysis.predict.forecast import (
    FORECAST_COLUMNS,
    HOST_BOUND,
    LOADING_BOUND,
    MEASURED,
    NETWORK,
    NO_SCALING,
    NOT_RESOLVED,
    PredictionError,
    forecast,
    stated_link,
)
from analysis.predict.inputs import ReportInputs, with_models
from analysis.predict.intervals import LAW_ERROR
from analysis.predict.laws import LAWS, Link, expected_largest, ring_factor, ring_s, two_level_s
from analysis.predict.model import NO_REPEATS, models, models_of, predict, without
from analysis.predict.series import Interconnects, ScalingSeries, series_of
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.study import analyse
from analysis.tables.predictions import forecast_table, law_parameters, laws, predictions
from study.scaling import main
from tests.support.frames import MIB, grid, record, steps, trial_id, write_results, write_study, write_trial
from tests.support.report import show_figures

GPU = {"device": "cuda", "dataset": "synthetic", "steps": 4, "warmup_steps": 2, "cpus_per_rank": 8}
UNKNOWN = Spread(float("nan"), 0.0)
NO_BREAKDOWN = pd.DataFrame(columns=["world_size", "wire_s", "wait_s", "late_rank"])
NO_TRANSFERS = pd.DataFrame(
    columns=["world_size", "nodes", "bucket", "bytes", "wire_s", "ready_before_s", "in_order"],
)
NO_FITS = pd.DataFrame(columns=["nodes", "world_size", "latency_s", "bus_bytes_per_s"])


def ring_law(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a step of 10 ms plus 0.2 ms per sample, and an exposed all-reduce of 3 ms on two ranks."""
    return {"step_s": 0.010 + 0.0002 * fields["batch_per_gpu"] + 0.003 * float(ring_factor(fields["world_size"]))}


def study(directory: Path, law: Callable[[dict[str, Any]], dict[str, Any]] = ring_law, **axes: Any) -> ReportInputs:
    axes = {"world_size": [1, 2, 4], "batch_per_gpu": [32, 128], "repeat": range(3)} | axes
    return with_models(analyse(load(write_results(directory, grid(GPU, **axes), law, spread=0.004))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of 1, 2 and 4 GPUs x 2 batches x 3 repeats that follows `ring_law`. Tests only add reports."""
    directory = tmp_path_factory.mktemp("plain") / "results"
    study(directory)
    return directory


@pytest.fixture(scope="module")
def plain(folder: Path) -> ReportInputs:
    return with_models(analyse(load(folder)))


def series(
    steps_s: dict[int, float],
    spread: float = 0.0,
    repeats: int | Sequence[int] = 3,
    batch: int = 32,
    rng: np.random.Generator | None = None,
) -> ScalingSeries:
    """Return a weak-scaling series as made by `series_of`. Repeats spread by e^±spread.

    repeats: of every point, or one number per point.
    """
    rng = rng or np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    counts = [repeats] * len(steps_s) if isinstance(repeats, int) else repeats
    for (size, step_s), count in zip(steps_s.items(), counts, strict=True):
        runs = np.log(step_s) + spread * rng.standard_normal(count)
        rows.append(
            {
                "configuration": len(rows), "world_size": size, "nodes": 1, "batch_per_gpu": batch,
                "log_step": runs.mean(), "step_s": np.exp(runs.mean()),
                "throughput_samples_per_s": size * batch / np.exp(runs.mean()), "n": count,
                "variance": runs.var(ddof=1) if count > 1 else np.nan, "degrees": count - 1, "host_bound": None,
            }
        )  # fmt: skip
    return ScalingSeries("weak", {}, pd.DataFrame(rows), batch, np.nan, np.nan, NO_FITS, NO_BREAKDOWN, NO_TRANSFERS)


# --------------------------------------------------------------------------------------------------- series


def test_a_series_holds_either_the_batch_or_the_global_batch(tmp_path: Path) -> None:
    weak = series_of(study(tmp_path / "weak"))
    assert [(s.scaling, s.base_batch, s.sizes) for s in weak] == [("weak", 32, [1, 2, 4]), ("weak", 128, [1, 2, 4])]
    trials = [{"world_size": size, "batch_per_gpu": 128 // size} for size in (1, 2, 4)]
    grids = [fields for trial in trials for fields in grid(GPU | trial, repeat=range(2))]
    strong = series_of(with_models(analyse(load(write_results(tmp_path / "strong", grids, ring_law)))))
    assert [(s.scaling, s.base_batch, s.sizes) for s in strong] == [("strong", 128, [1, 2, 4])]
    assert strong[0].at([8]).batch_per_gpu.tolist() == [16]


def test_series_over_an_emulated_interconnect_use_the_one_rank_measured_without(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2, 4], repeat=range(2))
    trials += grid(GPU | {"interconnect": "socket", "steps": 5}, world_size=[2, 4])
    write_study(tmp_path)
    for fields in trials:
        name = f"{trial_id(fields)}-{fields['interconnect']}"
        slow = 5.0 if fields["interconnect"] == "socket" else 1.0
        write_trial(tmp_path, record(fields) | {"trial_id": name}, steps(fields, slow * ring_law(fields)["step_s"]))
    found = series_of(with_models(analyse(load(tmp_path))))
    assert [(s.interconnect, s.sizes) for s in found] == [("auto", [1, 2, 4]), ("socket", [1, 2, 4])]
    assert found[1].points["step_s"].iloc[0] == pytest.approx(ring_law(trials[0])["step_s"])


def test_the_all_reduce_of_a_series_follows_from_sweep_and_buckets(tmp_path: Path) -> None:
    measured = {"last_gradient_s": 0.01, "latency_s": 6e-5, "bandwidth": 100e9, "bucket_bytes": (40 * MIB, 24 * MIB)}
    found = study(tmp_path, lambda fields: ring_law(fields) | {"communication": dict(measured)}, batch_per_gpu=[32])
    [one] = series_of(found)
    assert (one.gradient_bytes, one.buckets) == (64 * MIB, 2)
    # from the sweep on 4 ranks: 6 hops, and bytes / seconds = busbw / 1.5
    link = one.links.inside
    assert link is not None
    assert (link.latency_s, link.bus_bytes_per_s) == (pytest.approx(1e-5, rel=1e-3), pytest.approx(150e9, rel=1e-3))
    assert one.measured.wire_s == pytest.approx(
        [0, *(float(ring_s(n, 64 * MIB, Link(1e-5, 150e9, ""), 2)) for n in (2, 4))], rel=1e-3
    )
    assert one.only([1, 2]).fits["world_size"].tolist() == [2], "what is held out has not been swept either"


def of_two(wire_s: float, wait_s: float, late_rank: float = np.nan) -> pd.DataFrame:
    """Return a communication breakdown on 2 ranks."""
    return pd.DataFrame({"world_size": [2], "wire_s": [wire_s], "wait_s": [wait_s], "late_rank": [late_rank]})


def growth_of(one: ScalingSeries, *sizes: int) -> list[float]:
    growth = one.at(sizes).growth
    assert growth is not None
    return [float(value) for value in growth]


def test_the_communication_breakdown_splits_the_growth_of_the_step() -> None:
    exposed = pd.DataFrame(
        {"world_size": [2, 4], "wire_s": [0.001, 0.0015], "wait_s": [0.0005, 0.001], "late_rank": [np.nan, np.nan]}
    )
    one = replace(series({1: 0.020, 2: 0.024, 4: 0.0265}), exposed=exposed)
    parts = one.breakdown
    assert parts is not None
    assert (parts.world_size, parts.wire_s, parts.wait_s) == (4, pytest.approx(0.0015), pytest.approx(0.001))
    assert parts.host_s == pytest.approx(0.0065 - 0.0015 - 0.001)
    rest = one.only([1, 2]).breakdown
    assert rest is not None
    assert (rest.host_s, rest.wait_s, rest.wire_s) == pytest.approx((0.004 - 0.0015, 0.0005, 0.001))
    # a breakdown that exposes more than the plain step grew
    busier = replace(one, exposed=exposed.assign(wire_s=[0.01, 0.015], wait_s=[0.005, 0.01])).only([1, 2]).breakdown
    assert busier is not None
    assert (busier.host_s, busier.wait_s, busier.wire_s) == pytest.approx((0, 0.004 / 3, 0.004 * 2 / 3))
    assert replace(one, points=one.points.iloc[1:]).breakdown is None


def test_every_part_of_the_breakdown_grows_by_its_own_law() -> None:
    one = series({1: 0.020, 2: 0.024})
    assert growth_of(replace(one, exposed=of_two(0.0, 0.0)), 1, 2, 4) == [0, 1, 1]
    assert growth_of(replace(one, exposed=of_two(0.004, 0.0)), 1, 2, 4) == pytest.approx([0, 1, 1.5])
    spread = 1.02938 / 0.56419  # expected largest of 4 and of 2 ranks
    assert growth_of(replace(one, exposed=of_two(0.0, 0.004)), 1, 2, 4) == pytest.approx([0, 1, spread], rel=1e-4)
    mixed = growth_of(replace(one, exposed=of_two(0.001, 0.001)), 4)
    assert mixed == [pytest.approx((0.002 + 0.0015 + 0.001 * spread) / 0.004, rel=1e-4)]
    assert growth_of(replace(one, exposed=of_two(0.0, 0.004, late_rank=1)), 1, 2, 64) == [0, 1, 1], (
        "always the same rank"
    )


def test_a_rank_that_is_always_late_costs_nothing_where_it_does_not_take_part() -> None:
    # rank 2 is 4 ms late
    exposed = pd.DataFrame({"world_size": [4], "wire_s": [0.0], "wait_s": [0.004], "late_rank": [2.0]})
    one = replace(series({1: 0.020, 2: 0.020, 4: 0.024}), exposed=exposed)
    [model] = models_of([one])
    assert model.law == "breakdown"
    assert model.chosen.step_s(one.at([2, 4, 64])) == pytest.approx([0.020, 0.024, 0.024])


def test_exposed_transfers_grow_with_the_buckets_that_are_no_longer_hidden() -> None:
    # on two ranks the first bucket ends 1 ms before the last gradient, and the last one's 2 ms show
    buckets = pd.DataFrame({"bucket": [0, 1], "bytes": [90e6, 20e6], "wire_s": [0.009, 0.002]})
    buckets = buckets.assign(ready_before_s=[0.010, 0.0], world_size=2, nodes=1, in_order=True)
    one = replace(series({1: 0.020, 2: 0.022}), exposed=of_two(0.002, 0.0), transfers=buckets)
    # on four, 13.5 ms from 10 ms before that gradient on, and then 3 ms; on 64, 63 / 32 of 11 ms less the 10
    assert growth_of(one, 4, 64) == pytest.approx([0.0065 / 0.002, (0.011 * 63 / 32 - 0.010) / 0.002])
    overlapping = replace(one, transfers=buckets.assign(in_order=False))
    assert growth_of(overlapping, 4) == [pytest.approx(0.0035 / 0.002)], "the first ends last"
    # global batch 32: half the batch per rank leaves half the time before the last gradient; 10 ms are not transfers
    strong = replace(overlapping, scaling="strong")
    assert growth_of(strong, 4) == [pytest.approx((0.010 + 0.0135 - 0.005) / 0.012)]


def test_buckets_grow_by_the_latency_and_bandwidth_of_the_sweep() -> None:
    # 100 µs per hop and 100 GB/s: 10 MB take 0.3 ms on 2 ranks and 0.75 ms on 4
    fits = pd.DataFrame({"nodes": [1], "world_size": [2], "latency_s": [2e-4], "bus_bytes_per_s": [100e9]})
    buckets = pd.DataFrame({"bucket": [0], "bytes": [10e6], "wire_s": [0.0006], "ready_before_s": [0.0]})
    buckets = buckets.assign(world_size=2, nodes=1, in_order=True)
    one = replace(series({1: 0.020, 2: 0.0206}), exposed=of_two(0.0006, 0.0), transfers=buckets, fits=fits)
    assert growth_of(one, 2, 4) == pytest.approx([1.0, 0.75 / 0.3])
    network = pd.DataFrame({"nodes": [2], "world_size": [4], "latency_s": [6e-4], "bus_bytes_per_s": [10e9]})
    wider = replace(one, fits=pd.concat([fits, network]))
    growth = wider.at([4], [2]).growth
    assert growth is not None
    assert growth.tolist() == [pytest.approx((0.6 + 1.5) / 0.3)], "over two nodes: the network that was swept there"


def test_a_series_has_the_buckets_of_its_communication_breakdown(tmp_path: Path) -> None:
    measured = {"last_gradient_s": 0.01, "latency_s": 6e-5, "bandwidth": 100e9, "bucket_bytes": (40 * MIB, 24 * MIB)}
    found = study(tmp_path, lambda fields: ring_law(fields) | {"communication": dict(measured)}, batch_per_gpu=[32])
    [one] = series_of(found)
    assert one.transfers["world_size"].tolist() == [2, 2, 4, 4]
    assert one.transfers["bucket"].tolist() == [0, 1, 0, 1]
    assert one.transfers["wire_s"].gt(0).all()
    assert one.transfers["in_order"].all()
    assert one.only([1, 2]).transfers["world_size"].tolist() == [2, 2]


# ------------------------------------------------------------------------------------------------- weighted laws


@pytest.mark.parametrize(
    ("law", "growth"),
    [
        ("ring", lambda n: 0.004 * ring_factor(n)),
        ("offset", lambda n: 0.004 * (n > 1)),
        ("straggler", lambda n: 0.004 * expected_largest(np.array([n]))[0]),
    ],
)
def test_the_generating_law_weighs_most_and_predicts_the_steps(law: str, growth: Callable[[int], float]) -> None:
    rng = np.random.default_rng(1)
    made = [series({n: 0.020 + float(growth(n)) for n in (1, 2, 4, 8)}, 0.002, rng=rng) for _ in range(3)]
    for model in models_of(made, {False: pool(*(one.spread() for one in made)), True: UNKNOWN}):
        assert model.law == law
        assert abs(model.held_out_error) < 0.03
        row = predict(model, [64]).iloc[0]
        true = 0.020 + float(growth(64))
        assert row["step_s"] == pytest.approx(true, rel=0.05)
        assert row["step_s_low"] < true < row["step_s_high"]


def test_held_out_and_naive_errors_are_those_of_the_largest_number_of_ranks() -> None:
    [model] = models_of([series({1: 0.020, 2: 0.024, 4: 0.026})])
    tests = model.law_table().set_index("law")
    assert set(tests["held_out_world_size"]) == {4}
    assert tests.loc["ring", "held_out_error"] == pytest.approx(0.0, abs=1e-6)
    assert tests.loc["offset", "held_out_error"] == pytest.approx(0.024 / 0.026 - 1, rel=1e-4)
    straggler_s = 0.020 + 0.004 * 1.02938 / 0.56419
    assert tests.loc["straggler", "held_out_error"] == pytest.approx(straggler_s / 0.026 - 1, rel=1e-4)
    assert tests.loc["alpha_beta", "reason"] == "not identifiable: needs 1 more point"
    # two points cannot tell these laws apart, so each has the same weight in the held-out prediction
    average_s = (0.026 * 0.024 * straggler_s) ** (1 / 3)
    assert model.held_out_error == pytest.approx(average_s / 0.026 - 1, rel=1e-3)
    assert model.naive_error == pytest.approx(0.020 / 0.026 - 1)
    assert model.beats_naive
    assert model.law == "ring", "which all points decide"


def test_the_held_out_size_does_not_decide_its_own_prediction() -> None:
    steps_s = {1: 0.020, 2: 0.024, 4: 0.026}
    [one], [other] = (models_of([series(steps_s | {4: step_s})]) for step_s in (0.026, 0.040))
    predicted_s = [(1 + model.held_out_error) * step_s for model, step_s in ((one, 0.026), (other, 0.040))]
    assert predicted_s[0] == pytest.approx(predicted_s[1], rel=1e-6)


def test_a_second_node_is_predicted_by_the_laws_that_know_its_network() -> None:
    # 4 ranks per node; 200 MB in one bucket, all of it after the last gradient
    inside, network = Link(1e-5, 100e9, ""), Link(5e-5, 10e9, "")
    rows = [(1, 2, inside), (1, 4, inside), (2, 8, network)]
    fits = pd.DataFrame(
        {
            "nodes": [nodes for nodes, _, _ in rows],
            "world_size": [size for _, size, _ in rows],
            "latency_s": [link.latency_s * 2 * (size - 1) for _, size, link in rows],
            "bus_bytes_per_s": [link.bus_bytes_per_s for _, _, link in rows],
        }
    )
    wire_s = {size: float(ring_s(size, 200e6, network if size > 4 else inside)) for size in (1, 2, 4, 8, 16)}
    layout = pd.DataFrame({"world_size": [2, 4, 8], "nodes": [1, 1, 2]})
    exposed = layout.assign(wire_s=[wire_s[n] for n in (2, 4, 8)], wait_s=0.0, late_rank=np.nan).drop(columns="nodes")
    transfers = layout.assign(bucket=0, bytes=200e6, wire_s=exposed["wire_s"], ready_before_s=0.0, in_order=True)
    plain = series({size: 0.020 + wire_s[size] for size in (1, 2, 4, 8)})
    plain = replace(plain, points=plain.points.assign(nodes=[1, 1, 1, 2]), fits=fits, gradient_bytes=200e6, buckets=1)
    one = replace(plain, exposed=exposed, transfers=transfers)
    assert one.only([1, 2, 4]).fits["world_size"].tolist() == [2, 4, 8], "a sweep over more nodes is no training step"
    [model] = models_of([one])
    assert model.held_out_error == pytest.approx(0.0, abs=0.01)
    row = predict(model, [16], nodes=[4]).iloc[0]
    assert row["step_s"] == pytest.approx(0.020 + wire_s[16], rel=0.01)
    assert row["step_s_low"] < 0.020 + wire_s[16] < row["step_s_high"]
    assert row["step_s_high"] / row["step_s_low"] < 1.2


def test_a_network_helps_no_law_without_the_size_of_the_gradients() -> None:
    fits = pd.DataFrame({"nodes": [2], "world_size": [4], "latency_s": [6e-4], "bus_bytes_per_s": [10e9]})
    [model] = models_of([replace(series({1: 0.020, 2: 0.024}), fits=fits)])
    assert model.series.knows_network
    assert not model.knows_network(4, 2)
    assert model.knows_network(4, 1)


def test_with_two_numbers_of_ranks_the_interval_spans_the_laws() -> None:
    [model] = models_of([series({1: 0.020, 2: 0.024}, 0.001)])
    assert model.held_out is None
    assert np.isnan(model.held_out_error)
    assert model.beats_naive is None
    row = predict(model, [8]).iloc[0]
    # from no growth at all to that of a straggler
    assert row["step_s_low"] < 0.0242
    assert row["step_s_high"] > 0.0298


def test_intervals_widen_with_the_distance_from_the_measured_sizes() -> None:
    rng = np.random.default_rng(2)
    [model] = models_of([series({n: 0.020 + 0.001 * n for n in (1, 2, 4)}, 0.003, rng=rng)])
    rows = predict(model, [4, 8, 16, 64])
    assert (rows["step_s_high"] / rows["step_s_low"]).is_monotonic_increasing
    assert (rows["efficiency_low"] < rows["efficiency"]).all()
    assert rows["efficiency"].iloc[0] == pytest.approx(
        rows["throughput_samples_per_s"].iloc[0] / 4 / model.series.points["throughput_samples_per_s"].iloc[0]
    )


def step_of_a_law(law: str, size: int, cost_s: float) -> float:
    """Return the step time on `size` ranks of a law with 20 ms on one rank."""
    ring = float(ring_factor(size))
    return (
        0.020
        + {
            "ring": cost_s * ring,
            "straggler": cost_s * float(expected_largest(np.array([size]))[0]),
            "alpha_beta": cost_s * (0.5 * ring + 0.2 * (size - 1)),
        }[law]
    )


@pytest.mark.parametrize("law", ["ring", "straggler", "alpha_beta"])
def test_prediction_intervals_have_the_stated_coverage(law: str) -> None:
    rng = np.random.default_rng(3)
    inside, widths = [], []
    sizes = (1, 2, 4, 8) if law == "alpha_beta" else (1, 2, 4)
    for _ in range(30):
        cost = float(rng.uniform(0.002, 0.006))
        made = [series({n: step_of_a_law(law, n, cost) for n in sizes}, 0.01, 5, rng=rng)]
        [model] = models_of(made, {False: made[0].spread(), True: UNKNOWN})
        run = step_of_a_law(law, 2 * sizes[-1], cost) * np.exp(0.01 * rng.standard_normal())
        row = predict(model, [2 * sizes[-1]]).iloc[0]
        inside.append(row["step_s_low"] <= run <= row["step_s_high"])
        widths.append(np.log(row["step_s_high"] / row["step_s_low"]) / 2)
    assert np.mean(inside) >= 0.9
    assert np.median(widths) < (0.08 if law == "ring" else 0.15)  # a run alone has 2 %


def test_a_size_is_predicted_as_if_it_had_not_been_measured() -> None:
    found = models_of([series({1: 0.020, 2: 0.024, 4: 0.5, 8: 0.027})])
    [rest] = without(found, 4, NO_REPEATS)
    assert rest.series.sizes == [1, 2, 8]
    assert predict(rest, [4])["step_s"].iloc[0] == pytest.approx(0.026, rel=1e-2)
    assert without(models_of([series({1: 0.020, 2: 0.024})]), 2, NO_REPEATS) == []


def test_held_out_errors_of_similar_series_update_what_other_studies_say_of_the_laws() -> None:
    [exact] = models_of([series({1: 0.020, 2: 0.024, 4: 0.0257})])
    assert exact.held_out is not None
    assert exact.held_out.error**2 < exact.held_out.noise, "as good as a run can tell"
    assert exact.law_error == pytest.approx(LAW_ERROR.variance * 8 / 9, rel=1e-6)
    [wrong] = models_of([series({1: 0.020, 2: 0.024, 4: 0.040})])
    assert exact.law_error == pytest.approx(LAW_ERROR.variance * 8 / 9, rel=1e-6), "as good as a run can tell"
    assert wrong.held_out is not None
    excess = np.log1p(wrong.held_out.error) ** 2 - wrong.held_out.noise
    assert wrong.law_error == pytest.approx((8 * LAW_ERROR.variance + excess) / 9)


# --------------------------------------------------------------------------------------------------- studies


def test_a_study_with_trials_that_failed_gives_back_its_law(tmp_path: Path) -> None:
    trials = grid(GPU, world_size=[1, 2, 4], batch_per_gpu=[32, 128], repeat=range(4))
    missing = [t for t in trials if t["repeat"] > 1 and t["world_size"] == 2]
    write_results(tmp_path, [t for t in trials if t not in missing], ring_law, spread=0.003, noise=0.002)
    write_trial(tmp_path, record(missing[0], "failed", "rank 1 died"))
    write_trial(tmp_path, record(grid(GPU, world_size=[4], batch_per_gpu=[512])[0], "out_of_memory", "rank 0"))
    found = models(with_models(analyse(load(tmp_path))))
    assert [model.law for model in found] == ["ring", "ring"]
    for model, alone in zip(found, (0.0164, 0.0356), strict=True):
        (low, high), (cost_low, cost_high) = model.chosen.intervals()
        assert low < alone < high
        assert cost_low < 0.003 < cost_high


def test_a_strong_series_is_predicted_at_the_batch_that_is_left(tmp_path: Path) -> None:
    trials = [{"world_size": size, "batch_per_gpu": 256 // size} for size in (1, 2, 4)]
    grids = [fields for trial in trials for fields in grid(GPU | trial, repeat=range(2))]

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        return {"step_s": 0.0002 * fields["batch_per_gpu"] + 0.003 * float(ring_factor(fields["world_size"]))}

    found = with_models(analyse(load(write_results(tmp_path, grids, law, spread=0.001))))
    row = forecast(found, [8]).rows.iloc[0]
    assert (row["batch_per_gpu"], row["global_batch"]) == (32, 256)
    assert row["step_s"] == pytest.approx(0.0002 * 32 + 0.003 * 1.75, rel=0.02)


def test_accumulated_samples_count_in_weak_scaling(tmp_path: Path) -> None:
    found = study(tmp_path, batch_per_gpu=[32], accumulation_steps=[4])
    row = forecast(found, [8]).rows.iloc[0]
    assert (row["batch_per_gpu"], row["global_batch"]) == (32, 8 * 32 * 4)
    assert row["throughput_samples_per_s"] == pytest.approx(8 * 32 * 4 / row["step_s"])
    alone_s = ring_law({"batch_per_gpu": 32, "world_size": 1})["step_s"]
    assert row["efficiency"] == pytest.approx(alone_s / row["step_s"], rel=0.02)


def test_cost_follows_from_time(plain: ReportInputs) -> None:
    row = forecast(plain, [8], price_per_gpu_hour=3.0).rows.iloc[0]
    assert row["cost_per_million_samples"] == pytest.approx(3.0 * 8 * 1e6 / row["throughput_samples_per_s"] / 3600)
    assert np.isnan(forecast(plain, [8]).rows.iloc[0]["cost_per_million_samples"])


def test_energy_follows_from_power_and_is_null_if_a_gpu_was_not_read(tmp_path: Path) -> None:
    axes: dict[str, Any] = {"world_size": [1, 2, 4], "batch_per_gpu": [128], "repeat": range(2)}
    results = load(write_results(tmp_path, grid(GPU | {"steps": 100}, **axes), ring_law))
    for ranks in (environment["ranks"] for environment in results.trials["environment"]):
        for rank in ranks:  # 612 W, but 412 W a GPU on fewer than 4; on 4, 100 steps take 4 s
            joules = 4.1 * (612.0 if len(ranks) == 4 else 412.0)
            rank["plain_window"] = {
                "before": [{"energy_j": 0.0, "at": 0.0}],
                "after": [{"energy_j": joules, "at": 4.1}],
            }
    found = forecast(with_models(analyse(results)), [8])
    row = found.rows.iloc[0]
    assert row["power_w_per_rank"] == pytest.approx(612.0)
    hours = 8 * 1e6 / row["throughput_samples_per_s"] / 3600
    assert row["energy_wh_per_million_samples"] == pytest.approx(612.0 * hours)
    assert any(note.startswith("Energy:") for note in found.details)
    for environment in results.trials["environment"]:
        del environment["ranks"][1:]
    first_alone = forecast(with_models(analyse(results)), [8])
    assert first_alone.rows["energy_wh_per_million_samples"].isna().all()
    assert any(note.startswith("No energy:") for note in first_alone.details)


def test_a_note_reports_a_law_that_does_not_beat_throughput_times_n(tmp_path: Path) -> None:
    steps_s = {1: 0.020, 2: 0.030, 4: 0.0201}
    found = study(tmp_path, lambda fields: {"step_s": steps_s[fields["world_size"]]}, batch_per_gpu=[32])
    [model] = models(found)
    assert model.beats_naive is False
    notes = forecast(found, [8]).details
    assert any("1 of 1 series" in note and "do not beat the naive" in note and "(series 0)" in note for note in notes)


def test_more_gpus_than_a_node_holds_have_no_interval_without_a_measured_network(plain: ReportInputs) -> None:
    found = forecast(plain, [8, 16])
    within, beyond = (found.rows[found.rows["world_size"] == size].iloc[0] for size in (8, 16))
    assert (within["nodes"], within["caveat"]) == (1, None)
    assert (beyond["nodes"], beyond["caveat"]) == (2, NETWORK)
    assert beyond["step_s"] > 0
    assert beyond[["step_s_low", "step_s_high", "efficiency_low", "efficiency_high"]].isna().all()
    [note] = [note for note in found.notes if note.startswith(f"{NETWORK}:")]
    assert "8 GPUs" in note
    assert "--interconnect LATENCY_US:BANDWIDTH_GB_S" in note
    cells = predictions(plain).cells().set_index("GPUs")["step time (ms)"]
    assert cells["16"].str.endswith(f" [{NETWORK}]").all()


def host_bound(directory: Path, *sizes: int) -> ReportInputs:
    """Return a study whose host takes 90 % of the step to issue it on some numbers of GPUs."""

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        is_bound = fields["world_size"] in sizes
        ratios = {"launch_ratio": 0.99, "previous_done": 0.95} if is_bound else {"launch_ratio": 0.2}
        return ring_law(fields) | ratios

    return study(directory, law)


def test_nothing_is_predicted_if_loading_bounds_one_or_two_gpus(tmp_path: Path) -> None:
    def waits_for(*sizes: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def law(fields: dict[str, Any]) -> dict[str, Any]:
            waiting = {"shares": (0.5, 0.0, 0.15, 0.01, 0.3, 0.04)} if fields["world_size"] in sizes else {}
            return ring_law(fields) | waiting

        return law

    two, four = study(tmp_path / "two", waits_for(2)), study(tmp_path / "four", waits_for(4))
    forecasts = forecast(two, [4, 8])
    assert set(forecasts.rows["caveat"]) == {LOADING_BOUND}
    assert forecasts.rows["step_s"].isna().all()
    assert any(note.startswith(f"{LOADING_BOUND}: ") for note in forecasts.notes)
    assert prediction_fan(two) is None
    assert forecast(four, [8]).rows["caveat"].isna().all()


def test_nothing_is_predicted_if_the_host_bounds_one_or_two_gpus(tmp_path: Path) -> None:
    found = host_bound(tmp_path / "two", 2)
    assert [model.series.host_bound for model in models(found)] == [True, True]
    forecasts = forecast(found, [4, 8])
    assert set(forecasts.rows["caveat"]) == {HOST_BOUND}
    assert forecasts.rows["step_s"].isna().all()
    assert any(note.startswith(f"{HOST_BOUND}: ") for note in forecasts.notes)
    assert set(predictions(found).cells()["step time (ms)"]) == {f"– [{HOST_BOUND}]"}
    assert prediction_fan(found) is None
    four = host_bound(tmp_path / "four", 4)
    assert forecast(four, [8]).rows["caveat"].isna().all(), "a step that more ranks turn into a host-bound one"


def test_nothing_is_predicted_if_the_measured_scaling_is_not_resolved(tmp_path: Path) -> None:
    """An interval of a prediction that is narrower than that of the measured scaling could not be defended."""

    def law(fields: dict[str, Any]) -> dict[str, Any]:
        is_slow = fields["world_size"] == 4 and fields["repeat"] == 1 and fields["batch_per_gpu"] == 32
        return {"step_s": ring_law(fields)["step_s"] * (4 if is_slow else 1)}

    found = study(tmp_path / "two", law, repeat=range(2))
    rows = forecast(found, [8]).rows.set_index("batch_per_gpu")
    assert rows.loc[32, "caveat"] == NO_SCALING
    assert rows["step_s"].isna()[32]


# --------------------------------------------------------------------------------------------------- interconnects


def with_breakdown(fields: dict[str, Any]) -> dict[str, Any]:
    return ring_law(fields) | {"communication": {"last_gradient_s": 0.01, "latency_s": 6e-5, "bandwidth": 100e9}}


@pytest.mark.parametrize("text", [None, "auto", "5", "5:", ":5", "5:0", "-5:50", "5:50:1", "a:b", "1.2.3:5", "inf:5"])
def test_invalid_stated_interconnects_are_rejected(text: str | None) -> None:
    assert stated_link(text) is None


def test_a_stated_interconnect_replaces_latency_and_bandwidth() -> None:
    assert stated_link("5:50") == Link(5e-6, 50e9, "stated: 5 µs per hop, 50 GB/s")
    assert stated_link("0.5:1e2") == Link(5e-7, 100e9, "stated: 0.5 µs per hop, 100 GB/s")


def test_on_a_stated_interconnect_the_interval_ranges_from_full_to_no_overlap(tmp_path: Path) -> None:
    found = study(tmp_path, with_breakdown, batch_per_gpu=[32])
    [model] = models(found)
    size, buckets = model.series.gradient_bytes, model.series.buckets
    plain = forecast(found, [8]).rows.iloc[0]
    slow = forecast(found, [8], "50:0.5").rows.iloc[0]
    assert slow["interconnect"] == "stated: 50 µs per hop, 0.5 GB/s"
    old_s = float(model.series.at([8]).wire_s[0])
    new_s = float(ring_s(8, size, Link(50e-6, 0.5e9, ""), buckets))
    ends = max(plain["step_s"], new_s), plain["step_s"] + new_s - old_s
    assert slow["step_s"] == pytest.approx(np.sqrt(ends[0] * ends[1]))
    assert slow["step_s_low"] <= ends[0] < ends[1] <= slow["step_s_high"]
    fast = forecast(found, [8], "0:1e6").rows.iloc[0]
    assert model.series.points["step_s"].iloc[0] * 0.99 < fast["step_s"] <= plain["step_s"]


def test_across_nodes_the_stated_interconnect_is_the_one_between_them(tmp_path: Path) -> None:
    found = study(tmp_path, with_breakdown, batch_per_gpu=[32])
    [model] = models(found)
    row = forecast(found, [32], "50:0.05").rows.iloc[0]
    assert row["nodes"] == 4
    inside, between = model.series.links.inside, stated_link("50:0.05")
    assert inside is not None
    assert between is not None
    new_s = two_level_s(32, 4, model.series.gradient_bytes, inside, between, model.series.buckets)
    assert row["step_s"] > float(new_s)
    links = Interconnects(inside, between, between_is_flat=False)
    assert model.series.at([32], [4], links).wire_s[0] == pytest.approx(float(new_s))


@pytest.mark.parametrize(
    ("interconnect", "words"),
    [
        ("ethernet", ("--interconnect", "(auto)", "LATENCY_US:BANDWIDTH_GB_S", "'ethernet'")),
        ("5:50", ("--interconnect 5:50", "size of the gradients", "DIR", "--set communication_steps=10")),
    ],
)
def test_an_unknown_interconnect_is_an_error(interconnect: str, words: tuple[str, ...], plain: ReportInputs) -> None:
    with pytest.raises(PredictionError) as refused:
        forecast(plain, [8], interconnect, name="DIR")
    for word in words:
        assert word in str(refused.value)


# --------------------------------------------------------------------------------------------------- tables and figure


def test_intervals_beyond_a_factor_of_2_are_not_resolved_in_tables_figure_and_notes(tmp_path: Path) -> None:
    steps_s = {1: 0.030, 2: 0.2, 4: 0.031}  # no law fits these
    found = study(tmp_path, lambda fields: {"step_s": steps_s[fields["world_size"]]}, batch_per_gpu=[32])
    forecasts = forecast(found, [8])
    table = forecast_table(found, forecasts.models, forecasts.rows)
    assert table.cells()["step time (ms)"].str.fullmatch(r"[0-9.]+ \[not resolved\]").all()
    assert table.cells()["efficiency (%)"].str.fullmatch(r"[0-9.]+").all()
    [note] = [note for note in forecasts.notes if note.startswith(f"{NOT_RESOLVED}: ")]
    assert "a factor of 2" in note
    frame = pd.read_csv(io.StringIO(table.to_csv()))
    assert frame["caveat"].tolist() == [NOT_RESOLVED]
    assert frame[["step_s_low", "step_s_high"]].isna().all(axis=None)
    fan = prediction_fan(found)
    assert fan is not None
    assert shaded_to(fan) < 8


def test_a_narrow_interval_is_shown_with_its_ends(plain: ReportInputs) -> None:
    forecasts = forecast(plain, [8])
    cells = forecast_table(plain, forecasts.models, forecasts.rows).cells()
    assert cells["step time (ms)"].str.fullmatch(r"[0-9.]+ \[[0-9.]+, [0-9.]+\]").all()


def test_the_figure_shades_intervals_within_a_node_only(plain: ReportInputs) -> None:
    fan = prediction_fan(plain)
    assert fan is not None
    assert legend_of(fan) == ["predicted, not measured", "95 % interval of new runs"]
    assert shaded_to(fan) == 8, "16 GPUs are two nodes"


def shaded_to(fan: Figure) -> float:
    """Return the largest number of ranks with a shaded interval in the first panel."""
    return float(max(path.get_extents().x1 for path in fan.axes[0].collections[-1].get_paths()))


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for made in figure.legends for text in made.get_texts()]


def test_every_predicted_row_is_labelled_as_predicted(plain: ReportInputs) -> None:
    table = predictions(plain)
    assert "not measured" in table.title
    cells = table.cells()
    assert cells["GPUs"].tolist() == ["8", "16", "8", "16"]
    assert "not measured" in dict(table.definitions())["step time (ms)"]
    assert set(cells["heaviest law"]) == {"ring"}
    assert "held-out error (%)" in cells
    assert "naive error (%)" in cells
    assert "caveat" in table.to_csv().splitlines()[0].split(",")


def test_all_laws_are_listed(plain: ReportInputs) -> None:
    table = laws(plain)
    assert sorted(table.frame["law"]) == sorted([*(law.title for law in LAWS.values()), "average", "naive"])
    shown = table.cells().set_index("law")
    frame = table.frame.set_index("law")
    assert frame["weight"]["ring"] > 0.9
    assert frame["weight"].drop(["average", "naive"]).sum() == pytest.approx(1)
    assert frame["mean_error"]["average"] < frame["mean_error"]["naive"]
    assert (
        shown.loc["overlap with the measured all-reduce", "note"]
        == "not identifiable: needs an all-reduce sweep and the size of the gradients"
    )
    assert shown.loc["all-reduce, α and β fitted", "note"] == "not identifiable: needs 1 more point"
    [first, _] = law_parameters(plain).frame["parameters"]
    assert first.startswith("step time on one rank 16.")
    assert "; exposed cost on 2 ranks " in first


def test_a_study_of_one_number_of_ranks_has_no_prediction_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_figures(monkeypatch, {"prediction_fan"})
    found = study(tmp_path, world_size=[2])
    assert [len(make(found).frame) for make in (predictions, laws, law_parameters)] == [0, 0, 0]
    assert prediction_fan(found) is None
    page = Path(write_report(tmp_path).path).read_text()
    assert "predicted, not measured" not in page
    assert not list((tmp_path / "report").rglob("*prediction*"))


def test_the_report_shows_the_fan_the_laws_and_what_to_do_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show_figures(monkeypatch, {"prediction_fan"})
    page = Path(write_report(folder).path).read_text()
    assert 'id="predictions"' in page
    assert 'id="laws"' in page
    assert "predicted, not measured</text>" in page
    assert "Next trial: " in page
    assert (folder / "report/figures/prediction_fan.png").is_file()
    assert "## Next steps" in (folder / "report/report.md").read_text()


# --------------------------------------------------------------------------------------------------- command line


def test_predict_prints_one_row_per_series_and_size_then_what_to_do(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["predict", str(folder), "--gpus", "8,16", "--price-per-gpu-hour", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Best predicted throughput on 8 GPUs: batch 128 per GPU, ")
    assert lines[1].startswith("Best predicted throughput on 16 GPUs: batch 128 per GPU, ")
    table = lines[lines.index(next(line for line in lines if line.startswith("Predicted, not measured"))) :]
    answer = " ".join(" ".join(lines[: -len(table)]).split())
    assert answer.endswith(f"samples/s [{NETWORK}].")
    rows = [line for line in table if line.split() and line.split()[0] in ("8", "16")]
    assert [line.split()[0] for line in rows] == ["8", "8", "16", "16"]
    assert not any("*" in line for line in rows[:2])
    assert all(re.search(r" [0-9.]+\*  ", line) for line in rows[2:])
    assert any(line.startswith(f"* {NETWORK}: ") for line in table)
    assert "cost: at 2 per GPU-hour, in the currency of that price." in lines
    assert len(lines) < 30


def test_predict_shows_laws_and_details_on_request(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["predict", str(folder), "--gpus", "8"]) == 0
    short = capsys.readouterr().out
    assert main(["predict", str(folder), "--gpus", "8", "--laws"]) == 0
    laws_shown = capsys.readouterr().out
    assert main(["predict", str(folder), "--gpus", "8", "--details"]) == 0
    details = capsys.readouterr().out
    for text in ("Candidate laws for the predictions", "Parameters of the heaviest laws"):
        assert (text in short, text in laws_shown, text in details) == (False, True, False)
    for text in ("Predictions (not measured)", "naive error"):
        assert (text in short, text in laws_shown, text in details) == (False, False, True)


def test_the_cheapest_predicted_configuration_is_that_of_all_requested_sizes(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["predict", str(folder), "--gpus", "8,16", "--goal", "cost"]) == 0
    best = " ".join(capsys.readouterr().out.split())  # without line breaks
    assert best.count("Best predicted cost: 8 GPUs, batch 128 per GPU, ") == best.count("Best ") == 1
    assert "million samples per GPU-hour" in best


def test_predict_as_json_has_plain_values_and_nulls(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["predict", str(folder), "--gpus", "8,4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["label"] == "predicted, not measured"
    assert [row["world_size"] for row in found["predictions"]] == [4, 8, 4, 8]
    assert set(found["predictions"][0]) == set(FORECAST_COLUMNS)
    seen, unseen = found["predictions"][:2]
    assert seen["measured_step_s"] == pytest.approx(seen["step_s"], rel=0.05)
    assert unseen["measured_step_s"] is None
    assert unseen["cost_per_million_samples"] is None
    assert found["series"][0]["law"] == "ring"
    assert sum(found["series"][0]["weights"].values()) == pytest.approx(1)
    assert len(found["series"][0]["laws"]) == len(LAWS)
    assert abs(found["series"][0]["held_out_error"]) < 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "error: --gpus '0': allowed: numbers from 1 to 999999, separated by commas"),
        (["--gpus", "8,x"], "error: --gpus '8,x': allowed: numbers from 1 to 999999, separated by commas"),
        ([], "error: Missing option '--gpus'; see --help"),
        (
            ["--gpus", "8", "--goal", "speed"],
            "error: --goal 'speed' is not known; allowed: throughput, time-to-accuracy, cost",
        ),
        (
            ["--gpus", "8", "--price-per-gpu-hour", "-1"],
            "error: --price-per-gpu-hour must be >= 0, got -1",
        ),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["predict", str(folder), *arguments]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.splitlines()) == ("", [message])


def test_a_folder_with_one_number_of_ranks_is_an_error_with_a_fix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    study(tmp_path, world_size=[2], batch_per_gpu=[32], repeat=[0])
    assert main(["predict", str(tmp_path), "--gpus", "8"]) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {tmp_path}: nothing to predict from: ")
    assert "2 ranks" in message
    assert message.endswith("--gpus 1,2")


def test_an_empty_folder_and_a_folder_without_a_done_trial_are_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["predict", str(tmp_path), "--gpus", "8"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}: no study.json, so this is not a results folder; give the folder that a study was run into"
    ]
    write_study(tmp_path)
    write_trial(tmp_path, record(grid(GPU)[0], "failed", "rank 0 died"))
    assert main(["predict", str(tmp_path), "--gpus", "8"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}: nothing to predict from: no trial is done; run the study first"
    ]


def test_configurations_that_differ_in_more_than_ranks_cannot_be_predicted_from(tmp_path: Path) -> None:
    trials = [*grid(GPU, world_size=[1], batch_per_gpu=[32]), *grid(GPU, world_size=[2], batch_per_gpu=[128])]
    found = with_models(analyse(load(write_results(tmp_path, trials, ring_law))))
    with pytest.raises(PredictionError) as refused:
        forecast(found, [8], name="DIR")
    message = str(refused.value)
    assert message.startswith("DIR: nothing to predict from: ")
    assert "number of ranks" in message
    assert message.endswith("--gpus 1,2")


def test_a_size_whose_removal_leaves_only_one_other_is_shown_as_measured(tmp_path: Path) -> None:
    found = forecast(study(tmp_path, world_size=[1, 2], batch_per_gpu=[32]), [2, 4])
    measured, predicted = found.rows.to_dict("records")
    assert (measured["caveat"], predicted["caveat"]) == (MEASURED, None)
    assert measured["measured_step_s"] == pytest.approx(0.0194, rel=0.02)
    assert np.isnan(measured["step_s"])
    assert any(note.startswith(f"{MEASURED}: no prediction") for note in found.notes)
