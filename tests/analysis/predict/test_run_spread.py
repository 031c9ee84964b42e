"""Spread of one run: repeats of the study and what other studies know, pooled unless they contradict each other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.special import stdtrit

from analysis.predict.fit import Spread, pool
from analysis.predict.intervals import OTHER_STUDIES, run_spread
from analysis.predict.laws import ring_factor
from analysis.predict.model import models_of, predict
from analysis.predict.series import run_spreads
from tests.analysis.predict.test_prediction import UNKNOWN, ring_law, series, study
from tests.support.sizes import sampled

SPREAD = float(np.sqrt(OTHER_STUDIES[False].variance))
NONE, ONE, THREE = (1, 1, 1), (1, 1, 2), (3, 3, 3)


def half_width(spread: Spread) -> float:
    return float(stdtrit(spread.degrees, 0.975) * np.sqrt(spread.variance))


def test_without_repeats_the_spread_is_that_of_other_studies() -> None:
    for is_host_bound, others in OTHER_STUDIES.items():
        assert run_spread(UNKNOWN, is_host_bound) == others
    assert half_width(OTHER_STUDIES[False]) == pytest.approx(0.0187, abs=1e-4)


def test_a_repeat_adds_to_what_other_studies_know_unless_it_contradicts_them() -> None:
    others = OTHER_STUDIES[False]
    similar = Spread(2 * others.variance, 2)
    assert run_spread(similar, False) == pool(similar, others)
    assert half_width(run_spread(similar, False)) < half_width(similar)
    noisy = Spread(100 * others.variance, 2)
    assert run_spread(noisy, False) == noisy
    assert run_spread(noisy, True) == pool(noisy, OTHER_STUDIES[True])


def test_repeats_are_pooled_over_host_bound_configurations_and_the_others(tmp_path: Path) -> None:
    def law(fields: dict[str, object]) -> dict[str, object]:
        ratios = {"launch_ratio": 0.99, "previous_done": 0.95} if fields["batch_per_gpu"] == 32 else {}
        factor = 1.1 if fields["batch_per_gpu"] == 32 and fields["repeat"] == 1 else 1.0
        return {"step_s": ring_law(fields)["step_s"] * factor} | ratios

    analysis = study(tmp_path, law, repeat=range(2))
    spreads = run_spreads(analysis)
    assert spreads[False].degrees == spreads[True].degrees == 3
    assert spreads[True].variance > 10 * spreads[False].variance
    by_batch = {model.series.base_batch: model for model in analysis.models}
    assert (by_batch[32].series.host_bound, by_batch[128].series.host_bound) == (True, False)
    assert by_batch[128].run_spread == run_spread(spreads[False], False)
    assert by_batch[32].run_spread == run_spread(spreads[True], True)


def test_runs_over_sockets_spread_as_the_host_does_and_leave_other_links_alone(tmp_path: Path) -> None:
    def law(fields: dict[str, object]) -> dict[str, object]:
        is_slower = fields["interconnect"] == "socket" and fields["repeat"] == 1
        return {"step_s": ring_law(fields)["step_s"] * (1.1 if is_slower else 1.0)}

    analysis = study(tmp_path, law, interconnect=["auto", "socket"], batch_per_gpu=[32], repeat=range(2))
    spreads = run_spreads(analysis)
    assert spreads[True].variance > 10 * spreads[False].variance
    by_link = {model.series.interconnect: model.run_spread for model in analysis.models}
    assert by_link == {"auto": run_spread(spreads[False], False), "socket": run_spread(spreads[True], True)}


@pytest.mark.statistics
@pytest.mark.parametrize("degrees", [0, 1, 3, 12])
def test_run_spread_has_the_stated_coverage(degrees: int) -> None:
    """95 % of 4,000 runs in a full run, if runs spread as in other studies. That is 1.5 % more after a lucky repeat."""
    rng = np.random.default_rng(6)
    inside = []
    for _ in range(sampled(4000)):
        repeats = Spread(SPREAD**2 * rng.chisquare(degrees) / degrees, degrees) if degrees else UNKNOWN
        inside.append(abs(SPREAD * rng.standard_normal()) < half_width(run_spread(repeats, False)))
    assert np.mean(inside) == pytest.approx(0.96, abs=0.03)


def predictions(repeats: Sequence[int]) -> tuple[float, float]:
    """Return the coverage of prediction intervals on 8 ranks, and the median half-width of their logarithm.

    160 new runs in a full run, of series on 1, 2 and 4 ranks that follow the ring law.
    """
    rng = np.random.default_rng(7)
    inside, widths = [], []
    for _ in range(sampled(160)):
        cost_s = float(rng.uniform(0.002, 0.008))
        one = series({n: 0.020 + cost_s * float(ring_factor(n)) for n in (1, 2, 4)}, SPREAD, repeats, rng=rng)
        [model] = models_of([one], {False: one.spread(), True: UNKNOWN})
        run = (0.020 + cost_s * float(ring_factor(8))) * np.exp(SPREAD * rng.standard_normal())
        row = predict(model, [8]).iloc[0]
        inside.append(row["step_s_low"] <= run <= row["step_s_high"])
        widths.append(np.log(row["step_s_high"] / row["step_s_low"]) / 2)
    return float(np.mean(inside)), float(np.median(widths))


@pytest.mark.statistics
def test_an_extra_repeat_keeps_the_coverage_of_predictions_and_does_not_widen_them() -> None:
    none, first, three = (predictions(repeats) for repeats in (NONE, ONE, THREE))
    for covered, _ in (none, first, three):
        assert 0.93 <= covered <= 1.0
    assert first[1] < 1.1 * none[1]
    assert three[1] < 0.95 * none[1], "other studies already say how far a run spreads"
