"""The spread of one run: every repeat and every residual counts, and one more repeat takes nothing away."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from analysis.predict.fit import Fit, Spread, fit, pool
from analysis.predict.intervals import run_spread
from analysis.predict.laws import LAWS, ring_factor
from analysis.predict.model import models_of, predict
from analysis.predict.series import Series, pooled
from tests.analysis.predict.test_prediction import UNKNOWN, series
from tests.support.sizes import sampled

SPREAD = 0.01
NONE, ONE, THREE = (1, 1, 1), (1, 1, 2), (3, 3, 3)
STUDIES = {"none": [NONE] * 4, "the first": [ONE] + [NONE] * 3, "one each": [ONE] * 4, "three": [THREE] * 4}


def step_s(size: int, cost_s: float) -> float:
    return 0.020 + cost_s * float(ring_factor(size))


def study(
    repeats: Sequence[Sequence[int]], rng: np.random.Generator, spreads: Sequence[float] = (SPREAD,) * 4
) -> tuple[list[Series], list[float]]:
    """Series on 1, 2 and 4 ranks whose steps grow as a ring's do, and what two ranks cost in each."""
    costs = [float(cost) for cost in rng.uniform(0.002, 0.008, len(repeats))]
    made = [
        series({n: step_s(n, cost) for n in (1, 2, 4)}, spread, counts, rng=rng)
        for cost, counts, spread in zip(costs, repeats, spreads, strict=False)
    ]
    return made, costs


def of_all(made: Sequence[Series]) -> Spread:
    return pooled(pd.concat([each.points for each in made]))


def ring(each: Series) -> Fit:
    counts = each.points["n"].to_numpy(dtype=float)
    found = fit(LAWS["ring"], each.measured, each.log_step(), counts, each.spread())
    assert isinstance(found, Fit)
    return found


def spreads_of(made: Sequence[Series]) -> list[Spread]:
    fits = [ring(each) for each in made]
    return [run_spread(each, found, fits, of_all(made)) for each, found in zip(made, fits, strict=True)]


def half_width(found: Spread) -> float:
    return float(stdtrit(found.degrees, 0.975) * np.sqrt(found.variance))


@pytest.mark.statistics
@pytest.mark.parametrize(("repeats", "degrees"), [("none", 4), ("the first", 5), ("one each", 8), ("three", 7)])
def test_a_run_falls_into_the_interval_of_its_spread_as_often_as_stated(repeats: str, degrees: int) -> None:
    """95 % of 1,600 runs in full, with 4 series of 3 points."""
    rng = np.random.default_rng(6)
    inside, counted = [], []
    for _ in range(sampled(400)):
        for found in spreads_of(study(STUDIES[repeats], rng)[0]):
            inside.append(abs(SPREAD * rng.standard_normal()) < half_width(found))
            counted.append(found.degrees)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    assert np.median(counted) == degrees


def predictions(repeats: str) -> tuple[float, float]:
    """Share of 160 new runs (in full) on 8 ranks within their prediction interval, and the typical half-width of its logarithm."""
    rng = np.random.default_rng(7)
    inside, widths = [], []
    for _ in range(sampled(40, 5)):
        made, costs = study(STUDIES[repeats], rng)
        for model, cost in zip(models_of(made, of_all(made)), costs, strict=True):
            run = step_s(8, cost) * np.exp(SPREAD * rng.standard_normal())
            row = predict(model, [8]).iloc[0]
            inside.append(row["step_s_low"] <= run <= row["step_s_high"])
            widths.append(np.log(row["step_s_high"] / row["step_s_low"]) / 2)
    return float(np.mean(inside)), float(np.median(widths))


@pytest.mark.statistics
def test_one_more_repeat_keeps_the_coverage_of_predictions_and_does_not_widen_them() -> None:
    """Intervals reach over all laws that pass the points, so they hold a little more than 95 %."""
    none, first, three = (predictions(repeats) for repeats in ("none", "the first", "three"))
    for covered, _ in (none, first, three):
        assert 0.93 <= covered <= 1.0
    assert first[1] < 1.1 * none[1]
    assert three[1] < 0.7 * none[1]


def test_repeats_of_a_series_stand_alone_from_three_degrees_of_freedom_on() -> None:
    made = [
        series({1: 0.020, 2: 0.024, 4: 0.026}, 0.01, counts, rng=np.random.default_rng(1))
        for counts in ((1, 1, 1), (1, 1, 2), (2, 2, 2))
    ]
    fits = [ring(each) for each in made]
    study_wide = Spread(1e-4, 12)
    none, first, all_points = (run_spread(each, fit, fits, study_wide) for each, fit in zip(made, fits, strict=True))
    assert none == first
    assert none.degrees == 12 + 3
    assert all_points == pool(made[2].spread(), fits[2].left)
    assert run_spread(made[1], fits[1], [], UNKNOWN) == made[1].spread()
    assert run_spread(made[0], fits[0], [], UNKNOWN).degrees == 0


def test_what_a_law_leaves_counts_once_and_only_where_the_law_may_be_right() -> None:
    one = series({1: 0.020, 2: 0.024, 4: 0.026}, 0.01, 1, rng=np.random.default_rng(2))
    found = ring(one)
    assert run_spread(one, found, [found, found], UNKNOWN) == found.left, "series of one joint fit share its residuals"
    assert run_spread(one, found, [found], Spread(found.left.variance, 9)).degrees == 10
    repeats = Spread(found.left.variance / 1e3, 9)
    assert run_spread(one, found, [found], repeats) == repeats


@pytest.mark.statistics
def test_a_series_that_spreads_more_than_the_others_is_covered_where_each_of_its_points_has_a_repeat() -> None:
    """95 % of 1,000 runs (in full) of the one among four series that spreads by three times the others'."""
    rng = np.random.default_rng(8)
    inside = []
    for _ in range(sampled(1000)):
        made, _ = study([(2, 2, 2)] * 4, rng, (3 * SPREAD, SPREAD, SPREAD, SPREAD))
        found = run_spread(made[0], ring(made[0]), [], of_all(made))
        inside.append(abs(3 * SPREAD * rng.standard_normal()) < half_width(found))
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
