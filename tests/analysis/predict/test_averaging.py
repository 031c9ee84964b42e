"""Model averaging: Akaike weights computed by hand, and the interval averaged over laws."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.predict.fit import Fit, Spread
from analysis.predict.intervals import BREAKDOWN_SPREAD, akaike_weights, averaged_interval
from analysis.predict.laws import LAWS, Points, expected_largest, ring_factor
from analysis.predict.model import ScalingModel, interval, models_of, predict
from tests.analysis.predict.test_prediction import series

RUN = Spread(0.01**2, 12)
AT_8 = Points(np.array([8]), np.array([32]), np.array([32]), np.array([np.nan]))


def constant_law(step_s: float) -> Fit:
    """Return a constant step time as a law whose parameters are known exactly."""
    return Fit(LAWS["offset"], np.array([step_s, 0.0]), np.zeros((2, 2)), np.zeros(3), RUN, RUN, False)


def model_of(cost_s: dict[int, float], spread: float = 0.01, seed: int = 0) -> ScalingModel:
    rng = np.random.default_rng(seed)
    one = series({n: 0.020 + c for n, c in cost_s.items()}, spread, 5, rng=rng)
    [model] = models_of([one], {False: one.spread(), True: one.spread()})
    return model


def test_weights_follow_residuals_and_number_of_parameters() -> None:
    model = model_of({1: 0.0, 2: 0.003, 4: 0.0052, 8: 0.0061})
    spread = model.run_spread
    count = spread.degrees + 4
    aic = {}
    for name, law_fit in model.fits.items():
        if isinstance(law_fit, Fit):
            squares = spread.degrees * spread.variance + 5 * np.sum(law_fit.residuals**2)
            aic[name] = count * np.log(squares / count) + 2 * len(law_fit.values)
    total = sum(np.exp(-value / 2) for value in aic.values())
    assert set(aic) == {"ring", "offset", "straggler", "alpha_beta"}
    assert model.weights == pytest.approx({name: np.exp(-value / 2) / total for name, value in aic.items()}, rel=1e-4)


def test_of_two_exact_laws_one_parameter_less_weighs_e_times_as_much() -> None:
    model = model_of({n: 0.003 * float(ring_factor(n)) for n in (1, 2, 4, 8)}, spread=0.0)
    weights = akaike_weights(model.series, model.fits, RUN)
    assert weights["ring"] / weights["alpha_beta"] == pytest.approx(np.e, rel=1e-3)
    assert weights["offset"] < weights["alpha_beta"] / 100


def test_two_sizes_weigh_laws_by_the_parts_of_the_breakdown() -> None:
    def weights(wire_s: float, wait_s: float) -> dict[str, float]:
        exposed = pd.DataFrame({"world_size": [2], "wire_s": [wire_s], "wait_s": [wait_s], "late_rank": [np.nan]})
        one = replace(series({1: 0.020, 2: 0.021}), exposed=exposed)
        [model] = models_of([one])
        return dict(model.weights)

    [without_breakdown] = models_of([series({1: 0.020, 2: 0.021})])
    assert without_breakdown.weights == pytest.approx(dict.fromkeys(("ring", "offset", "straggler"), 1 / 3), rel=1e-6)
    transfer, half_each = weights(0.001, 0.0), weights(0.0005, 0.0005)
    cost = 0.001 / 0.021  # of the step
    assert transfer["ring"] == pytest.approx(transfer["breakdown"], rel=1e-4)
    assert transfer["offset"] / transfer["ring"] == pytest.approx(
        np.exp(-((cost / BREAKDOWN_SPREAD) ** 2) / 2), rel=1e-3
    )
    assert transfer["straggler"] / transfer["ring"] == pytest.approx(
        np.exp(-((cost / BREAKDOWN_SPREAD) ** 2)), rel=1e-3
    )
    assert half_each["ring"] == pytest.approx(half_each["straggler"], rel=1e-4)
    missed = 2 * (cost / 2 / BREAKDOWN_SPREAD) ** 2
    assert half_each["ring"] / half_each["breakdown"] == pytest.approx(np.exp(-missed / 2), rel=1e-3)


def test_the_prediction_is_the_weighted_average_of_the_laws_on_the_logarithm() -> None:
    model = model_of({1: 0.0, 2: 0.003, 4: 0.0046}, spread=0.02)
    points = model.series.at([8])
    steps = {name: np.log(f.step_s(points)[0]) for name, f in model.fits.items() if isinstance(f, Fit)}
    assert len(steps) == 3
    average = sum(model.weights[name] * log_step for name, log_step in steps.items())
    assert predict(model, [8])["step_s"].iloc[0] == pytest.approx(np.exp(average))
    assert min(steps.values()) < average < max(steps.values())


def test_averaging_a_single_law_returns_its_own_interval() -> None:
    low, high = averaged_interval([constant_law(0.020)], [1.0], AT_8, RUN)
    half = stats.t.ppf(0.975, 12) * 0.01
    assert low[0] == pytest.approx(np.log(0.020) - half, abs=1e-6)
    assert high[0] == pytest.approx(np.log(0.020) + np.log1p(half), abs=1e-6)


def test_the_error_of_the_law_adds_to_the_spread_of_a_run() -> None:
    low, _ = averaged_interval([constant_law(0.020)], [1.0], AT_8, RUN, 0.02**2)
    degrees = (1 + 4) ** 2 / (1 / 12 + 16 / 8)  # Welch and Satterthwaite
    half = stats.t.ppf(0.975, degrees) * 0.01 * np.sqrt(5)
    assert low[0] == pytest.approx(np.log(0.020) - half, abs=1e-6)


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
    offset = model.fits["offset"]
    assert isinstance(offset, Fit)
    points = model.series.at([16])
    low, _ = interval(model, points)
    assert low[0] > np.log(offset.step_s(points)[0])


def test_weak_scaling_is_never_predicted_faster_than_one_rank() -> None:
    model = model_of({1: 0.010, 2: 0.030, 4: 0.012}, spread=0.002)  # no law fits these
    points = model.series.at([64])
    low, high = interval(model, points)
    assert np.exp(high[0] - model.log_step(points)[0]) > 2
    alone_s = min(float(np.exp(model.log_step(model.series.at([1]))[0])), model.series.points["step_s"].min())
    assert 0.95 * alone_s < np.exp(low[0]) < alone_s
    row = predict(model, [64]).iloc[0]
    assert row["not_resolved"]
    assert row[["step_s_low", "step_s_high", "efficiency_low"]].isna().all()
