"""Medians, intervals and ratios, compared with values computed by hand, scipy's Welch test and simulated studies."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.statistics import intervals, log_estimates, ratios, ratios_to_reference


def repeats(values: list[float], groups: list[str] | None = None, study: int = 0) -> pd.DataFrame:
    return pd.DataFrame({"study": study, "worker_group": groups or ["a"] * len(values), "value": values})


def estimates(values: list[float], groups: list[str] | None = None) -> pd.DataFrame:
    return log_estimates(repeats(values, groups), "study", "value")


def test_the_interval_of_three_repeats_is_student_t_of_logarithms() -> None:
    row = estimates([100.0, 110.0, 121.0]).iloc[0]
    assert (row["n"], row["groups"], row["degrees"]) == (3, 1, 2)
    assert row["median"] == 110.0
    half = 4.302652729911275 * math.log(1.1) / math.sqrt(3)  # t of two degrees, s = ln 1.1
    interval = intervals(estimates([100.0, 110.0, 121.0])).iloc[0]
    assert interval["low"] == pytest.approx(110 * math.exp(-half))
    assert interval["high"] == pytest.approx(110 * math.exp(half))


def test_the_interval_of_a_ratio_is_welch_t() -> None:
    fast, slow = [402.0, 391.0, 396.0, 399.0, 405.0], [101.0, 97.0, 104.0]
    row = ratios(estimates(fast), estimates(slow)).iloc[0]
    expected = stats.ttest_ind(np.log(fast), np.log(slow), equal_var=False).confidence_interval(0.95)
    assert row["ratio"] == pytest.approx(399 / 101)
    assert (row["low"], row["high"]) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_one_repeat_has_a_median_and_no_interval() -> None:
    alone, several = estimates([100.0]), estimates([100.0, 101.0, 102.0])
    assert alone["median"].iloc[0] == 100.0
    assert intervals(alone).isna().all(axis=None)
    assert ratios(several, alone)[["low", "high"]].isna().all(axis=None)
    assert ratios(several, alone)["ratio"].iloc[0] == pytest.approx(1.01)


def test_equal_repeats_give_an_interval_of_zero_width() -> None:
    same = estimates([50.0, 50.0, 50.0, 50.0], ["a", "a", "b", "b"])
    assert not same["groups_differ"].iloc[0]
    assert intervals(same).iloc[0].tolist() == pytest.approx([50.0, 50.0])
    assert ratios(same, estimates([25.0, 25.0])).iloc[0].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_groups_are_the_sample_if_they_differ() -> None:
    values, groups = [100.0, 100.1, 100.2, 110.0, 110.1], ["a", "a", "a", "b", "b"]
    row = estimates(values, groups).iloc[0]
    means = [np.log(values[:3]).mean(), np.log(values[3:]).mean()]
    assert row["groups_differ"]
    assert row["degrees"] == 1
    assert row["log_mean"] == pytest.approx(np.mean(means))
    assert row["log_variance"] == pytest.approx(np.var(means, ddof=1) / 2)


def test_repeats_are_the_sample_if_groups_agree() -> None:
    values, groups = [100.0, 104.0, 98.0, 101.0, 103.0], ["a", "b", "a", "b", "a"]
    f_test = stats.f_oneway(np.log([100, 98, 103]), np.log([104, 101]))
    assert f_test.pvalue > 0.05
    pd.testing.assert_frame_equal(
        estimates(values, groups).drop(columns="groups"), estimates(values).drop(columns="groups"), check_exact=False
    )


@pytest.mark.parametrize("shift", [1.01, 1.02, 1.03, 1.04, 1.06])
def test_groups_differ_if_and_only_if_the_f_test_is_significant(shift: float) -> None:
    first, second = np.array([100.0, 101.0, 102.5]), shift * np.array([99.7, 100.8])
    f_test = stats.f_oneway(np.log(first), np.log(second))
    row = estimates([*first, *second], ["a"] * 3 + ["b"] * 2).iloc[0]
    assert bool(row["groups_differ"]) == (f_test.pvalue < 0.05)


def test_null_values_are_ignored_and_null_groups_are_one_group() -> None:
    frame = repeats([100.0, np.nan, 102.0, 104.0]).assign(worker_group=None)
    row = log_estimates(frame, "study", "value").iloc[0]
    assert (row["n"], row["groups"]) == (3, 1)


def test_a_value_without_a_logarithm_is_refused() -> None:
    with pytest.raises(ValueError, match="^value must be > 0"):
        estimates([1.0, 0.0])


def coverage(repeat_count: int, group_count: int, between: float = 0.0, studies: int = 12_000) -> float:
    """Return the share of simulated studies whose 95 % interval contains the true ratio, 3.8.

    The relative standard deviation is 1 % between repeats and `between` between groups.
    """
    rng = np.random.default_rng(repeat_count + 100 * group_count)
    study = np.repeat(np.arange(studies), repeat_count)
    group = np.tile(np.arange(repeat_count) % group_count, studies)

    def simulated(true_value: float) -> pd.DataFrame:
        noise = (
            0.01 * rng.standard_normal(len(study)) + between * rng.standard_normal((studies, group_count))[study, group]
        )
        values = true_value * np.exp(noise)
        return log_estimates(
            pd.DataFrame({"study": study, "worker_group": group.astype(str), "value": values}), "study", "value"
        )

    intervals = ratios(simulated(380.0), simulated(100.0))
    return float(((intervals["low"] <= 3.8) & (intervals["high"] >= 3.8)).mean())


@pytest.mark.parametrize(
    ("repeat_count", "group_count", "least", "most"),
    [
        (2, 1, 0.97, 0.99),
        (3, 1, 0.955, 0.975),
        (5, 1, 0.94, 0.96),
        (10, 1, 0.94, 0.96),
        (3, 2, 0.955, 0.98),
        (5, 2, 0.95, 0.97),
    ],
)
def test_intervals_cover_the_true_ratio(repeat_count: int, group_count: int, least: float, most: float) -> None:
    assert least <= coverage(repeat_count, group_count) <= most


def test_intervals_cover_the_true_ratio_of_different_groups_only_if_groups_are_known() -> None:
    assert 0.94 <= coverage(10, 5, between=0.03) <= 0.97
    assert coverage(10, 1, between=0.03) < 0.5  # the same spread between runs, hidden in one group


def test_the_ratio_to_a_reference_has_no_interval_for_the_reference_itself() -> None:
    rows = pd.DataFrame({"by": list("aabbcc"), "worker_group": "g", "value": [1.0, 1.1, 2.0, 2.2, 4.0, 4.1]})
    estimates = log_estimates(rows, "by", "value")
    to_reference = ratios_to_reference(estimates, pd.Series({"a": "a", "c": "b"}))
    expected = ratios(estimates.loc[["c"]], estimates.loc[["b"]].set_axis(["c"]))
    pd.testing.assert_frame_equal(to_reference.loc[["c"]], expected)
    assert to_reference.loc["a", "ratio"] == 1
    assert to_reference[["low", "high"]].isna().loc["a"].all()
