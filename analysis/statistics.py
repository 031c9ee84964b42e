"""Compute medians across repeats, and 95 % intervals of medians and of their ratios.

Times and throughputs vary by factors, so all statistics use logarithms. A ratio of two medians is a difference of
logs, and its interval is Welch's t. The point estimate is the median across repeats. The interval is that of the
geometric mean, which estimates the same value if the logs are distributed symmetrically.

Repeats come from several worker groups (newly started processes). If groups differ by more than chance, repeats of
one group are not independent, and the groups themselves become the sample.
"""

import numpy as np
import pandas as pd
from scipy.special import fdtrc, stdtrit

CONFIDENCE = 0.95
GROUPS_DIFFER_P = 0.05
"""Significance level of the one-way F test for differences between worker groups."""


def log_estimates(frame: pd.DataFrame, by: str, value: str, group: str = "worker_group") -> pd.DataFrame:
    """Estimate the log of `value` from the repeats of each configuration, indexed by `by`.

    frame: one row per trial; `value` in any unit, positive. Null values are dropped; null groups count as one group.
    Columns: n (repeats), groups, median (unit of `value`), log_mean, log_variance (of log_mean; NaN for one repeat),
    degrees (of freedom), groups_differ. Raises ValueError for values <= 0.

    If groups agree, the variance is s²/n with n-1 degrees. If they differ by the one-way F test (p < 0.05), it is the
    random-effects variance, that is, the variance of the group means divided by their number, with groups-1 degrees
    (Searle, Casella and McCulloch, Variance Components, 1992, chapter 3).
    """
    data = pd.DataFrame(
        {"by": frame[by], "group": frame[group].fillna(""), "value": frame[value].astype(float)}
    ).dropna(subset=["value"])
    if (data["value"] <= 0).any():
        raise ValueError(f"{value} must be > 0 to take its logarithm")
    data["y"] = np.log(data["value"])
    by_config = data.groupby("by")
    groups_of_config = data.groupby(["by", "group"])["y"].agg(["mean", "count"])
    group_means = groups_of_config["mean"].groupby(level="by")
    n = by_config["y"].count()
    groups = group_means.count()
    mean = by_config["y"].mean()
    within = (data["y"] - data.groupby(["by", "group"])["y"].transform("mean")).pow(2).groupby(data["by"]).sum()
    # Discard rounding errors, so that groups of equal values do not count as different.
    within = within.where(within > 1e-24, 0.0)
    between = (
        (
            groups_of_config["count"]
            * (groups_of_config["mean"] - mean.reindex(groups_of_config.index, level="by")).pow(2)
        )
        .groupby(level="by")
        .sum()
    )
    between = between.where(between > 1e-24, 0.0)
    testable = (groups > 1) & (n > groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        f_value = (between / (groups - 1)) / (within / (n - groups))
    p = pd.Series(fdtrc(groups - 1, n - groups, f_value), index=n.index)
    differ = testable & ((p < GROUPS_DIFFER_P) | ((within == 0) & (between > 0)))
    return pd.DataFrame(
        {
            "n": n,
            "groups": groups,
            "median": by_config["value"].median(),
            "log_mean": group_means.mean().where(differ, mean),
            "log_variance": (group_means.var() / groups).where(differ, by_config["y"].var() / n),
            "degrees": (groups - 1).where(differ, n - 1),
            "groups_differ": differ,
        }
    ).rename_axis(by)


def intervals(estimates: pd.DataFrame) -> pd.DataFrame:
    """Return the 95 % interval of each row of `log_estimates`: columns low and high in the unit of the values.

    Student's t on the logs; NaN for a single repeat.
    """
    return _t_interval(estimates["log_mean"], estimates["log_variance"], estimates["degrees"])


def ratios(numerator: pd.DataFrame, denominator: pd.DataFrame) -> pd.DataFrame:
    """Return the ratio of medians per row with its 95 % interval: columns ratio, low, high, without unit.

    Both frames come from `log_estimates` and have the same index. Welch's t on log means with the degrees of Welch and
    Satterthwaite (Welch, Biometrika 34, 1947); NaN if either side has a single repeat. The two sides are treated as
    independent, which is conservative if they share worker groups that were slow or fast as a whole.

    Coverage of the nominal 95 % in 20,000 simulated studies with equal log-normal spread
    (`python -m benchmarks.truth.coverage`; benchmarks/results/coverage):
    - If groups agree: 97.6 % with 2 repeats, 96.6 % with 3, 95.8 % with 5 and 95.3 % with 10 in one group. With two
      groups it is up to 0.5 % higher, since false positives of the F test widen some intervals.
    - If groups differ as much as repeats do, independently on both sides: 88 % with 5 repeats in two groups and 92 %
      with 10 in five, since the F test often misses differences between so few groups.
    """
    va, vb = numerator["log_variance"], denominator["log_variance"]
    variance = va + vb
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = variance**2 / (va**2 / numerator["degrees"] + vb**2 / denominator["degrees"])
    known = va.notna() & vb.notna()
    degrees = degrees.where(variance > 0, numerator["degrees"] + denominator["degrees"]).where(known)
    result = _t_interval(numerator["log_mean"] - denominator["log_mean"], variance, degrees)
    result.insert(0, "ratio", numerator["median"] / denominator["median"])
    return result


def ratios_to_reference(estimates: pd.DataFrame, reference: pd.Series) -> pd.DataFrame:
    """Return the ratio of medians of each row to its reference: columns ratio, low, high as in `ratios`.

    estimates: from `log_estimates`. reference: maps each compared row to the index label of its reference in
    `estimates`. A row that is its own reference has ratio 1 by definition and no interval.
    """
    result = ratios(estimates.loc[reference.index], estimates.loc[reference].set_axis(reference.index))
    result.loc[reference == reference.index, ["low", "high"]] = float("nan")
    return result


def _t_interval(center: pd.Series, variance: pd.Series, degrees: pd.Series) -> pd.DataFrame:
    known = (variance.notna() & (degrees > 0)).to_numpy()
    t = np.where(known, stdtrit(np.where(known, degrees, 1.0).astype(float), 0.5 + CONFIDENCE / 2), np.nan)
    half = t * np.sqrt(variance.to_numpy(dtype=float))
    center_values = center.to_numpy(dtype=float)
    return pd.DataFrame({"low": np.exp(center_values - half), "high": np.exp(center_values + half)}, index=center.index)


def mean_interval(values: pd.Series, least: float = -np.inf, most: float = np.inf) -> tuple[float, float]:
    """Return the 95 % interval of the mean of plain values (not logs), Student's t; NaN for fewer than two values.

    least, most: bounds of possible values, such as 0 and 1 for a share. The interval is clipped to them, which does
    not reduce its coverage.
    """
    if len(values) < 2:
        return float("nan"), float("nan")
    half = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2) * np.sqrt(values.var() / len(values)))
    return max(float(values.mean()) - half, least), min(float(values.mean()) + half, most)


def welch_difference(values: pd.Series, reference: pd.Series, furthest: float = np.inf) -> tuple[float, float, float]:
    """Return the mean of `values` minus that of `reference` and the ends of its 95 % interval, in their unit.

    Welch's t with the degrees of Welch and Satterthwaite (Welch, Biometrika 34, 1947). The ends are NaN if either side
    has fewer than two values. furthest: largest possible difference, such as 1 for shares. The interval is clipped to
    it, which does not reduce its coverage.
    """
    if values.empty or reference.empty:
        return (float("nan"),) * 3
    difference = float(values.mean() - reference.mean())
    if min(len(values), len(reference)) < 2:
        return difference, float("nan"), float("nan")
    va, vb = values.var() / len(values), reference.var() / len(reference)
    spread = va**2 / (len(values) - 1) + vb**2 / (len(reference) - 1)
    degrees = (va + vb) ** 2 / spread if spread > 0 else len(values) + len(reference) - 2
    half = float(stdtrit(degrees, 0.5 + CONFIDENCE / 2) * np.sqrt(va + vb))
    return difference, max(difference - half, -furthest), min(difference + half, furthest)
