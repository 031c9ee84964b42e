"""Fits a law to measured steps: parameters with 95 % intervals, residuals, and what it says elsewhere.

Least squares on logarithms, for steps spread by factors; each point counts by its number of repeats, for all points of a
fit are taken to spread alike. That spread is pooled: from the repeats of every point and, where there are more points
than parameters, from what the law leaves. Where the law leaves significantly more than repeats explain (F test, 5 %), it is
the law that is wrong: then its parameters are as uncertain as its residuals say, and a run still spreads as repeats do.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import fdtrc, stdtrit

from analysis.predict.laws import Array, Law, Points
from analysis.statistics import CONFIDENCE

MISFIT_P = 0.05
_RANK_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Spread:
    """Variance of the log of one run's step, and its degrees of freedom; NaN with 0 degrees where nothing tells it."""

    variance: float
    degrees: float


UNKNOWN = Spread(float("nan"), 0.0)


@dataclass(frozen=True)
class NotIdentifiable:
    """A law that the points cannot determine, and why."""

    law: Law
    reason: str


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    values: in the order of the law's parameters. covariance: of these, for a spread of variance 1. residuals:
    log(measured / fitted), a value a point. left: variance that these leave, each by its repeats. spread: behind the
    parameters, see the top of this file; run_spread: of one run. misfit: the law leaves more than repeats explain (None:
    nothing tells).
    """

    law: Law
    values: Array
    covariance: Array
    residuals: Array
    left: Spread
    spread: Spread
    run_spread: Spread
    misfit: bool | None

    def intervals(self) -> Array:
        """95 % intervals of the parameters, shape (parameters, 2); NaN where no spread is known.

        Delta method: Student's t from the Jacobian at the optimum, cut off at the parameter's bounds.
        """
        half = self._t() * np.sqrt(self.spread.variance * np.diag(self.covariance))
        low = [parameter.low for parameter in self.law.parameters]
        high = [parameter.high for parameter in self.law.parameters]
        return np.stack([np.maximum(self.values - half, low), np.minimum(self.values + half, high)], axis=1)

    def step_s(self, points: Points) -> Array:
        """What the law says there, in seconds."""
        return np.asarray(self.law.step_s(points, self.values), dtype=float)

    def leverage(self, points: Points) -> Array:
        """Variance of the log of `step_s` that the parameters' uncertainty makes, for a spread of 1 (delta method)."""
        gradient = log_jacobian(self.law, points, self.values)
        return np.asarray(np.einsum("ij,jk,ik->i", gradient, self.covariance, gradient))

    def _t(self) -> float:
        known = self.spread.degrees > 0
        return float(stdtrit(self.spread.degrees, 0.5 + CONFIDENCE / 2)) if known else float("nan")


def fit(law: Law, points: Points, log_step: Array, repeats: Array, within: Spread) -> Fit | NotIdentifiable:
    """Fits `law` to points with `log_step` = mean of the log of a step in seconds, over so many repeats.

    within: spread of the repeats of a point, pooled over all. Points fewer than parameters, or such that leave a
    parameter open, give NotIdentifiable.
    """
    if lacking := law.lacks(points):
        return NotIdentifiable(law, f"not identifiable: needs {lacking}")
    count = len(law.parameters)
    distinct = len({*zip(points.world_size, points.batch_per_gpu, points.wire_s, strict=True)})
    if distinct < count:
        return _lacking(law, count - distinct)
    unit = float(np.exp(log_step[0]) / points.work[0])  # seconds that parameters of time are counted in
    scale = np.array([unit if parameter.unit == "s" else 1.0 for parameter in law.parameters])
    weight = np.sqrt(np.asarray(repeats, dtype=float))
    start = np.array([parameter.start for parameter in law.parameters])
    low = np.array([parameter.low for parameter in law.parameters])
    high = np.array([parameter.high for parameter in law.parameters])
    low[0] = 1e-6

    def residuals(values: Array) -> Array:
        return weight * (np.log(law.step_s(points, values * scale)) - log_step)

    best = least_squares(residuals, start, bounds=(low, high), x_scale=np.maximum(start, 1e-3), xtol=1e-10, ftol=1e-12)
    values = best.x * scale
    jacobian = weight[:, None] * log_jacobian(law, points, values)
    norms = np.linalg.norm(jacobian, axis=0)
    # A parameter that rests on its bound moves nothing there, such as an exponent where there is nothing to overlap.
    free = (best.active_mask == 0) | (norms > _RANK_TOLERANCE / scale)
    if (norms[free] == 0).any():
        return _lacking(law, int((norms[free] == 0).sum()))
    unit_columns = jacobian[:, free] / norms[free]
    singular = np.linalg.svd(unit_columns, compute_uv=False)
    if rank_lacks := int((singular < _RANK_TOLERANCE * singular[0]).sum()):
        return _lacking(law, rank_lacks)
    covariance = np.zeros((count, count))
    covariance[np.ix_(free, free)] = np.linalg.inv(unit_columns.T @ unit_columns) / np.outer(norms[free], norms[free])
    degrees = float(len(log_step) - count)
    left = Spread(float(2 * best.cost) / degrees, degrees) if degrees > 0 else UNKNOWN
    misfit = leaves_more(left, within)
    spread = left if misfit else pool(within, left)
    return Fit(law, values, covariance, -best.fun / weight, left, spread, within if misfit else spread, misfit)


def log_jacobian(law: Law, points: Points, values: Array) -> Array:
    """Derivatives of the log of the step by each parameter, shape (points, parameters); towards the inside at a bound."""
    middle = np.log(law.step_s(points, values))
    columns = []
    for k, parameter in enumerate(law.parameters):
        size = 1e-6 * max(abs(values[k]), 1e-3 * abs(values[0]) if parameter.unit == "s" else 1e-2)
        at_top = values[k] + size > parameter.high
        moved = values.copy()
        moved[k] += -size if at_top else size
        columns.append((np.log(law.step_s(points, moved)) - middle) / (moved[k] - values[k]))
    return np.stack(columns, axis=1)


def leaves_more(left: Spread, repeats: Spread, level: float = MISFIT_P) -> bool | None:
    """Whether a law leaves significantly more than repeats explain (F test); None where one of the two is not known."""
    if not (left.degrees > 0 and repeats.degrees > 0):
        return None
    if repeats.variance == 0:
        return left.variance > 1e-18
    return bool(fdtrc(left.degrees, repeats.degrees, left.variance / repeats.variance) < level)


def pool(*spreads: Spread) -> Spread:
    """Several estimates of one variance as one, each by its degrees of freedom."""
    known = [each for each in spreads if each.degrees > 0]
    degrees = sum(each.degrees for each in known)
    return Spread(sum(each.variance * each.degrees for each in known) / degrees, degrees) if known else UNKNOWN


def _lacking(law: Law, points: int) -> NotIdentifiable:
    return NotIdentifiable(law, f"not identifiable: needs {points} more point{'s' if points > 1 else ''}")
