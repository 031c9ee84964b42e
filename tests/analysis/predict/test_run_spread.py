"""Spread of one run: all repeats and residuals count, and an extra repeat never adds uncertainty."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from analysis.predict.fit import Fit, Spread, fit, pool
from analysis.predict.intervals import run_spread
from analysis.predict.laws import LAWS, ring_factor
from analysis.predict.model import models_of, predict
from analysis.predict.series import ScalingSeries, pooled
from tests.analysis.predict.test_prediction import UNKNOWN, series
from tests.support.sizes import sampled

SPREAD = 0.01
NONE, ONE, THREE = (1, 1, 1), (1, 1, 2), (3, 3, 3)
STUDIES = {"none": [NONE] * 4, "the first": [ONE] + [NONE] * 3, "one each": [ONE] * 4, "three": [THREE] * 4}


def step_s(size: int, cost_s: float) -> float:
    return 0.020 + cost_s * float(ring_factor(size))


def study(
    repeats: Sequence[Sequence[int]], rng: np.random.Generator, spreads: Sequence[float] = (SPREAD,) * 4
) -> tuple[list[ScalingSeries], list[float]]:
    """Return series on 1, 2 and 4 ranks that follow the ring law, and their costs on two ranks."""
    costs = [float(cost) for cost in rng.uniform(0.002, 0.008, len(repeats))]
    all_series = [
        series({n: step_s(n, cost) for n in (1, 2, 4)}, spread, counts, rng=rng)
        for cost, counts, spread in zip(costs, repeats, spreads, strict=False)
    ]
    return all_series, costs


def common_spread(all_series: Sequence[ScalingSeries]) -> Spread:
    return pooled(pd.concat([one_series.points for one_series in all_series]))


def ring(one_series: ScalingSeries) -> Fit:
    counts = one_series.points["n"].to_numpy(dtype=float)
    law_fit = fit(LAWS["ring"], one_series.measured, one_series.log_step(), counts, one_series.spread())
    assert isinstance(law_fit, Fit)
    return law_fit


def run_spreads(all_series: Sequence[ScalingSeries]) -> list[Spread]:
    fits = [ring(one_series) for one_series in all_series]
    return [
        run_spread(one_series, law_fit, fits, common_spread(all_series))
        for one_series, law_fit in zip(all_series, fits, strict=True)
    ]


def half_width(spread: Spread) -> float:
    return float(stdtrit(spread.degrees, 0.975) * np.sqrt(spread.variance))


@pytest.mark.statistics
@pytest.mark.parametrize(("repeats", "degrees"), [("none", 4), ("the first", 5), ("one each", 8), ("three", 7)])
def test_run_spread_has_the_stated_coverage(repeats: str, degrees: int) -> None:
    """95 % of 1,600 runs in a full run, with 4 series of 3 points."""
    rng = np.random.default_rng(6)
    inside, counted = [], []
    for _ in range(sampled(400)):
        for spread in run_spreads(study(STUDIES[repeats], rng)[0]):
            inside.append(abs(SPREAD * rng.standard_normal()) < half_width(spread))
            counted.append(spread.degrees)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    assert np.median(counted) == degrees


def predictions(repeats: str) -> tuple[float, float]:
    """Return the coverage of prediction intervals on 8 ranks, and the median half-width of their logarithm.

    160 new runs in a full run.
    """
    rng = np.random.default_rng(7)
    inside, widths = [], []
    for _ in range(sampled(40, 5)):
        all_series, costs = study(STUDIES[repeats], rng)
        for model, cost in zip(models_of(all_series, common_spread(all_series)), costs, strict=True):
            run = step_s(8, cost) * np.exp(SPREAD * rng.standard_normal())
            row = predict(model, [8]).iloc[0]
            inside.append(row["step_s_low"] <= run <= row["step_s_high"])
            widths.append(np.log(row["step_s_high"] / row["step_s_low"]) / 2)
    return float(np.mean(inside)), float(np.median(widths))


@pytest.mark.statistics
def test_an_extra_repeat_keeps_the_coverage_of_predictions_and_does_not_widen_them() -> None:
    """Intervals cover all laws that fit the points, so they hold slightly more than 95 %."""
    none, first, three = (predictions(repeats) for repeats in ("none", "the first", "three"))
    for covered, _ in (none, first, three):
        assert 0.93 <= covered <= 1.0
    assert first[1] < 1.1 * none[1]
    assert three[1] < 0.7 * none[1]


def test_a_series_with_three_degrees_of_freedom_uses_only_its_own_repeats() -> None:
    all_series = [
        series({1: 0.020, 2: 0.024, 4: 0.026}, 0.01, counts, rng=np.random.default_rng(1))
        for counts in ((1, 1, 1), (1, 1, 2), (2, 2, 2))
    ]
    fits = [ring(one_series) for one_series in all_series]
    study_wide = Spread(1e-4, 12)
    none, first, all_points = (
        run_spread(one_series, fit, fits, study_wide) for one_series, fit in zip(all_series, fits, strict=True)
    )
    assert none == first
    assert none.degrees == 12 + 3
    assert all_points == pool(all_series[2].spread(), fits[2].residual_spread)
    assert run_spread(all_series[1], fits[1], [], UNKNOWN) == all_series[1].spread()
    assert run_spread(all_series[0], fits[0], [], UNKNOWN).degrees == 0


def test_residuals_count_once_and_only_if_the_law_fits() -> None:
    single = series({1: 0.020, 2: 0.024, 4: 0.026}, 0.01, 1, rng=np.random.default_rng(2))
    law_fit = ring(single)
    assert run_spread(single, law_fit, [law_fit, law_fit], UNKNOWN) == law_fit.residual_spread, (
        "series of one joint fit share its residuals"
    )
    assert run_spread(single, law_fit, [law_fit], Spread(law_fit.residual_spread.variance, 9)).degrees == 10
    repeats = Spread(law_fit.residual_spread.variance / 1e3, 9)
    assert run_spread(single, law_fit, [law_fit], repeats) == repeats


@pytest.mark.statistics
def test_a_series_with_a_larger_spread_is_covered_if_each_point_has_a_repeat() -> None:
    """95 % of 1,000 runs (in a full run) of one of four series, whose spread is three times that of the others."""
    rng = np.random.default_rng(8)
    inside = []
    for _ in range(sampled(1000)):
        all_series, _ = study([(2, 2, 2)] * 4, rng, (3 * SPREAD, SPREAD, SPREAD, SPREAD))
        spread = run_spread(all_series[0], ring(all_series[0]), [], common_spread(all_series))
        inside.append(abs(3 * SPREAD * rng.standard_normal()) < half_width(spread))
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
