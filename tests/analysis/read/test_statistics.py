"""Estimates, intervals and ratios, compared with formulas, scipy's tests, and studies generated from a known law."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.statistics import (
    intervals,
    is_resolved,
    log_estimates,
    paired_ratio,
    ratios,
    ratios_of_ratios,
    ratios_to_reference,
)
from analysis.two_way import OUTLYING_P, PRIOR_DEGREES, complete, incomplete


def study(logs: np.ndarray, groups: list[str] | None = None) -> pd.DataFrame:
    """Return trials with these logs [configurations, repeats], one group per repeat by default; NaN is no trial."""
    rows = [
        {"c": c, "worker_group": (groups or [str(r) for r in range(logs.shape[1])])[r], "value": math.exp(log)}
        for c, values in enumerate(logs)
        for r, log in enumerate(values)
        if not math.isnan(log)
    ]
    return pd.DataFrame(rows)


def estimates(values: list[float], groups: list[str] | None = None) -> pd.DataFrame:
    return log_estimates(study(np.log([values]), groups), "c", "value")


@pytest.fixture
def noise() -> np.ndarray:
    """Return logs of 12 configurations in 3 groups, with a shift per group."""
    rng = np.random.default_rng(4)
    return 0.01 * rng.standard_normal((12, 3)) + 0.03 * rng.standard_normal(3)


def test_one_configuration_has_student_t_of_its_group_means() -> None:
    row = intervals(estimates([100.0, 110.0, 121.0])).iloc[0]
    half = 4.302652729911275 * math.log(1.1) / math.sqrt(3)  # t of two degrees, s = ln 1.1
    assert (row["low"], row["high"]) == pytest.approx((110 * math.exp(-half), 110 * math.exp(half)))


def test_the_point_is_the_center_of_the_interval_and_the_mean_of_group_means() -> None:
    found = estimates([100.0, 104.0, 110.0], ["a", "a", "b"])
    center = math.exp((math.log(100) / 2 + math.log(104) / 2 + math.log(110)) / 2)
    row = intervals(found).iloc[0]
    assert found["value"].iloc[0] == pytest.approx(center)
    assert math.sqrt(row["low"] * row["high"]) == pytest.approx(center)
    assert (found["n"].iloc[0], found["groups"].iloc[0], found["sample"].iloc[0]) == (3, 2, 2)


def test_variances_follow_the_two_way_formulas(noise: np.ndarray) -> None:
    found = log_estimates(study(noise), "c", "value")
    shift = noise.mean(axis=0)
    own = (noise - shift).var(axis=1, ddof=1) * 12 / 11
    assert found["shift_variance"].tolist() == pytest.approx([shift.var(ddof=1)] * 12)
    assert found["variance"].tolist() == pytest.approx(list((PRIOR_DEGREES * own.mean() + 2 * own) / (8 + 2)))
    assert found["degrees"].tolist() == [10] * 12
    assert found["residual_degrees"].tolist() == [22] * 12
    row = intervals(found).iloc[3]
    parts = [(shift.var(ddof=1) / 3, 2), ((1 - 1 / 12) * found["variance"].iloc[3] / 3, 10)]
    variance = sum(value for value, _ in parts)
    degrees = variance**2 / sum(value**2 / n for value, n in parts)
    half = stats.t.ppf(0.975, degrees) * math.sqrt(variance)
    assert math.log(row["high"] / row["low"]) / 2 == pytest.approx(half)


def test_a_shift_of_a_group_cancels_in_ratios_of_the_same_study_only(noise: np.ndarray) -> None:
    shifted = noise + np.array([0.0, 0.5, -0.3])
    before, after = (log_estimates(study(logs), "c", "value") for logs in (noise, shifted))
    reference = pd.Series(0, index=before.index)
    widths = [
        (found["high"] / found["low"]).map(math.log)
        for found in (ratios_to_reference(before, reference), ratios_to_reference(after, reference))
    ]
    pd.testing.assert_series_equal(widths[0], widths[1])
    apart = ratios(after.loc[[1]], after.loc[[0]].set_axis([1]), same_study=False)
    assert math.log(apart["high"].iloc[0] / apart["low"].iloc[0]) > 10 * widths[1].iloc[1]


def test_two_configurations_have_the_paired_t_test() -> None:
    logs = np.log([[402.0, 391.0, 396.0, 405.0], [101.0, 97.0, 104.0, 100.0]])
    found = log_estimates(study(logs), "c", "value")
    row = ratios(found.loc[[0]], found.loc[[1]].set_axis([0])).iloc[0]
    expected = stats.ttest_rel(*logs).confidence_interval(0.95)
    assert row["ratio"] == pytest.approx(math.exp(logs[0].mean() - logs[1].mean()))
    assert (row["low"], row["high"]) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_two_configurations_have_the_paired_t_test_if_one_of_them_also_ran_elsewhere() -> None:
    steady, noisy = [335.2, 335.0, 336.1, 335.4, 337.0], [math.nan, 1105.0, 1143.0, 1206.0, 1281.0]
    found = log_estimates(study(np.log([steady, noisy])), "c", "value")
    ratio, low, high = paired_ratio(study(np.log([steady, noisy])), found, (1, 0), "value")
    expected = stats.ttest_rel(np.log(noisy[1:]), np.log(steady[1:])).confidence_interval(0.95)
    assert (ratio, low, high) == pytest.approx(
        (math.exp((expected.low + expected.high) / 2), math.exp(expected.low), math.exp(expected.high)), rel=0.01
    )
    assert intervals(found).notna().all(axis=None)


def test_single_configurations_of_two_studies_have_welch_t() -> None:
    fast, slow = [402.0, 391.0, 396.0, 399.0, 405.0], [101.0, 97.0, 104.0]
    row = ratios(estimates(fast), estimates(slow), same_study=False).iloc[0]
    expected = stats.ttest_ind(np.log(fast), np.log(slow), equal_var=False).confidence_interval(0.95)
    assert (row["low"], row["high"]) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_one_repeat_has_a_value_and_no_interval() -> None:
    alone, several = estimates([100.0]), estimates([100.0, 101.0, 102.0])
    assert alone["value"].iloc[0] == pytest.approx(100.0)
    assert intervals(alone).isna().all(axis=None)
    assert ratios(several, alone)[["low", "high", "more"]].isna().all(axis=None)


def test_one_repeat_among_others_has_no_interval_and_changes_none(noise: np.ndarray) -> None:
    with_single = np.vstack([noise, [0.7, np.nan, np.nan]])
    found = intervals(log_estimates(study(with_single), "c", "value"))
    assert found.loc[12].isna().all()
    pd.testing.assert_frame_equal(found.loc[:11], intervals(log_estimates(study(noise), "c", "value")))


def test_repeats_of_a_single_group_are_the_sample() -> None:
    found = log_estimates(study(np.log([[100.0, 102.0, 101.0]]), ["a"] * 3), "c", "value")
    one_group_each = estimates([100.0, 102.0, 101.0])
    assert found["group_names"].iloc[0] == ()
    pd.testing.assert_frame_equal(intervals(found), intervals(one_group_each))


def test_equal_repeats_give_an_interval_of_zero_width() -> None:
    logs = np.log([[50.0] * 3, [25.0] * 3, [10.0] * 3])
    found = log_estimates(study(logs), "c", "value")
    assert intervals(found).iloc[0].tolist() == pytest.approx([50.0, 50.0, 0.0])
    assert ratios_to_reference(found, pd.Series({1: 0})).iloc[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.0])
    assert not found["outlying"].any()


def test_null_values_are_ignored_and_null_groups_are_one_group() -> None:
    frame = pd.DataFrame({"c": 0, "worker_group": None, "value": [100.0, np.nan, 102.0, 104.0]})
    row = log_estimates(frame, "c", "value").iloc[0]
    assert (row["n"], row["groups"]) == (3, 1)


def test_a_value_without_a_logarithm_is_refused() -> None:
    with pytest.raises(ValueError, match="^value must be > 0"):
        log_estimates(pd.DataFrame({"c": 0, "worker_group": "a", "value": [1.0, 0.0]}), "c", "value")


def test_a_configuration_whose_repeats_vary_most_keeps_its_own_variance(noise: np.ndarray) -> None:
    noise[4, 2] += 0.4
    found = log_estimates(study(noise), "c", "value")
    assert found.index[found["outlying"]].tolist() == [4]
    assert found.loc[4, "degrees"] == 2
    others = log_estimates(study(np.delete(noise, 4, axis=0)), "c", "value")
    assert found.drop(index=4)["variance"].mean() == pytest.approx(others["variance"].mean(), rel=0.05)


def test_about_one_configuration_in_a_hundred_is_outlying_by_chance() -> None:
    means = np.random.default_rng(2).standard_normal((2_000, 16, 3))
    share = complete(means, np.zeros(16, dtype=int)).outlying.mean()
    assert 0.8 * OUTLYING_P <= share <= 1.3 * OUTLYING_P


@pytest.mark.parametrize("strata", [(False, False, True), (None, False, True)])
def test_a_quiet_configuration_that_spreads_like_no_other_takes_no_interval_from_the_others(
    strata: tuple[bool | None, ...],
) -> None:
    """Its values are then the estimated shifts of the groups."""
    centred = [[-0.0103, -0.0035, 0.0138], [0.0163, 0.0171, -0.0334], [0.0008, -0.0020, 0.0012]]
    frame = study(np.array(centred))
    frame["host_bound"] = frame["c"].map(dict(enumerate(strata)))
    found = log_estimates(frame, "c", "value", stratum="host_bound")
    widths = np.log(intervals(found)["high"] / intervals(found)["low"])
    assert np.isfinite(widths).all()
    assert widths[2] < widths[:2].min()
    of_last = ratios(found.loc[:1], found.loc[[2, 2]].set_axis([0, 1]))
    assert (of_last["low"] < 1).all() and (of_last["high"] > 1).all()


def test_strata_have_variances_of_their_own(noise: np.ndarray) -> None:
    logs = np.vstack([noise, 10 * noise[:6] - 9 * noise[:6].mean(axis=0)])
    frame = study(logs)
    frame["host_bound"] = frame["c"] >= 12
    apart = log_estimates(frame, "c", "value", stratum="host_bound")
    assert np.sqrt(apart.loc[12:, "variance"].mean() / apart.loc[:11, "variance"].mean()) > 7
    alone = log_estimates(study(noise), "c", "value")
    assert apart.loc[:11, "variance"].tolist() == pytest.approx(alone["variance"].tolist(), rel=0.1)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("noisy", [1, 2, 3])
def test_few_noisy_configurations_do_not_widen_the_intervals_of_the_others(noisy: int, is_known: bool) -> None:
    """Three of nine at 30 times the spread made them ten times as wide, because each hid the others from the test."""
    rng = np.random.default_rng(4)
    widths = []
    for _ in range(40):
        logs = 0.01 * rng.standard_normal((9, 3))
        logs[:noisy] *= 30
        frame = study(logs)
        frame["host_bound"] = (frame["c"] < noisy) & is_known
        one, other = (
            log_estimates(part, "c", "value", stratum="host_bound") for part in (frame, frame[frame["c"] > 2])
        )
        logs_of_ends = [np.log(intervals(found).loc[3:, ["low", "high"]]) for found in (one, other)]
        widths.append([float((ends["high"] - ends["low"]).median()) for ends in logs_of_ends])
    ours, alone = np.median(widths, axis=0)
    assert ours < 1.35 * alone


def test_one_noisy_configuration_of_three_does_not_widen_the_intervals_of_the_other_two() -> None:
    rng = np.random.default_rng(5)
    widths = []
    for _ in range(40):
        logs = 0.01 * rng.standard_normal((3, 5)) + 0.01 * rng.standard_normal(5)
        logs[0] *= 30
        both, quiet = (intervals(log_estimates(study(part), "c", "value")) for part in (logs, logs[1:]))
        widths.append([float(np.median(np.log(ends["high"] / ends["low"]))) for ends in (both.loc[1:], quiet)])
    ours, alone = np.median(widths, axis=0)
    assert ours < 1.35 * alone


def test_a_single_configuration_of_its_kind_has_only_its_own_degrees(noise: np.ndarray) -> None:
    frame = study(noise)
    frame["host_bound"] = frame["c"] < 1
    found = log_estimates(frame, "c", "value", stratum="host_bound")
    assert found.loc[0, "degrees"] == 2 and (found.loc[1:, "degrees"] == 2 + PRIOR_DEGREES).all()


def test_restricted_likelihood_agrees_with_the_closed_form_if_nothing_is_missing(noise: np.ndarray) -> None:
    strata = np.zeros(12, dtype=int)
    closed, likelihood = complete(noise, strata), incomplete(noise, strata)
    assert likelihood.shift_variance == pytest.approx(closed.shift_variance, rel=1e-3)
    assert likelihood.shift_degrees == pytest.approx(2)
    assert likelihood.residual_degrees == pytest.approx(22)
    assert likelihood.shift_share.tolist() == pytest.approx([1 / 12] * 12, rel=1e-3)
    assert likelihood.variance.tolist() == pytest.approx(closed.variance.tolist(), rel=0.05)


def test_restricted_likelihood_finds_the_variances_of_studies_with_missing_trials() -> None:
    rng = np.random.default_rng(3)
    shift, rest = [], []
    for _ in range(60):
        logs = rng.standard_normal((10, 4)) + 3 * rng.standard_normal(4)
        logs[rng.random((10, 4)) < 0.15] = np.nan
        logs = logs[(~np.isnan(logs)).sum(axis=1) > 1]
        found = incomplete(logs, np.zeros(len(logs), dtype=int))
        shift.append(float(found.shift_variance))
        rest.append(float(found.variance.mean()))
    assert np.mean(rest) == pytest.approx(1.0, rel=0.06)
    assert np.mean(shift) == pytest.approx(9.1, rel=0.3)


def test_groups_that_only_one_side_has_remain_in_a_ratio(noise: np.ndarray) -> None:
    logs = noise + np.array([0.0, 0.2, -0.2])
    logs[3, 2] = np.nan
    found = log_estimates(study(logs), "c", "value")
    same, apart = (ratios(found.loc[[c]], found.loc[[0]].set_axis([c])).iloc[0] for c in (1, 3))
    assert math.log(apart["high"] / apart["low"]) > 3 * math.log(same["high"] / same["low"])


def test_a_configuration_of_a_single_group_uses_the_variance_of_the_study(noise: np.ndarray) -> None:
    frame = pd.concat([study(noise), pd.DataFrame({"c": 12, "worker_group": "0", "value": [1.0, 1.01]})])
    found = log_estimates(frame, "c", "value")
    assert found.loc[12, "degrees"] == PRIOR_DEGREES
    assert found.loc[12, "variance"] == pytest.approx(found.loc[:11, "variance"].mean(), rel=0.2)
    assert intervals(found).loc[12].notna().all()


def test_trials_that_each_have_their_own_group_are_independent(noise: np.ndarray) -> None:
    frame = study(noise)
    frame["worker_group"] = range(len(frame))
    found = log_estimates(frame, "c", "value")
    own = noise.var(axis=1, ddof=1)
    assert found["shift_variance"].eq(0).all()
    assert found["variance"].tolist() == pytest.approx(list((8 * own.mean() + 2 * own) / 10))


def test_the_ratio_to_a_reference_has_no_interval_for_the_reference_itself(noise: np.ndarray) -> None:
    found = log_estimates(study(noise), "c", "value")
    to_reference = ratios_to_reference(found, pd.Series({0: 0, 2: 1}))
    expected = ratios(found.loc[[2]], found.loc[[1]].set_axis([2]))
    pd.testing.assert_frame_equal(to_reference.loc[[2]], expected, check_names=False)
    assert to_reference.loc[0, "ratio"] == 1
    assert to_reference[["low", "high", "more"]].isna().loc[0].all()


@pytest.mark.parametrize(("low", "high", "expected"), [(1.0, 2.0, True), (1.0, 2.01, False), (0.0, 1e6, False)])
def test_an_interval_beyond_a_factor_of_2_is_not_resolved(low: float, high: float, expected: bool) -> None:
    assert is_resolved(low, high) is expected


def test_the_further_repeats_narrow_the_interval_to_a_factor_of_2_if_the_spread_stays() -> None:
    spread = 0.2
    few = spread * np.array([-1.0, 1.0]) / math.sqrt(2)
    row = intervals(estimates(list(np.exp(few)))).iloc[0]
    assert row["high"] > 2 * row["low"]
    for further, narrow in ((row["more"] - 1, False), (row["more"], True)):
        n = int(2 + further)
        half = stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n)
        assert (math.exp(2 * half) <= 2) is narrow
    assert intervals(estimates([100.0, 101.0])).iloc[0]["more"] == 0
    assert math.isinf(intervals(estimates([1.0, 1e9])).iloc[0]["more"])


def test_a_ratio_of_efficiencies_contains_the_true_one_as_often_as_it_says() -> None:
    """Two studies of 5 groups with a shift each; the 95 % interval of the ratio of their speed-ups, true value 0.9."""
    rng = np.random.default_rng(11)
    true = np.log([[1.0, 3.6], [0.8, 0.8 * 3.6 * 0.9]])
    covered = []
    for _ in range(70):
        sides = [
            log_estimates(
                study(logs[:, None] + 0.02 * rng.standard_normal((2, 5)) + 0.1 * rng.standard_normal(5)), "c", "value"
            )
            for logs in true
        ]
        (a, reference_a), (b, reference_b) = ((side.loc[[1]], side.loc[[0]].set_axis([1])) for side in sides)
        row = ratios_of_ratios((b, reference_b), (a, reference_a)).iloc[0]
        assert (
            row["high"] / row["low"] < 1.3
        )  # the shift of a group, which is five times as large as the noise, cancels
        covered.append(row["low"] <= 0.9 <= row["high"])
    assert 0.89 <= np.mean(covered) <= 0.99
