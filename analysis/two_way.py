"""Estimate the variance of group means: a shift that a worker group gives to all configurations, and the rest.

Model: m[c, g] = mu[c] + a[g] + e[c, g], with m the mean log of configuration c in worker group g, a the group's shift
with variance sigma_a^2, and e with variance sigma[c]^2. There is no preliminary test for differences between groups.
The few degrees of freedom of a configuration are extended by `PRIOR_DEGREES` of the study, that is, its variance is
shrunk towards that of its stratum (Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004, with
fixed prior degrees). Strata are host-bound or not, for example. A configuration whose variance lies beyond the 1 %
point of the F distribution keeps its own. If it lies beyond the 1 % point of the largest of all configurations, it does
not count towards the variance of its stratum either. The latter test goes from half of a stratum to a single
configuration, so that several do not hide each other (Rosner, Technometrics 25, 1983).

If every configuration ran in every group, the estimates have a closed form (analysis of variance, weighted if strata
differ). Otherwise they are by restricted maximum likelihood (Searle, Casella and McCulloch, Variance Components, 1992,
chapter 6). Coverage: benchmarks/results/coverage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import fdtri

Array = np.ndarray[Any, np.dtype[Any]]

PRIOR_DEGREES = 8
"""Degrees of freedom of the study's variance. 4 to 12 cover 97.4 to 95.9 %, and 96.9 to 95.0 % if spreads differ."""

OUTLYING_P = 0.01
"""A configuration with a variance that is this improbable, given the others of its stratum, keeps its own.

It is excluded from the variance of the stratum if even the largest of all its configurations is that improbable. To
exclude all outlying ones costs 1 to 2 % of coverage if configurations differ in their spread.
"""

_FIRST_P = 0.003
"""The same for the first pass, before weights are known. With 0.01, some studies whose spreads differ cover 93.9 %."""

_EXCLUDED_AT_MOST = 0.5
"""Largest share of a stratum that is excluded."""

_ROUNDING = 1e-20
"""Variance of a logarithm below which values are equal but for rounding."""

_ITERATIONS = 8


@dataclass(frozen=True)
class Components:
    """Variance components, each an array [..., configurations] or, for those of the study, [...].

    variance, degrees: of a group mean around the shift of its group (NaN if unknown). outlying: the configuration keeps
    its own variance. shift_variance, shift_degrees: of a group's estimated shift, including its estimation error;
    0 without groups that configurations share. shift_share: share of `variance` that this error contains, so that the
    variance of a group mean is shift_variance + (1 - shift_share) * variance. residual_degrees: degrees of freedom of
    all configurations together.
    """

    variance: Array
    degrees: Array
    outlying: Array
    shift_share: Array
    shift_variance: Array
    shift_degrees: Array
    residual_degrees: Array


def components(means: Array, strata: Array) -> Components:
    """Estimate the components of one study.

    means: [configurations, groups], logs, NaN if the configuration did not run in the group. strata: [configurations],
    integers.
    """
    present = ~np.isnan(means)
    repeated = present.sum(axis=1) > 1
    is_shared = bool((present[repeated].sum(axis=0) > 1).any())
    if not is_shared:
        return independent(means, strata)
    return complete(means, strata) if present.all() else incomplete(means, strata)


def independent(means: Array, strata: Array) -> Components:
    """Estimate the components of values [..., configurations, values] without shared groups; missing ones are NaN."""
    counts = (~np.isnan(means)).sum(axis=-1)
    center = np.nansum(means, axis=-1) / np.maximum(counts, 1)
    squares = np.nansum((means - center[..., None]) ** 2, axis=-1)
    degrees = np.maximum(counts - 1.0, 0.0)
    excluded = np.zeros(squares.shape, dtype=bool)
    for _ in range(_ITERATIONS):
        excluded = _excluded(squares, degrees, degrees, strata, excluded)
    variance, own_degrees, outlying, _ = _shrunk(squares, degrees, degrees, strata, excluded)
    nothing = np.zeros(squares.shape[:-1])
    return Components(variance, own_degrees, outlying, np.zeros(squares.shape), nothing, nothing, degrees.sum(axis=-1))


def complete(means: Array, strata: Array) -> Components:
    """Estimate the components of [..., configurations, groups] without missing values, two or more of each."""
    configurations, groups = means.shape[-2:]
    centred = means - means.mean(axis=-1, keepdims=True)
    degrees = np.full(means.shape[:-1], groups - 1.0)
    excluded = np.zeros(means.shape[:-1], dtype=bool)
    share = np.full(means.shape[:-1], 1.0 / configurations)
    for iteration in range(_ITERATIONS):
        is_first = iteration == 0
        # A single noisy configuration would spread to all others in the mean, but not in the median.
        shift = np.median(centred, axis=-2) if is_first else (share[..., None] * centred).sum(axis=-2)
        squares = ((centred - shift[..., None, :]) ** 2).sum(axis=-1)
        freedom = degrees * (1 - share)
        p, of_shift = (_FIRST_P, groups - 1.0) if is_first else (OUTLYING_P, 0.0)
        excluded = _excluded(squares, freedom, degrees, strata, excluded, p=p, of_shift=of_shift)
        variance, own_degrees, outlying, pooled = _shrunk(squares, freedom, degrees, strata, excluded)
        weights = 1 / np.maximum(np.where(excluded, variance, pooled), _ROUNDING)
        before, share = share, weights / weights.sum(axis=-1, keepdims=True)
        if not is_first and np.abs(share - before).max() < 1e-6:
            break
    return Components(
        variance,
        own_degrees,
        outlying,
        before,
        (shift**2).sum(axis=-1) / (groups - 1),
        np.full(means.shape[:-2], groups - 1.0),
        np.full(means.shape[:-2], (configurations - 1.0) * (groups - 1.0)),
    )


def incomplete(means: Array, strata: Array) -> Components:
    """Estimate the components of [configurations, groups] with missing values (NaN) by restricted likelihood."""
    present = ~np.isnan(means)
    counts = present.sum(axis=1)
    degrees = counts - 1.0
    centred = np.where(present, means - np.nanmean(means, axis=1, keepdims=True), 0.0)
    excluded = np.zeros(len(means), dtype=bool)
    for _ in range(_ITERATIONS):
        of_class = np.where(excluded, strata.max() + 1 + np.arange(len(means)), strata)
        shift_variance, variance = _restricted_maximum(present, centred, of_class)
        layout = _layout(present, 1 / variance)
        inverse = np.linalg.inv(layout + np.eye(len(layout)) / max(shift_variance, _ROUNDING))
        shift = inverse @ (centred / variance[:, None]).sum(axis=0)
        residual = np.where(present, centred - shift, 0.0)
        residual -= present * (residual.sum(axis=1) / counts)[:, None]
        squares = (residual**2).sum(axis=1)
        freedom = degrees - np.array([np.trace(_layout(one[None], np.ones(1)) @ inverse) for one in present]) / variance
        before, excluded = excluded, _excluded(squares, freedom, degrees, strata, excluded)
        if (excluded == before).all():
            break
    own_variance, own_degrees, outlying, _ = _shrunk(squares, freedom, degrees, strata, excluded)
    information = layout - layout @ inverse @ layout  # Z'PZ
    first, second = np.trace(information), (information**2).sum()
    # tau^2 = sigma_a^2 + nu, with nu chosen so that its estimate is uncorrelated with that of the residual variance.
    tau, tau_degrees = first / second, first**2 / second
    share = np.clip((tau - shift_variance) / variance, 0.0, 1.0)
    residual_degrees = max(1.0, float(degrees.sum() - tau_degrees))
    return Components(
        own_variance, own_degrees, outlying, share, np.array(tau), np.array(tau_degrees), np.array(residual_degrees)
    )


def _restricted_maximum(present: Array, centred: Array, strata: Array) -> tuple[float, Array]:
    """Return the variance of the shift and, per configuration, that of its stratum, by restricted likelihood."""
    degrees = present.sum(axis=1) - 1.0
    squares = (centred**2).sum(axis=1)
    names, index = np.unique(strata, return_inverse=True)
    totals = np.bincount(index, squares) / np.maximum(np.bincount(index, degrees), 1.0)
    scale = max(float(squares.sum() / max(degrees.sum(), 1.0)), _ROUNDING)
    start = np.log(np.maximum(np.concatenate([[scale], totals]) / 2, 1e-6 * scale))
    bounds = [(np.log(1e-8 * scale), np.log(1e4 * scale))] * len(start)

    def deviance(logs: Array) -> float:
        shift_variance, variance = np.exp(logs[0]), np.exp(logs[1:])[index]
        layout = _layout(present, 1 / variance)
        right = (centred / variance[:, None]).sum(axis=0)
        system = np.eye(len(layout)) + shift_variance * layout
        explained = shift_variance * right @ np.linalg.solve(system, right)
        return float(
            (degrees * np.log(variance)).sum() + np.linalg.slogdet(system)[1] + (squares / variance).sum() - explained
        )

    best = minimize(deviance, start, method="L-BFGS-B", bounds=bounds)
    shift_variance = float(np.exp(best.x[0]))
    return (0.0 if shift_variance < 1e-6 * scale else shift_variance), np.exp(best.x[1:])[index]


def _layout(present: Array, weights: Array) -> Array:
    """Return Z'R^-1MZ [groups, groups]: the information on the shifts, after the means of configurations."""
    counts = present.sum(axis=1)
    weighted = present * weights[:, None]
    return np.diag(weighted.sum(axis=0)) - (weighted / counts[:, None]).T @ present


def _summed(values: Array, strata: Array, counted: Array) -> Array:
    """Return, per configuration, the sum over all counted configurations of its stratum."""
    result = np.empty(values.shape)
    for stratum in np.unique(strata):
        members = strata == stratum
        result[..., members] = (values * counted)[..., members].sum(axis=-1, keepdims=True)
    return result


def _excluded(
    squares: Array,
    freedom: Array,
    degrees: Array,
    strata: Array,
    excluded: Array,
    p: float = OUTLYING_P,
    of_shift: float = 0.0,
) -> Array:
    """Return which configurations do not count towards the variance of their stratum, given those known so far.

    of_shift: degrees of freedom that the estimated shifts take from those of the smaller variances.

    The k largest variances are excluded together if the smallest of them lies beyond the limit for the rest, with 1 / k
    of the probability. A test of the largest alone would find none of several, because each hides the others.
    """
    variance = squares / np.where(freedom > 0.05 * degrees, freedom, np.inf)
    result = excluded.copy()
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        order = members[np.argsort(-variance[..., members], axis=-1)]
        largest_first = [np.take_along_axis(values, order, axis=-1) for values in (squares, freedom, degrees)]
        first = np.arange(len(members)) < _EXCLUDED_AT_MOST * len(members)
        limits = p / len(members) / np.arange(1, len(members) + 1)
        beyond = _beyond_smaller(largest_first, limits, of_shift) & first
        together = np.flip(np.logical_or.accumulate(np.flip(beyond, axis=-1), axis=-1), axis=-1)
        found = np.zeros(result.shape, dtype=bool)
        np.put_along_axis(found, order, together, axis=-1)
        result |= found
    return result


def _beyond_smaller(largest_first: Sequence[Array], p: Array, of_shift: float) -> Array:
    """Return which variances lie beyond the upper `p` of the F distribution, given all smaller ones together.

    largest_first: sums of squares, their freedom, and degrees, in the order of the variances.
    """
    smaller = [np.flip(np.cumsum(np.flip(values, axis=-1), axis=-1), axis=-1) - values for values in largest_first]
    smaller[2] = np.maximum(smaller[2] - of_shift, 0.0)
    return _is_beyond(largest_first, smaller, p)


def _beyond(squares: Array, freedom: Array, degrees: Array, strata: Array, excluded: Array, p: float) -> Array:
    """Return which variances lie beyond the upper `p` of the F distribution, given the others of their stratum."""
    one = (squares, freedom, degrees)
    return _is_beyond(one, [_summed(values, strata, ~excluded) - values * ~excluded for values in one], p)


def _is_beyond(one: Sequence[Array], others: Sequence[Array], p: Array | float) -> Array:
    """Return whether variances exceed those of others, both as sums of squares, their freedom, and degrees for F."""
    (squares, freedom, degrees), (others_squares, others_freedom, others_degrees) = one, others
    testable = (freedom > 0.05 * degrees) & (others_freedom > 1e-9) & (degrees > 0) & (others_degrees > 0)
    variance = squares / np.where(testable, freedom, 1.0)
    of_others = np.maximum(others_squares / np.where(testable, others_freedom, 1.0), _ROUNDING)
    limit = fdtri(np.maximum(degrees, 1.0), np.maximum(others_degrees, 1.0), 1 - p)
    result: Array = testable & (variance > _ROUNDING) & (variance > limit * of_others)
    return result


def _shrunk(
    squares: Array, freedom: Array, degrees: Array, strata: Array, excluded: Array
) -> tuple[Array, Array, Array, Array]:
    """Return variance, degrees and whether outlying per configuration, and the variance of its stratum."""
    counted = ~excluded
    outlying = excluded | _beyond(squares, freedom, degrees, strata, excluded, OUTLYING_P)
    total = _summed(freedom, strata, counted)  # 0 if the estimated shifts are the values of the only configuration
    prior = np.clip(_summed(degrees, strata, counted) - degrees * counted, 0.0, PRIOR_DEGREES)
    prior = np.where(outlying, 0.0, prior)
    own_degrees = np.where(freedom > 0.05 * degrees, degrees, 0.0)
    pooled = _summed(squares, strata, counted) / np.where(total > 0, total, np.inf)
    own = squares / np.where(own_degrees > 0, freedom, 1.0)
    with np.errstate(invalid="ignore"):
        shrunk = (np.where(prior > 0, prior * pooled, 0.0) + own_degrees * own) / (prior + own_degrees)
    # All others vary much more, so that the estimated shifts are this configuration's own values.
    is_shift = (degrees > 0) & (prior + own_degrees == 0)
    return np.where(is_shift | (shrunk < _ROUNDING), 0.0, shrunk), prior + own_degrees, outlying, pooled
