"""Predictions: recovery of a known law, held-out errors, intervals, and the messages if nothing can be predicted."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis.figures.predictions import prediction_fan
from analysis.predict.fit import Spread
from analysis.predict.forecast import FORECAST_COLUMNS, PredictionError, forecast, stated_link
from analysis.predict.inputs import ReportInputs, with_models
from analysis.predict.laws import LAWS, Link, expected_largest, ring_factor, ring_s, two_level_s
from analysis.predict.model import models, models_of, predict, without
from analysis.predict.series import Interconnects, ScalingSeries, series_of
from analysis.read.results import load
from analysis.report.report import write_report
from analysis.study import analyse
from analysis.tables.predictions import law_parameters, laws, predictions
from study.scaling import main
from tests.support.frames import MIB, grid, record, steps, trial_id, write_results, write_study, write_trial

GPU = {"device": "cuda", "dataset": "synthetic", "steps": 4, "warmup_steps": 2, "cpus_per_rank": 8}
UNKNOWN = Spread(float("nan"), 0.0)
NO_BREAKDOWN = pd.DataFrame(columns=["world_size", "wire_s", "wait_s"])
NO_TRANSFERS = pd.DataFrame(columns=["world_size", "bucket", "wire_s", "ready_before_s", "in_order"])
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
                "variance": runs.var(ddof=1) if count > 1 else np.nan, "degrees": count - 1,
            }
        )  # fmt: skip
    return ScalingSeries("weak", {}, pd.DataFrame(rows), batch, 0, np.nan, np.nan, NO_FITS, NO_BREAKDOWN, NO_TRANSFERS)


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
    found = study(tmp_path, lambda fields: ring_law(fields) | {"account": dict(measured)}, batch_per_gpu=[32])
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


def test_the_communication_breakdown_splits_the_cost_on_two_ranks() -> None:
    exposed = pd.DataFrame({"world_size": [2, 4], "wire_s": [0.001, 0.0015], "wait_s": [0.0005, 0.001]})
    one = replace(series({1: 0.020, 2: 0.024, 4: 0.0265}), exposed=exposed)
    assert one.cost_parts is not None
    host_s, wait_s, wire_s = one.cost_parts
    assert wire_s == pytest.approx(0.001)  # 1.5 ms on 4 ranks
    assert wait_s == pytest.approx(0.001 * 0.56419 / 1.02938, rel=1e-4)
    assert host_s == pytest.approx(0.0065 - 0.0015 - 0.001)
    assert one.only([1, 2]).cost_parts == pytest.approx((0.004 - 0.0015, 0.0005, 0.001))
    # a breakdown that exposes more than the plain step grew
    busier = replace(one, exposed=exposed * [1, 10, 10]).only([1, 2])
    assert busier.cost_parts == pytest.approx((0, 0.004 / 3, 0.004 * 2 / 3))
    assert replace(one, points=one.points.iloc[1:]).cost_parts is None


def test_with_two_numbers_of_ranks_the_breakdown_determines_the_growth() -> None:
    def chosen(wire_s: float, wait_s: float) -> tuple[str, float]:
        exposed = pd.DataFrame({"world_size": [2], "wire_s": [wire_s], "wait_s": [wait_s]})
        [model] = models_of([replace(series({1: 0.020, 2: 0.024}), exposed=exposed)], UNKNOWN)
        return model.law, float(predict(model, [4])["step_s"].iloc[0])

    assert chosen(0.0, 0.0) == ("account", pytest.approx(0.024))
    assert chosen(0.001, 0.001) == ("account", pytest.approx(0.022 + 0.0015 + 0.001 * 1.02938 / 0.56419, rel=1e-4))
    assert chosen(0.004, 0.0) == ("account", pytest.approx(0.020 + 1.5 * 0.004))


def test_exposed_transfers_grow_with_the_buckets_that_are_no_longer_hidden() -> None:
    # on two ranks the first bucket ends 1 ms before the last gradient, and the last one's 2 ms show
    exposed = pd.DataFrame({"world_size": [2], "wire_s": [0.002], "wait_s": [0.0]})
    buckets = pd.DataFrame({"bucket": [0, 1], "wire_s": [0.009, 0.002], "ready_before_s": [0.010, 0.0]})
    one = replace(series({1: 0.020, 2: 0.022}), exposed=exposed, transfers=buckets.assign(world_size=2, in_order=True))
    [model] = models_of([one], UNKNOWN)
    assert model.law == "account"
    # on four, 13.5 ms from 10 ms before that gradient on, and then 3 ms; on 64, 63 / 32 of 11 ms less the 10
    assert predict(model, [4, 64])["step_s"].tolist() == pytest.approx(
        [0.020 + 0.0035 + 0.003, 0.020 + 0.011 * 63 / 32 - 0.010], rel=1e-6
    )
    overlapping = replace(one, transfers=one.transfers.assign(in_order=False))
    [model] = models_of([overlapping], UNKNOWN)
    assert predict(model, [4])["step_s"].iloc[0] == pytest.approx(0.020 + 0.0035, rel=1e-6), "the first ends last"
    # global batch 32: half the batch per rank leaves half the time before the last gradient; 10 ms are not transfers
    strong = replace(overlapping, scaling="strong").at([4]).growth
    assert strong is not None
    assert strong.tolist() == [pytest.approx((0.010 + 0.0135 - 0.005) / 0.012)]


def test_a_series_has_the_buckets_of_its_communication_breakdown(tmp_path: Path) -> None:
    measured = {"last_gradient_s": 0.01, "latency_s": 6e-5, "bandwidth": 100e9, "bucket_bytes": (40 * MIB, 24 * MIB)}
    found = study(tmp_path, lambda fields: ring_law(fields) | {"account": dict(measured)}, batch_per_gpu=[32])
    [one] = series_of(found)
    assert one.transfers["world_size"].tolist() == [2, 2, 4, 4]
    assert one.transfers["bucket"].tolist() == [0, 1, 0, 1]
    assert one.transfers["wire_s"].gt(0).all()
    assert one.transfers["in_order"].all()
    assert one.only([1, 2]).transfers["world_size"].tolist() == [2, 2]


# ------------------------------------------------------------------------------------------------- choice of a law


@pytest.mark.parametrize(
    ("law", "growth"),
    [
        ("ring", lambda n: 0.004 * ring_factor(n)),
        ("offset", lambda n: 0.004 * (n > 1)),
        ("straggler", lambda n: 0.004 * expected_largest(np.array([n]))[0]),
        ("amdahl", lambda n: 0.020 * 0.1 * (n - 1)),
    ],
)
def test_the_generating_law_is_chosen_and_predicts_the_steps(law: str, growth: Callable[[int], float]) -> None:
    rng = np.random.default_rng(1)
    made = [series({n: 0.020 + float(growth(n)) for n in (1, 2, 4, 8)}, 0.002, rng=rng) for _ in range(3)]
    for model in models_of(made, UNKNOWN):
        assert model.law == law
        assert model.why == "smallest error on the 3 held-out points of similar series"
        assert abs(model.held_out_error) < 0.01
        assert model.beats_naive
        row = predict(model, [64]).iloc[0]
        true = 0.020 + float(growth(64))
        assert row["step_s"] == pytest.approx(true, rel=0.05)
        assert row["step_s_low"] < true < row["step_s_high"]


def test_held_out_and_naive_errors_are_those_of_the_largest_number_of_ranks() -> None:
    [model] = models_of([series({1: 0.020, 2: 0.024, 4: 0.026})], UNKNOWN)
    errors = model.held_out.set_index("law")
    assert set(errors["held_out_world_size"].dropna()) == {4}
    assert errors.loc["ring", "held_out_error"] == pytest.approx(0.0, abs=1e-6)
    assert errors.loc["offset", "held_out_error"] == pytest.approx(0.024 / 0.026 - 1, rel=1e-4)
    assert errors.loc["amdahl", "held_out_error"] == pytest.approx(0.032 / 0.026 - 1, rel=1e-4)
    assert model.naive_error == pytest.approx(0.020 / 0.026 - 1)
    assert errors.loc["universal", "reason"] == "not tested: without 4 ranks not identifiable: needs 1 more point"
    assert model.law == "ring"


def test_with_two_numbers_of_ranks_the_interval_spans_the_laws() -> None:
    [model] = models_of([series({1: 0.020, 2: 0.024}, 0.001)], UNKNOWN)
    assert model.law == "ring"
    assert "nothing could be held out" in model.why
    assert np.isnan(model.held_out_error)
    assert model.beats_naive is None
    row = predict(model, [4]).iloc[0]
    # from no growth at all to growth with N-1
    assert row["step_s_low"] < 0.024
    assert row["step_s_high"] > 0.032


def test_intervals_widen_with_the_distance_from_the_measured_sizes() -> None:
    rng = np.random.default_rng(2)
    [model] = models_of([series({n: 0.020 + 0.001 * n for n in (1, 2, 4)}, 0.003, rng=rng)], UNKNOWN)
    rows = predict(model, [4, 8, 16, 64])
    assert (rows["step_s_high"] / rows["step_s_low"]).is_monotonic_increasing
    assert (rows["efficiency_low"] < rows["efficiency"]).all()
    assert rows["efficiency"].iloc[0] == pytest.approx(
        rows["throughput_samples_per_s"].iloc[0] / 4 / model.series.points["throughput_samples_per_s"].iloc[0]
    )


def step_of_a_law(law: str, size: int, cost_s: float) -> float:
    """Return the step time on `size` ranks of a law with 20 ms on one rank."""
    ring, peers = float(ring_factor(size)), size - 1
    return 0.020 + {
        "ring": cost_s * ring,
        "straggler": cost_s * float(expected_largest(np.array([size]))[0]),
        "alpha_beta": cost_s * (0.5 * ring + 0.2 * peers),
        "universal": cost_s * (0.3 * peers + 0.05 * size * peers),
        "amdahl": cost_s * 0.3 * peers,
        "gustafson": 0.020 * (size / (size - 20 * cost_s * peers) - 1),
    }[law]  # fmt: skip


@pytest.mark.parametrize("law", ["ring", "straggler", "alpha_beta", "universal", "amdahl", "gustafson"])
def test_prediction_intervals_have_the_stated_coverage(law: str) -> None:
    rng = np.random.default_rng(3)
    for count in (1, 4):  # series that share the choice of a law
        inside, widths = [], []
        for _ in range(20 // count):
            costs = rng.uniform(0.002, 0.008, count)
            made = [series({n: step_of_a_law(law, n, c) for n in (1, 2, 4)}, 0.01, 5, rng=rng) for c in costs]
            for model, cost in zip(models_of(made, UNKNOWN), costs, strict=True):
                run = step_of_a_law(law, 8, cost) * np.exp(0.01 * rng.standard_normal())
                row = predict(model, [8]).iloc[0]
                inside.append(row["step_s_low"] <= run <= row["step_s_high"])
                widths.append(np.log(row["step_s_high"] / row["step_s_low"]) / 2)
        assert np.mean(inside) >= 0.9, f"{count} series"
        if law == "ring":  # a run alone has 2 %
            assert np.median(widths) < 0.05


def test_without_repeats_the_spread_comes_from_the_residuals_if_there_are_any() -> None:
    rng = np.random.default_rng(4)
    made = [series({n: 0.020 + 0.003 * float(ring_factor(n)) for n in (1, 2, 4)}, 0.01, 1, rng=rng) for _ in range(5)]
    for model in models_of(made, UNKNOWN):
        assert model.run_spread.degrees == 5
        assert np.sqrt(model.run_spread.variance) == pytest.approx(0.01, rel=0.8)
    [alone] = models_of([series({1: 0.020, 2: 0.024}, repeats=1)], UNKNOWN)
    assert predict(alone, [4])[["step_s_low", "step_s_high"]].isna().all(axis=None)


def test_a_size_is_predicted_as_if_it_had_not_been_measured() -> None:
    found = models_of([series({1: 0.020, 2: 0.024, 4: 0.5, 8: 0.027})], UNKNOWN)
    [rest] = without(found, 4, UNKNOWN)
    assert rest.series.sizes == [1, 2, 8]
    assert predict(rest, [4])["step_s"].iloc[0] == pytest.approx(0.026, rel=1e-3)
    assert without(models_of([series({1: 0.020, 2: 0.024})], UNKNOWN), 2, UNKNOWN) == []


def test_the_law_error_is_zero_where_the_law_is_the_true_one_and_nothing_spreads() -> None:
    [model] = models_of([series({1: 0.020, 2: 0.024, 4: 0.026})], UNKNOWN)
    assert model.law_error is not None
    assert model.law_error.variance == pytest.approx(0, abs=1e-12)
    assert (model.law_error.at, model.law_error.degrees) == (np.log(2), 1)


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
    assert (row["batch_per_gpu"], row["global_batch"], row["law"]) == (32, 256, "ring")
    assert row["step_s"] == pytest.approx(0.0002 * 32 + 0.003 * 1.75, rel=0.02)


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
    assert any(note.startswith("Energy:") for note in found.notes)
    for environment in results.trials["environment"]:
        del environment["ranks"][1:]
    first_alone = forecast(with_models(analyse(results)), [8])
    assert first_alone.rows["energy_wh_per_million_samples"].isna().all()
    assert any(note.startswith("No energy:") for note in first_alone.notes)


def test_a_note_reports_a_law_that_does_not_beat_throughput_times_n(tmp_path: Path) -> None:
    steps_s = {1: 0.020, 2: 0.030, 4: 0.0201}
    found = study(tmp_path, lambda fields: {"step_s": steps_s[fields["world_size"]]}, batch_per_gpu=[32])
    [model] = models(found)
    assert model.beats_naive is False
    notes = forecast(found, [8]).notes
    assert any("1 of 1 series" in note and "does not beat the naive" in note and "(series 0)" in note for note in notes)


def test_more_gpus_than_a_node_holds_are_predicted_with_a_warning(plain: ReportInputs) -> None:
    notes = forecast(plain, [16]).notes
    [warning] = [note for note in notes if "no interconnect between nodes" in note]
    assert "8 GPUs" in warning
    assert "16 GPUs" in warning
    assert "--interconnect LATENCY_US:BANDWIDTH_GB_S" in warning


# --------------------------------------------------------------------------------------------------- interconnects


def with_breakdown(fields: dict[str, Any]) -> dict[str, Any]:
    return ring_law(fields) | {"account": {"last_gradient_s": 0.01, "latency_s": 6e-5, "bandwidth": 100e9}}


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
        ("5:50", ("--interconnect 5:50", "size of the gradients", "DIR", "--set account_steps=10")),
    ],
)
def test_an_unknown_interconnect_is_an_error(interconnect: str, words: tuple[str, ...], plain: ReportInputs) -> None:
    with pytest.raises(PredictionError) as refused:
        forecast(plain, [8], interconnect, name="DIR")
    for word in words:
        assert word in str(refused.value)


# --------------------------------------------------------------------------------------------------- tables and figure


def test_intervals_beyond_a_factor_of_2_are_marked_too_wide_in_tables_figure_and_notes(tmp_path: Path) -> None:
    steps_s = {1: 0.030, 2: 0.050, 4: 0.031}  # no law fits these
    found = study(tmp_path, lambda fields: {"step_s": steps_s[fields["world_size"]]}, batch_per_gpu=[32])
    table = predictions(found)
    assert (table.frame["step_s_high"] > 2 * table.frame["step_s"]).all()
    cells = table.cells()
    for name in ("step time (ms)", "efficiency (%)"):
        assert cells[name].str.fullmatch(r"[0-9.]+ \[too wide to use\]").all()
    assert "2 of 2 intervals are too wide to use: beyond a factor of 2" in table.note
    assert pd.read_csv(io.StringIO(table.to_csv()))["too_wide"].tolist() == [True, True]
    fan = prediction_fan(found)
    assert fan is not None
    assert "not shaded: interval too wide to use" in legend_of(fan)
    [shade] = fan.axes[0].collections[-1:]
    assert max(path.get_extents().x1 for path in shade.get_paths()) < 8


def test_a_narrow_interval_is_shown_with_its_ends(plain: ReportInputs) -> None:
    assert predictions(plain).cells()["step time (ms)"].str.fullmatch(r"[0-9.]+ \[[0-9.]+, [0-9.]+\]").all()
    fan = prediction_fan(plain)
    assert fan is not None
    assert "not shaded: interval too wide to use" not in legend_of(fan)


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for made in figure.legends for text in made.get_texts()]


def test_every_predicted_row_is_labelled_as_predicted(plain: ReportInputs) -> None:
    table = predictions(plain)
    assert "not measured" in table.title
    cells = table.cells()
    assert cells["GPUs"].tolist() == ["8", "16", "8", "16"]
    assert set(cells["kind"]) == {"predicted"}
    assert set(cells["law"]) == {"ring"}
    assert "held-out error (%)" in cells
    assert "naive error (%)" in cells
    assert "kind" in table.to_csv().splitlines()[0].split(",")


def test_all_laws_are_listed(plain: ReportInputs) -> None:
    table = laws(plain)
    assert sorted(table.frame["law"]) == sorted([*(law.title for law in LAWS.values()), "naive"])
    shown = table.cells().set_index("law")
    assert shown.loc["ring", "chosen for"] == "2"
    assert (
        shown.loc["overlap with the measured all-reduce", "note"]
        == "not identifiable: needs an all-reduce sweep and the size of the gradients"
    )
    assert shown.loc["universal scalability", "note"] == (
        "not tested: without 4 ranks not identifiable: needs 1 more point"
    )
    [first, _] = law_parameters(plain).frame["parameters"]
    assert first.startswith("step time on one rank 16.")
    assert "; exposed cost on 2 ranks " in first


def test_a_study_of_one_number_of_ranks_has_no_prediction_in_its_report(tmp_path: Path) -> None:
    found = study(tmp_path, world_size=[2])
    assert [len(make(found).frame) for make in (predictions, laws, law_parameters)] == [0, 0, 0]
    assert prediction_fan(found) is None
    page = Path(write_report(tmp_path).path).read_text()
    assert "predicted, not measured" not in page
    assert not list((tmp_path / "report").rglob("*prediction*"))


def test_the_report_shows_the_fan_the_laws_and_what_to_do_next(folder: Path) -> None:
    page = Path(write_report(folder).path).read_text()
    assert 'id="predictions"' in page
    assert 'id="laws"' in page
    assert "predicted, not measured (shaded: 95 %)" in page
    assert "Next trial: one more run with" in page
    assert (folder / "report/figures/prediction_fan.png").is_file()
    assert "## Next steps" in (folder / "report/report.md").read_text()


# --------------------------------------------------------------------------------------------------- command line


def test_predict_prints_predictions_laws_and_advice(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["predict", str(folder), "--gpus", "8", "--price-per-gpu-hour", "2"]) == 0
    out = capsys.readouterr().out
    for text in ("Predictions (not measured)", "held-out", "Candidate laws for the predictions", "Next trial: "):
        assert text in out
    assert "Best for throughput: 4 GPUs, batch 128 per GPU, " in out


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
    assert len(found["series"][0]["held_out"]) == len(LAWS)
    assert found["next_trial"]["world_size"] in (1, 2, 4)


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
    assert "--gpus 1,2,4" in message


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
    assert "--gpus 1,2,4" in message


def test_a_size_whose_removal_leaves_only_one_other_is_shown_as_measured(tmp_path: Path) -> None:
    found = forecast(study(tmp_path, world_size=[1, 2], batch_per_gpu=[32]), [2, 4])
    measured, predicted = found.rows.to_dict("records")
    assert (measured["predicted"], predicted["predicted"]) == (False, True)
    assert measured["measured_step_s"] == pytest.approx(0.0194, rel=0.02)
    assert np.isnan(measured["step_s"])
    assert any(note.startswith("2 ranks: no prediction") for note in found.notes)
