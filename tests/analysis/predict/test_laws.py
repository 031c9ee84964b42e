"""Scaling laws: formulas against published values, and parameters recovered from generated steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.predict.fit import Fit, NotIdentifiable, Spread, fit
from analysis.predict.laws import (
    LAWS,
    Link,
    Points,
    expected_largest,
    exposed_transfers_s,
    overlapped_s,
    ring_factor,
    ring_s,
    two_level_s,
    wait_growth,
)

SIZES = np.array([1, 2, 4, 8])
UNKNOWN = Spread(float("nan"), 0.0)

TRUE = {
    "breakdown": (0.020, 0.004),
    "ring": (0.020, 0.004),
    "overlap": (0.020, 2.0),
    "hidden": (0.020, 0.003),
    "offset": (0.020, 0.006),
    "straggler": (0.020, 0.003),
    "alpha_beta": (0.020, 0.0008, 0.004),
}
"""True parameters, inside their bounds and identifiable from the points below."""

WIRE_S = 0.012 * ring_factor(SIZES)
GROWTH = np.array([0.0, 1.0, 1.4, 1.7])


def points_of() -> Points:
    """Return 1, 2, 4 and 8 ranks at batch 32, with all-reduce times `WIRE_S` and costs that grow by `GROWTH`."""
    batch = np.full(len(SIZES), 32)
    return Points(SIZES, batch, batch, WIRE_S, GROWTH)


def fitted(name: str, points: Points, step_s: np.ndarray, repeats: int = 1, within: Spread = UNKNOWN) -> Fit:
    result = fit(LAWS[name], points, np.log(step_s), np.full(len(step_s), repeats), within)
    assert isinstance(result, Fit)
    return result


# --------------------------------------------------------------------------------------------------- formulas


def test_every_law_has_a_generated_case() -> None:
    assert set(TRUE) == set(LAWS)


def test_the_ring_factor_is_that_of_nccl_tests() -> None:
    # doc/PERFORMANCE.md: busbw = algbw * 2(n-1)/n
    assert ring_factor(np.array([1, 2, 4, 8])).tolist() == [0.0, 1.0, 1.5, 1.75]


def test_ring_all_reduce_adds_latency_per_hop_and_time_per_byte() -> None:
    link = Link(10e-6, 100e9, "")
    result = ring_s(np.array([1, 2, 4, 8]), 1e9, link)
    assert result == pytest.approx([0.0, 2 * 10e-6 + 1e-2, 6 * 10e-6 + 1.5e-2, 14 * 10e-6 + 1.75e-2], rel=1e-12)
    assert ring_s(4, 1e9, link, messages=5) == pytest.approx(5 * 6 * 10e-6 + 1.5e-2, rel=1e-12)


def test_two_level_all_reduce_reduces_to_a_ring_on_one_node_or_one_rank_per_node() -> None:
    inside, between = Link(1e-6, 300e9, ""), Link(5e-6, 50e9, "")
    assert two_level_s(8, 1, 1e9, inside, between) == pytest.approx(float(ring_s(8, 1e9, inside)))
    assert two_level_s(8, 8, 1e9, inside, between) == pytest.approx(float(ring_s(8, 1e9, between)))
    # 4 nodes of 8: 1.75 of the bytes inside, 1.5 of an eighth of them between
    expected = 14e-6 + 1.75 * 1e9 / 300e9 + 6 * 5e-6 + 1.5 * (1e9 / 8) / 50e9
    assert two_level_s(32, 4, 1e9, inside, between) == pytest.approx(expected, rel=1e-12)


def test_expected_largest_matches_the_published_table() -> None:
    # David and Nagaraja, Order Statistics, table of normal order statistics
    assert expected_largest(np.array([1, 2, 3, 4, 8])) == pytest.approx(
        [0, 0.56419, 0.84628, 1.02938, 1.42360], abs=1e-5
    )


def test_the_wait_for_a_rank_that_is_always_late_starts_with_that_rank() -> None:
    assert wait_growth(SIZES, 2).tolist() == [0, 0, 1, 1]
    assert wait_growth(SIZES, None) == pytest.approx(expected_largest(SIZES))


def test_only_the_last_bucket_is_exposed_until_buckets_fall_behind_the_backward_pass() -> None:
    # ready 6, 3 and 0 seconds before the last gradient
    ready_before_s = np.array([6.0, 3.0, 0.0])
    assert exposed_transfers_s(ready_before_s, np.array([2.0, 2.0, 1.0])) == 1.0
    assert exposed_transfers_s(ready_before_s, np.array([3.0, 3.0, 1.5])) == 1.5
    assert exposed_transfers_s(ready_before_s, np.array([4.0, 4.0, 2.0])) == 4.0, "4 + 4 + 2 seconds from 6 before on"
    # gloo's buckets overlap
    assert exposed_transfers_s(ready_before_s, np.array([4.0, 4.0, 2.0]), in_order=False) == 2.0
    assert exposed_transfers_s(ready_before_s, np.array([7.0, 4.0, 0.5]), in_order=False) == 1.0
    assert exposed_transfers_s(np.array([5.0]), np.array([2.0])) == 0.0
    assert exposed_transfers_s(np.array([]), np.array([])) == 0.0


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(1.0, 10.0))
def test_overlapped_time_lies_between_maximum_and_sum(compute_s: float, sync_s: float, gamma: float) -> None:
    step_s = float(overlapped_s(np.array(compute_s), np.array(sync_s), gamma))
    assert max(compute_s, sync_s) <= step_s * (1 + 1e-12)
    assert step_s <= (compute_s + sync_s) * (1 + 1e-12)


@pytest.mark.parametrize("name", LAWS)
def test_laws_predict_no_communication_cost_for_one_rank(name: str) -> None:
    points = points_of()[:1]
    alone = LAWS[name].step_s(points, np.array(TRUE[name]))
    assert alone == pytest.approx([0.020])


@pytest.mark.parametrize("name", LAWS)
def test_in_strong_scaling_computation_shrinks_with_the_number_of_ranks(name: str) -> None:
    values = np.array([0.020, *(parameter.low for parameter in LAWS[name].parameters[1:])])
    points = Points(SIZES, 64 / SIZES, np.full(4, 64.0), np.zeros(4), np.zeros(4))
    assert LAWS[name].step_s(points, values) == pytest.approx(0.020 / SIZES)


# --------------------------------------------------------------------------------------------------- fits


@pytest.mark.parametrize("name", LAWS)
def test_fit_recovers_the_parameters_of_exact_steps(name: str) -> None:
    points = points_of()
    result = fitted(name, points, LAWS[name].step_s(points, np.array(TRUE[name])))
    assert result.values == pytest.approx(TRUE[name], rel=2e-3)
    assert np.abs(result.residuals).max() < 1e-5


STUDIES = 300


def coverage(name: str, spread: float = 0.01) -> tuple[np.ndarray, float]:
    """Return the coverage of the 95 % intervals per parameter, and the share of studies with a lack of fit.

    Each generated study has 4 numbers of ranks with 1 to 4 repeats.
    """
    rng = np.random.default_rng(7)
    law, true = LAWS[name], np.array(TRUE[name])
    points = points_of()
    inside, lacks_of_fit = np.zeros(len(true)), 0
    for _ in range(STUDIES):
        repeats = rng.integers(1, 5, len(points.world_size))
        repeats[0] = 3
        runs = [
            np.log(step_s) + spread * rng.standard_normal(n)
            for step_s, n in zip(law.step_s(points, true), repeats, strict=True)
        ]
        degrees = float(sum(repeats - 1))
        variance = sum(float(((run - run.mean()) ** 2).sum()) for run in runs) / degrees
        result = fit(law, points, np.array([run.mean() for run in runs]), repeats, Spread(variance, degrees))
        assert isinstance(result, Fit)
        low, high = result.intervals().T
        inside += (low <= true) & (true <= high)
        lacks_of_fit += bool(result.lack_of_fit)
    return inside / STUDIES, lacks_of_fit / STUDIES


@pytest.mark.parametrize("name", ["ring", "straggler", "breakdown", "alpha_beta"])
def test_95_percent_intervals_have_95_percent_coverage(name: str) -> None:
    covered, lacks_of_fit = coverage(name)
    assert ((covered >= 0.93) & (covered <= 0.97)).all(), covered
    assert lacks_of_fit == pytest.approx(0.05, abs=0.03)


def test_intervals_stay_within_the_bounds_of_their_parameters() -> None:
    points = points_of()
    result = fitted("ring", points, np.array([0.0200, 0.0199, 0.0201, 0.0200]), 3, Spread(1e-4, 8))
    assert result.values[1] == pytest.approx(0, abs=3e-4)
    assert result.intervals()[1][0] == 0.0


def test_lack_of_fit_widens_the_intervals_of_the_parameters() -> None:
    points = points_of()
    step_s = 0.020 * (1 + 0.05 * (SIZES - 1))
    result = fitted("offset", points, step_s, 5, Spread(1e-6, 16))
    assert result.lack_of_fit is True
    assert result.spread.degrees == 2
    assert result.spread.variance > 1e-3


def test_as_many_points_as_parameters_without_repeats_have_no_interval() -> None:
    points = points_of()[:2]
    result = fitted("ring", points, np.array([0.020, 0.024]))
    assert result.values == pytest.approx([0.020, 0.004], rel=1e-5)
    assert np.isnan(result.intervals()).all()


# --------------------------------------------------------------------------------------------------- not identifiable


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("ring", 1, "not identifiable: needs 1 more point"),
        ("alpha_beta", 2, "not identifiable: needs 2 more points"),
        ("alpha_beta", 3, "not identifiable: needs 1 more point"),
    ],
)
def test_too_few_points_are_not_fitted(name: str, count: int, reason: str) -> None:
    points = points_of()[:count]
    result = fit(LAWS[name], points, np.log(np.full(count, 0.02)), np.full(count, 5), Spread(1e-4, 4))
    assert result == NotIdentifiable(LAWS[name], reason)


def test_equal_points_count_once() -> None:
    points = Points(np.array([2, 2]), np.array([32, 32]), np.array([32, 32]), np.zeros(2))
    result = fit(LAWS["ring"], points, np.log([0.02, 0.021]), np.array([5, 5]), UNKNOWN)
    assert result == NotIdentifiable(LAWS["ring"], "not identifiable: needs 1 more point")


def test_hidden_time_is_not_identifiable_if_nothing_is_exposed() -> None:
    points = Points(SIZES, np.full(4, 32), np.full(4, 32), 1e-4 * ring_factor(SIZES))
    result = fit(LAWS["hidden"], points, np.log(np.full(4, 0.02)), np.full(4, 5), Spread(1e-4, 16))
    assert result == NotIdentifiable(LAWS["hidden"], "not identifiable: needs 1 more point")


def test_an_offset_is_not_identifiable_without_a_single_rank() -> None:
    points = points_of()[1:]
    result = fit(LAWS["offset"], points, np.log(np.full(3, 0.02)), np.full(3, 5), Spread(1e-4, 12))
    assert result == NotIdentifiable(LAWS["offset"], "not identifiable: needs 1 more point")


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("overlap", "all-reduce sweep"),
        ("hidden", "all-reduce sweep"),
        ("breakdown", "communication breakdown"),
    ],
)
def test_laws_require_their_additional_measurements(name: str, missing: str) -> None:
    batch = np.full(4, 32)
    points = Points(SIZES, batch, batch, np.array([0, np.nan, np.nan, np.nan]))
    result = fit(LAWS[name], points, np.log(np.full(4, 0.02)), np.full(4, 5), Spread(1e-4, 16))
    assert isinstance(result, NotIdentifiable)
    assert result.law == LAWS[name]
    assert missing in result.reason
