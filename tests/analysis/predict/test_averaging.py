"""Model averaging: Akaike weights computed by hand, and the interval averaged over laws."""

import numpy as np
import pytest
from scipy import stats

from analysis.predict.fit import Fit, Spread
from analysis.predict.intervals import akaike_weights, averaged_interval
from analysis.predict.laws import LAWS, Points, expected_largest, ring_factor
from analysis.predict.model import ScalingModel, interval, models_of, predict
from tests.analysis.predict.test_prediction import UNKNOWN, series

RUN = Spread(0.01**2, 12)
AT_8 = Points(np.array([8]), np.array([32]), np.array([32]), np.array([np.nan]))


def constant_law(step_s: float) -> Fit:
    """Return a constant step time as a law whose parameters are known exactly."""
    return Fit(LAWS["offset"], np.array([step_s, 0.0]), np.zeros((2, 2)), np.zeros(3), RUN, RUN, RUN, False)


def model_of(cost_s: dict[int, float], spread: float = 0.01, seed: int = 0) -> ScalingModel:
    rng = np.random.default_rng(seed)
    [model] = models_of([series({n: 0.020 + c for n, c in cost_s.items()}, spread, 5, rng=rng)], UNKNOWN)
    return model


def test_weights_follow_residuals_and_number_of_parameters() -> None:
    model = model_of({1: 0.0, 2: 0.003, 4: 0.0052})
    spread = model.series.spread()
    aic = {}
    for name, law_fit in model.fits.items():
        if isinstance(law_fit, Fit):
            squares = spread.degrees * spread.variance + 5 * np.sum(law_fit.residuals**2)
            aic[name] = (12 + 3) * np.log(squares / 15) + 2 * len(law_fit.values)
    total = sum(np.exp(-value / 2) for value in aic.values())
    assert model.weights == pytest.approx({name: np.exp(-value / 2) / total for name, value in aic.items()}, rel=1e-4)


def test_of_two_exact_laws_one_parameter_less_weighs_e_times_as_much() -> None:
    model = model_of({n: 0.003 * float(ring_factor(n)) for n in (1, 2, 4)}, spread=0.0)
    weights = akaike_weights([model.series], [model.fits], [RUN])
    assert weights["ring"] / weights["alpha_beta"] == pytest.approx(np.e, rel=1e-3)
    assert weights["offset"] < weights["alpha_beta"] / 100


def test_several_series_distinguish_laws_better_than_one() -> None:
    rng = np.random.default_rng(1)
    cost = {n: 0.003 * float(ring_factor(n)) for n in (1, 2, 4)}
    all_series = [series({n: 0.020 + c for n, c in cost.items()}, 0.01, 5, rng=rng) for _ in range(4)]
    single_weights = [akaike_weights([m.series], [m.fits], [m.series.spread()]) for m in models_of(all_series, UNKNOWN)]
    for model in models_of(all_series, UNKNOWN):
        assert model.weights["offset"] < min(weights["offset"] for weights in single_weights)
        assert sum(model.weights.values()) == pytest.approx(1)


def test_averaging_a_single_law_returns_its_own_interval() -> None:
    low, high = averaged_interval([constant_law(0.020)], [1.0], AT_8, RUN)
    half = stats.t.ppf(0.975, 12) * 0.01
    assert low[0] == pytest.approx(np.log(0.020) - half, abs=1e-6)
    assert high[0] == pytest.approx(np.log(0.020) + np.log1p(half), abs=1e-6)


def test_distant_laws_share_the_tails_by_weight() -> None:
    laws = [constant_law(0.020), constant_law(0.030)]
    low, high = averaged_interval(laws, [0.5, 0.5], AT_8, RUN)
    half = stats.t.ppf(0.95, 12) * 0.01  # 2.5 % of all runs are 5 % of those of one law
    assert low[0] == pytest.approx(np.log(0.020) - half, abs=1e-6)
    assert high[0] == pytest.approx(np.log(0.030) + np.log1p(half), abs=1e-6)
    _, high = averaged_interval(laws, [0.98, 0.02], AT_8, RUN)
    assert high[0] < np.log(0.025), "a law with less weight than the tail does not count"


def test_a_refuted_law_does_not_widen_the_interval() -> None:
    costs = {n: 0.008 * float(expected_largest(np.array([n]))[0]) for n in (1, 2, 4, 8)}
    model = model_of(costs, spread=0.002)
    amdahl = model.fits["amdahl"]
    assert isinstance(amdahl, Fit)
    points = model.series.at([16])
    _, high = interval(model, points)
    assert high[0] < np.log(amdahl.step_s(points)[0])


def test_weak_scaling_is_never_predicted_faster_than_one_rank() -> None:
    model = model_of({1: 0.010, 2: 0.030, 4: 0.012}, spread=0.002)  # no law fits these
    row = predict(model, [64]).iloc[0]
    assert row["step_s_high"] > 4 * row["step_s"]
    alone_s = min(model.chosen.step_s(model.series.at([1]))[0], model.series.points["step_s"].min())
    assert 0.98 * alone_s < row["step_s_low"] < alone_s
