"""Medians across repeats, and 95 % intervals for them and for their ratios.

Times and throughputs spread by factors, so everything is done on logarithms: a ratio of two medians is a difference of
logs, and its interval is Welch's t. The point is the median across repeats; the interval is that of the geometric mean,
which estimates the same value wherever the logs spread evenly to both sides.

Repeats come from several worker groups (processes started afresh). Where groups differ by more than chance, repeats of
one group are no independent evidence, and the groups themselves become the sample.
"""

import numpy as np
import pandas as pd
from scipy.special import fdtrc, stdtrit

CONFIDENCE = 0.95
GROUPS_DIFFER_P = 0.05
"""Level of the one-way F test at which worker groups count as different."""


def log_estimates(frame: pd.DataFrame, by: str, value: str, group: str = "worker_group") -> pd.DataFrame:
    """What the repeats of each configuration say about the log of `value`, indexed by `by`.

    frame: a row a trial; `value` in any unit, positive. Null values are left out; a null group counts as one group.
    Columns: n (repeats), groups, median (unit of `value`), log_mean, log_variance (of log_mean; NaN for one repeat),
    degrees (of freedom), groups_differ.

    Within groups that agree: variance s²/n with n-1 degrees. Where the one-way F test says that groups differ
    (p < 0.05): the random-effects variance, that of the groups' means over their number, with groups-1 degrees
    (Searle, Casella and McCulloch, Variance Components, 1992, chapter 3).
    """
    data = pd.DataFrame(
        {"by": frame[by], "group": frame[group].fillna(""), "value": frame[value].astype(float)}
    ).dropna(subset=["value"])
    if (data["value"] <= 0).any():
        raise ValueError(f"{value} holds values of 0 or less, which have no logarithm")
    data["y"] = np.log(data["value"])
    by_config = data.groupby("by")
    cells = data.groupby(["by", "group"])["y"].agg(["mean", "count"])
    of_cells = cells["mean"].groupby(level="by")
    n = by_config["y"].count()
    groups = of_cells.count()
    mean = by_config["y"].mean()
    within = (data["y"] - data.groupby(["by", "group"])["y"].transform("mean")).pow(2).groupby(data["by"]).sum()
    # Differences at the level of rounding are none: equal values must not pass for groups that differ.
    within = within.where(within > 1e-24, 0.0)
    between = (
        (cells["count"] * (cells["mean"] - mean.reindex(cells.index, level="by")).pow(2)).groupby(level="by").sum()
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
            "log_mean": of_cells.mean().where(differ, mean),
            "log_variance": (of_cells.var() / groups).where(differ, by_config["y"].var() / n),
            "degrees": (groups - 1).where(differ, n - 1),
            "groups_differ": differ,
        }
    ).rename_axis(by)


def intervals(estimates: pd.DataFrame) -> pd.DataFrame:
    """The 95 % interval of each row of `log_estimates`: columns low and high in the unit of the values.

    Student's t on the logs; NaN where one repeat leaves nothing to tell the spread from.
    """
    return _t_interval(estimates["log_mean"], estimates["log_variance"], estimates["degrees"])


def ratios(numerator: pd.DataFrame, denominator: pd.DataFrame) -> pd.DataFrame:
    """Ratio of medians, row by row, with its 95 % interval: columns ratio, low, high, without unit.

    Both frames come from `log_estimates` and have the same index. Welch's t on log means with the degrees of Welch and
    Satterthwaite (Welch, Biometrika 34, 1947); NaN where either side has one repeat. The two sides are treated as
    independent, which is the safe side where they share worker groups that were slow or fast as a whole.

    Coverage of the nominal 95 %, over 20,000 generated studies with equal log-normal spread (`python -m benchmarks.truth.coverage`;
    benchmarks/results/coverage): where groups agree 97.6 % with 2 repeats, 96.6 % with 3, 95.8 % with 5 and 95.3 % with 10
    in one group, and up to 0.5 % more in two (the F test, wrong once in twenty, widens some). Where groups differ by as
    much as repeats do, and independently on both sides of the ratio, 5 repeats in two groups cover 88 %, and 10 in five
    92 %: so few groups are often not found to differ.
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
    """Ratio of medians of each row to its reference: columns ratio, low, high as in `ratios`.

    estimates: from `log_estimates`. reference: index label of each row's reference in `estimates`, indexed by the rows that
    are compared. A row that is its own reference has ratio 1 by definition and no interval.
    """
    result = ratios(estimates.loc[reference.index], estimates.loc[reference].set_axis(reference.index))
    result.loc[reference == reference.index, ["low", "high"]] = float("nan")
    return result


def _t_interval(center: pd.Series, variance: pd.Series, degrees: pd.Series) -> pd.DataFrame:
    known = (variance.notna() & (degrees > 0)).to_numpy()
    t = np.where(known, stdtrit(np.where(known, degrees, 1.0).astype(float), 0.5 + CONFIDENCE / 2), np.nan)
    half = t * np.sqrt(variance.to_numpy(dtype=float))
    middle = center.to_numpy(dtype=float)
    return pd.DataFrame({"low": np.exp(middle - half), "high": np.exp(middle + half)}, index=center.index)


def mean_interval(values: pd.Series, least: float = -np.inf, most: float = np.inf) -> tuple[float, float]:
    """The 95 % interval of the mean of plain values (not logs), Student's t; NaN for fewer than two.

    least, most: what no such value can lie beyond, 0 and 1 for a share; the interval is cut off there, which takes nothing
    from its coverage.
    """
    if len(values) < 2:
        return float("nan"), float("nan")
    half = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2) * np.sqrt(values.var() / len(values)))
    return max(float(values.mean()) - half, least), min(float(values.mean()) + half, most)


def welch_difference(values: pd.Series, reference: pd.Series, furthest: float = np.inf) -> tuple[float, float, float]:
    """Mean of `values` less that of `reference`, with the ends of its 95 % interval, all in their unit.

    Welch's t with the degrees of Welch and Satterthwaite (Welch, Biometrika 34, 1947); the ends are NaN where either side
    has fewer than two values. furthest: how far apart two such values can be, 1 for shares; the interval is cut off there,
    which takes nothing from its coverage.
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
