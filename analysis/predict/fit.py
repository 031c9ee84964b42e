"""Fit a law to measured steps: parameters with 95 % intervals, residuals, and predictions.

The fit is least squares on logarithms, because steps spread by factors. Every point is weighted by its number of
repeats: all points of a fit are assumed to spread alike. This spread is pooled from the repeats of every point and, if
there are more points than parameters, from the residuals of the law. If the residuals are significantly larger than
repeats explain (F test, 5 %), the law is wrong. Its parameters are then as uncertain as its residuals.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares
from scipy.special import fdtrc, stdtrit

from analysis.predict.laws import Array, Law, Points
from analysis.statistics import CONFIDENCE

LACK_OF_FIT_LEVEL = 0.05
_RANK_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Spread:
    """Variance of the logarithm of one step time, with its degrees of freedom; NaN and 0 if unknown."""

    variance: float
    degrees: float


UNKNOWN = Spread(float("nan"), 0.0)


@dataclass(frozen=True)
class NotIdentifiable:
    """A law whose parameters the points cannot determine, with the reason."""

    law: Law
    reason: str


@dataclass(frozen=True)
class Fit:
    """A fitted law.

    values: parameters in the order of the law's. covariance: of `values`, for a spread of variance 1. residuals:
    log(measured / fitted), one value per point. residual_spread: variance of the residuals, weighted by repeats.
    spread: used for the parameters, see the module docstring. lack_of_fit: True if the residuals are larger than
    repeats explain; None if unknown.
    """

    law: Law
    values: Array
    covariance: Array
    residuals: Array
    residual_spread: Spread
    spread: Spread
    lack_of_fit: bool | None

    def intervals(self) -> Array:
        """Return 95 % intervals of the parameters, shape (parameters, 2); NaN if the spread is unknown.

        Delta method: Student's t from the Jacobian at the optimum, clipped to the bounds of the parameter.
        """
        half = self._t() * np.sqrt(self.spread.variance * np.diag(self.covariance))
        low = [parameter.low for parameter in self.law.parameters]
        high = [parameter.high for parameter in self.law.parameters]
        return np.stack([np.maximum(self.values - half, low), np.minimum(self.values + half, high)], axis=1)

    def step_s(self, points: Points) -> Array:
        """Return the fitted step times in seconds."""
        return np.asarray(self.law.step_s(points, self.values), dtype=float)

    def leverage(self, points: Points) -> Array:
        """Return the variance of log `step_s` due to the parameters' uncertainty, for a spread of 1.

        Delta method, one value per point.
        """
        gradient = log_jacobian(self.law, points, self.values)
        return np.asarray(np.einsum("ij,jk,ik->i", gradient, self.covariance, gradient))

    def _t(self) -> float:
        is_known = self.spread.degrees > 0
        return float(stdtrit(self.spread.degrees, 0.5 + CONFIDENCE / 2)) if is_known else float("nan")


def fit(law: Law, points: Points, log_step: Array, repeats: Array, within: Spread) -> Fit | NotIdentifiable:
    """Fit `law` to points. `log_step` is the mean log of the step in seconds over `repeats` runs.

    within: spread of the repeats of a point, pooled over all points. Returns NotIdentifiable if there are fewer points
    than parameters, or if the points leave a parameter undetermined.
    """
    if missing := law.missing_input(points):
        return NotIdentifiable(law, f"not identifiable: needs {missing}")
    count = len(law.parameters)
    distinct = len({*zip(points.world_size, points.batch_per_gpu, points.wire_s, strict=True)})
    if (missing_points := max(count, law.least_points) - distinct) > 0:
        return _needs_points(law, missing_points)
    unit = float(np.exp(log_step[0]) / points.work[0])  # unit of parameters that are times, in seconds
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
    # A parameter at its bound may have no effect, such as an overlap exponent with nothing to overlap.
    free = (best.active_mask == 0) | (norms > _RANK_TOLERANCE / scale)
    if (norms[free] == 0).any():
        return _needs_points(law, int((norms[free] == 0).sum()))
    unit_columns = jacobian[:, free] / norms[free]
    singular = np.linalg.svd(unit_columns, compute_uv=False)
    if rank_deficiency := int((singular < _RANK_TOLERANCE * singular[0]).sum()):
        return _needs_points(law, rank_deficiency)
    covariance = np.zeros((count, count))
    covariance[np.ix_(free, free)] = np.linalg.inv(unit_columns.T @ unit_columns) / np.outer(norms[free], norms[free])
    degrees = float(len(log_step) - count)
    residual_spread = Spread(float(2 * best.cost) / degrees, degrees) if degrees > 0 else UNKNOWN
    lack_of_fit = has_lack_of_fit(residual_spread, within)
    spread = residual_spread if lack_of_fit else pool(within, residual_spread)
    return Fit(
        law,
        values,
        covariance,
        -best.fun / weight,
        residual_spread,
        spread,
        lack_of_fit,
    )


def log_jacobian(law: Law, points: Points, values: Array) -> Array:
    """Return the derivatives of the log step by each parameter, shape (points, parameters).

    At a bound the difference is taken towards the inside.
    """
    middle = np.log(law.step_s(points, values))
    columns = []
    for k, parameter in enumerate(law.parameters):
        size = 1e-6 * max(abs(values[k]), 1e-3 * abs(values[0]) if parameter.unit == "s" else 1e-2)
        at_top = values[k] + size > parameter.high
        moved = values.copy()
        moved[k] += -size if at_top else size
        columns.append((np.log(law.step_s(points, moved)) - middle) / (moved[k] - values[k]))
    return np.stack(columns, axis=1)


def has_lack_of_fit(residual_spread: Spread, repeats: Spread, level: float = LACK_OF_FIT_LEVEL) -> bool | None:
    """Return True if the residuals are significantly larger than repeats explain (F test); None if unknown."""
    if not (residual_spread.degrees > 0 and repeats.degrees > 0):
        return None
    if repeats.variance == 0:
        return residual_spread.variance > 1e-18
    return bool(fdtrc(residual_spread.degrees, repeats.degrees, residual_spread.variance / repeats.variance) < level)


def pool(*spreads: Spread) -> Spread:
    """Combine several estimates of one variance, weighted by their degrees of freedom."""
    known = [spread for spread in spreads if spread.degrees > 0]
    degrees = sum(spread.degrees for spread in known)
    return Spread(sum(spread.variance * spread.degrees for spread in known) / degrees, degrees) if known else UNKNOWN


def _needs_points(law: Law, points: int) -> NotIdentifiable:
    return NotIdentifiable(law, f"not identifiable: needs {points} more point{'s' if points > 1 else ''}")
