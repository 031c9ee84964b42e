"""Estimate values of configurations and their ratios, with 95 % intervals.

Times and throughputs vary by factors, so all statistics use logarithms. Repeats come from several worker groups (newly
started processes), and repeats of one group are not independent. The sample of a configuration therefore consists of
its group means. Point and interval belong to one estimator: the mean of these group means. Its variance has two parts,
see `two_way`. A ratio of configurations that ran in the same groups does not contain the first one, the groups' shift.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from analysis.two_way import Array, components, independent

CONFIDENCE = 0.95

WIDEST = 2.0
"""Ratio of the ends of an interval above which a value counts as not resolved."""

MOST_FURTHER_REPEATS = 999
"""Largest number of further repeats that is worked out; beyond it, the number is infinite."""

ESTIMATE_COLUMNS = (
    "n", "groups", "value", "log_mean", "variance", "degrees", "outlying", "shift_share", "shift_variance",
    "shift_degrees", "residual_degrees", "sample", "group_names", "own_variance", "own_degrees",
)  # fmt: skip
"""Columns of `log_estimates`."""


def log_estimates(
    frame: pd.DataFrame, by: str, value: str, group: str = "worker_group", stratum: str | None = None
) -> pd.DataFrame:
    """Estimate `value` for each configuration of one study, indexed by `by`.

    frame: one row per trial of a study; `value` in any unit, positive. Null values are dropped; null groups count as
    one group. stratum: column whose most frequent value per configuration says which configurations spread alike, such
    as host_bound.

    Columns: n (repeats), groups; value = exp(log_mean), in its unit; log_mean (mean of the group means of logs);
    variance and degrees (of freedom) of one group mean around the shift of its group, NaN for a single repeat;
    outlying; shift_share, shift_variance, shift_degrees and residual_degrees, see `two_way.Components`; sample (size:
    number of group means); group_names (tuple); own_variance and own_degrees: variance of one group mean, from this
    configuration alone. Raises ValueError for values <= 0.

    If most configurations with repeats ran in a single group, differences between groups are unknown. The repeats are
    then the sample, and intervals only cover the spread within a group.
    """
    known = (frame[value].notna() & frame[by].notna()).to_numpy()
    values = frame[value].to_numpy(dtype=float, na_value=np.nan)[known]
    if (values <= 0).any():
        raise ValueError(f"{value} must be > 0 to take its logarithm")
    # arrays, because as many groupings of a data frame take five times as long
    rows, index = pd.factorize(frame[by][known], sort=True)
    columns, all_names = pd.factorize(frame[group].fillna("")[known], sort=True)
    n = np.bincount(rows, minlength=len(index))
    ran = _table(rows, columns, len(index)) > 0
    groups = ran.sum(axis=1)
    repeated = n > 1
    by_group = bool((groups[repeated] > 1).sum() * 2 >= repeated.sum())
    units = columns if by_group else _numbered_within(rows, n)
    counts = _table(rows, units, len(index))
    with np.errstate(invalid="ignore"):
        means = _table(rows, units, len(index), np.log(values)) / counts
    present = counts > 0
    sample = present.sum(axis=1)
    log_mean = np.where(present, means, 0.0).sum(axis=1) / sample
    squares = np.where(present, means - log_mean[:, None], 0.0) ** 2
    names = np.empty(len(index), dtype=object)
    names[:] = [tuple(all_names[of_row]) if by_group else () for of_row in ran]
    result = pd.DataFrame(
        {
            "n": n,
            "groups": groups,
            "value": np.exp(log_mean),
            "log_mean": log_mean,
            **dict.fromkeys(_OF_COMPONENTS, np.nan),
            "outlying": False,
            "sample": sample,
            "group_names": names,
            "own_variance": np.where(sample > 1, squares.sum(axis=1) / np.maximum(sample - 1, 1), np.nan),
            "own_degrees": sample - 1,
        },
        index=index,
    )
    if repeated.any():
        used = means[repeated]
        strata = _strata(frame, by, stratum, index)[repeated]
        found = (components if by_group else independent)(used[:, present[repeated].any(axis=0)], strata)
        result.loc[repeated, list(_OF_COMPONENTS)] = np.column_stack(
            [np.broadcast_to(getattr(found, name), len(used)) for name in _OF_COMPONENTS]
        )
        result.loc[repeated, "outlying"] = found.outlying
    return result[list(ESTIMATE_COLUMNS)].rename_axis(by)


_OF_COMPONENTS = ("variance", "degrees", "shift_share", "shift_variance", "shift_degrees", "residual_degrees")


def _table(rows: Array, columns: Array, height: int, weights: Array | None = None) -> Array:
    """Count the values per row and column, or add up their weights."""
    width = int(columns.max(initial=-1)) + 1
    return np.bincount(rows * width + columns, weights, minlength=height * width).reshape(height, width)


def _numbered_within(rows: Array, counts: Array) -> Array:
    """Number the values of each row from 0, in their order."""
    order = np.argsort(rows, kind="stable")
    result = np.empty(len(rows), dtype=int)
    result[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return result


def _strata(frame: pd.DataFrame, by: str, stratum: str | None, index: pd.Index) -> Array:
    """Return a number per configuration: the most frequent value of `stratum`, the first of several."""
    if stratum is None:
        return np.zeros(len(index), dtype=int)
    rows = index.get_indexer(pd.Index(frame[by]))
    codes = pd.factorize(frame[stratum].astype(object))[0] + 1  # 0 if unknown
    result: Array = _table(rows[rows >= 0], codes[rows >= 0], len(index)).argmax(axis=1)
    return result


def intervals(estimates: pd.DataFrame) -> pd.DataFrame:
    """Return the 95 % interval of each row of `log_estimates`: columns low, high and more.

    low and high are in the unit of the values, NaN for a single repeat. more: further repeats until the interval is
    resolved, see `is_resolved`; 0 if it is, infinite beyond `MOST_FURTHER_REPEATS`. Student's t on logs with the
    variance (shift_variance + (1 - shift_share) * variance) / sample and the degrees of Satterthwaite (Biometrics
    Bulletin 2, 1946).
    """
    shift, rest = _parts(estimates)
    limit = estimates["residual_degrees"].to_numpy(dtype=float)
    size = estimates["sample"].to_numpy(dtype=float)
    return _interval(estimates["log_mean"], _Variance((shift,), (rest,), limit, size))


def ratios(
    numerator: pd.DataFrame, denominator: pd.DataFrame, *, same_study: bool = True, confidence: float = CONFIDENCE
) -> pd.DataFrame:
    """Return the ratio of values per row with its interval: columns ratio, low, high (no unit) and more.

    Both frames come from `log_estimates` and have the same index. low, high and more as in `intervals`; NaN if either
    side has a single repeat. confidence: of the interval; larger if several ratios are tested at once.

    same_study: both frames come from one call. The shift of a group then cancels if both sides ran in it, and the
    variance is the sum of variance / sample, with the degrees of Welch (Biometrika 34, 1947) and at most
    residual_degrees. The shifts of groups in which only one side ran remain. If False, the sides are independent.
    """
    center = numerator["log_mean"] - denominator["log_mean"]
    result = _interval(center, (_common if same_study else _independent)(numerator, denominator), confidence)
    result.insert(0, "ratio", np.exp(center))
    return result


def paired_ratio(
    frame: pd.DataFrame,
    estimates: pd.DataFrame,
    pair: tuple[Hashable, Hashable],
    value: str,
    confidence: float = CONFIDENCE,
    groups: Collection[str] | None = None,
) -> tuple[float, float, float]:
    """Return the ratio of two configurations of one study and the ends of its interval, from groups in which both ran.

    estimates: of `frame` by `log_estimates`; all configurations count towards the variance. pair: numerator and
    denominator. groups: the worker groups that count for the ratio itself; None for all. The shift of a group cancels.
    NaN if no group has both.
    """
    by = frame[str(estimates.index.name)]
    logs = frame[value].astype(float).map(np.log).groupby([by, frame["worker_group"]]).mean().unstack()
    both = logs.reindex(list(pair)).dropna(axis=1)
    both = both if groups is None else both[[name for name in both if name in groups]]
    if both.empty:
        return (float("nan"),) * 3
    names = pd.Series([tuple(both)] * 2, index=list(pair), dtype=object)
    sides = estimates.loc[list(pair)].assign(log_mean=both.mean(axis=1), sample=both.shape[1], group_names=names)
    numerator, denominator = (sides.iloc[[row]].set_axis([0]) for row in (0, 1))
    found = ratios(numerator, denominator, confidence=confidence).iloc[0]
    return float(found["ratio"]), float(found["low"]), float(found["high"])


def ratios_of_ratios(
    numerator: tuple[pd.DataFrame, pd.DataFrame], denominator: tuple[pd.DataFrame, pd.DataFrame]
) -> pd.DataFrame:
    """Return the ratio of two ratios per row, such as efficiencies, with its interval; columns as in `ratios`.

    Each pair is a ratio within one study, see `ratios`; the two studies are independent.
    """
    (a, b), (c, d) = numerator, denominator
    center = (a["log_mean"] - b["log_mean"]) - (c["log_mean"] - d["log_mean"])
    parts: list[_Part] = []
    variances = [_common(a, b), _common(c, d)]
    for variance in variances:
        rest, degrees = _satterthwaite(variance.rest)
        parts += [*variance.shifts, (rest, np.minimum(degrees, variance.limit))]
    size = np.minimum(*(variance.size for variance in variances))
    result = _interval(center, _Variance((), tuple(parts), np.full(len(size), np.inf), size))
    result.insert(0, "ratio", np.exp(center))
    return result


def ratios_to_reference(estimates: pd.DataFrame, reference: pd.Series) -> pd.DataFrame:
    """Return the ratio of each row to its reference: columns ratio, low, high and more as in `ratios`.

    estimates: from `log_estimates`. reference: maps each compared row to the index label of its reference in
    `estimates`. A row that is its own reference has ratio 1 by definition and no interval.
    """
    result = ratios(estimates.loc[reference.index], estimates.loc[reference].set_axis(reference.index))
    result.loc[reference == reference.index, ["low", "high", "more"]] = float("nan")
    return result


def is_resolved(low: Array | float, high: Array | float) -> Array | bool:
    """Return True if an interval is narrow enough to be printed: its ends differ by at most the factor `WIDEST`."""
    return high <= WIDEST * low


_Part = tuple[Array, Array]
"""A part of a variance, and its degrees of freedom, one value per row."""


@dataclass(frozen=True)
class _Variance:
    """The variance of a log as a sum of parts with their own degrees; the degrees of all `rest` are limited.

    size: of the sample, the smaller one of a ratio.
    """

    shifts: tuple[_Part, ...]
    rest: tuple[_Part, ...]
    limit: Array
    size: Array

    def half_width(self, further: Array | float = 0.0, confidence: float = CONFIDENCE) -> Array:
        """Return half the width of the interval if the sample had `further` values with the same variances."""
        growth = np.maximum(self.size - 1 + further, 1) / np.maximum(self.size - 1, 1)
        rest, rest_degrees = _satterthwaite([(value, degrees + further) for value, degrees in self.rest])
        parts = [(value, degrees + further) for value, degrees in self.shifts]
        total, degrees = _satterthwaite([*parts, (rest, np.minimum(rest_degrees, self.limit * growth))])
        known = ~np.isnan(total) & ((degrees > 0) | (total == 0))
        t = stdtrit(np.where(known & (total > 0), degrees, 1.0), 0.5 + confidence / 2)
        half: Array = np.where(known, t * np.sqrt(total * self.size / (self.size + further)), np.nan)
        return half

    def further_repeats(self) -> Array:
        """Return how many further values make the interval narrow enough; see `MOST_FURTHER_REPEATS`."""
        low, high = np.zeros(len(self.size)), np.full(len(self.size), MOST_FURTHER_REPEATS + 1.0)
        limit = np.log(WIDEST) / 2
        while (high - low > 1).any():
            middle = (low + high) // 2
            narrow = self.half_width(middle) <= limit
            low, high = np.where(narrow, low, middle), np.where(narrow, middle, high)
        return np.where(high > MOST_FURTHER_REPEATS, np.inf, high)


def _satterthwaite(parts: Sequence[_Part]) -> _Part:
    """Return the sum of variances and its degrees of freedom; infinite if the sum is 0."""
    total = np.sum([value for value, _ in parts], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.sum([np.where(value > 0, value**2 / degrees, 0.0) for value, degrees in parts], axis=0)
        return total, np.where(spread > 0, total**2 / spread, np.inf)


def _parts(side: pd.DataFrame) -> tuple[_Part, _Part]:
    """Return the parts of the variance of a mean of group means: that of shifts, and the rest."""
    size, variance, degrees, share, shift, shift_degrees = (
        side[name].to_numpy(dtype=float)
        for name in ("sample", "variance", "degrees", "shift_share", "shift_variance", "shift_degrees")
    )
    return (shift / size, shift_degrees), ((1 - share) * variance / size, degrees)


def _common(a: pd.DataFrame, b: pd.DataFrame) -> _Variance:
    """Return the variance of a ratio of two configurations of one study."""
    size_a, size_b = a["sample"].to_numpy(dtype=float), b["sample"].to_numpy(dtype=float)
    names = zip(a["group_names"], b["group_names"], strict=True)
    both = np.array([len({*first} & {*second}) for first, second in names], dtype=float)
    alone = 1 / size_a + 1 / size_b
    apart = alone - 2 * both / (size_a * size_b)  # sum of squared differences of the weights of groups
    apart = np.where(apart > 1e-12, apart, 0.0)
    rest = []
    for side, size in ((a, size_a), (b, size_b)):
        share, variance, degrees = (side[name].to_numpy(dtype=float) for name in ("shift_share", "variance", "degrees"))
        rest.append(((1 - share * apart / alone) * variance / size, degrees))
    shift = apart * a["shift_variance"].to_numpy(dtype=float), a["shift_degrees"].to_numpy(dtype=float)
    limit = a["residual_degrees"].to_numpy(dtype=float)
    return _Variance((shift,), tuple(rest), limit, np.minimum(size_a, size_b))


def _independent(a: pd.DataFrame, b: pd.DataFrame) -> _Variance:
    """Return the variance of a ratio of configurations of two studies."""
    parts: list[_Part] = []
    for side in (a, b):
        shift, (rest, degrees) = _parts(side)
        parts += [shift, (rest, np.minimum(degrees, side["residual_degrees"].to_numpy(dtype=float)))]
    size = np.minimum(a["sample"].to_numpy(dtype=float), b["sample"].to_numpy(dtype=float))
    return _Variance((), tuple(parts), np.full(len(size), np.inf), size)


def _interval(center: pd.Series, variance: _Variance, confidence: float = CONFIDENCE) -> pd.DataFrame:
    """Return low, high and more of an interval around the log `center`."""
    half = variance.half_width(confidence=confidence)
    logs = center.to_numpy(dtype=float)
    low, high = np.exp(logs - half), np.exp(logs + half)
    more = np.where(np.isnan(half), np.nan, 0.0)
    wide = ~np.isnan(half) & ~np.asarray(is_resolved(low, high))
    more[wide] = variance.further_repeats()[wide]
    return pd.DataFrame({"low": low, "high": high, "more": more}, index=center.index)


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
