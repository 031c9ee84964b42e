"""Combine the laws of a series: their Akaike weights, and the interval averaged over them.

No law is picked. Each one counts by how well it agrees with the measured steps, and with the parts of the communication
breakdown, so the prediction and its interval include how far the laws disagree.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import stdtr, stdtrit

from analysis.predict.fit import Fit, NotIdentifiable, Spread, has_lack_of_fit, pool
from analysis.predict.laws import Array, Points
from analysis.predict.series import ScalingSeries
from analysis.statistics import CONFIDENCE

RESOLUTION = 1e-6
"""Log steps closer than this count as equal. Without spread, rounding errors would decide the weights."""

PRIOR_DEGREES = 8.0
"""Degrees of freedom of what other studies say about a spread, as in the intervals of repeats."""

OTHER_STUDIES = {False: Spread(0.0081**2, PRIOR_DEGREES), True: Spread(0.111**2, PRIOR_DEGREES)}
"""Spread of the log step of one run in the committed GPU studies; True: of steps that the host bounds.

The second is also used if the host computes the step (CPU ranks, which share their cores), and if it moves the
gradients (over sockets), where equal trials spread as much. Source: benchmarks/results/prediction, "spread of a run":
equal trials on two hosts (communication and communication-first), and repeats of default-1gpu and, if host-bound, of
default-4gpu.
"""

LAW_ERROR = Spread(0.0101**2, PRIOR_DEGREES)
"""Error of the log step at twice the fitted number of ranks beyond what runs spread, in the committed GPU studies.

Source: benchmarks/results/prediction, "error of the laws beyond the spread of runs".
"""

BREAKDOWN_SPREAD = 0.01
"""Spread of a part of the communication breakdown, as a share of the step.

It is measured in the same processes as the step, by instruments that make a step 0 to 3 % longer (docs/evidence.md).
"""


def run_spread(repeats: Spread, with_host: bool) -> Spread:
    """Return the spread of the log step of one run.

    repeats: of all configurations of the study that spread as the host does (`with_host`, see `series.run_spreads`), or
    of all others; 0 degrees of freedom without repeats. They are pooled with `OTHER_STUDIES`, so that a second repeat
    adds to what is known instead of replacing it. If they spread significantly more than other studies (F test), they
    count alone.
    """
    others = OTHER_STUDIES[with_host]
    return repeats if has_lack_of_fit(repeats, others) else pool(repeats, others)


def akaike_weights(
    series: ScalingSeries, fits: Mapping[str, Fit | NotIdentifiable], spread: Spread
) -> dict[str, float]:
    """Return the weight of each law fitted to the series; weights add up to 1.

    A weight is exp(-AIC / 2) over its sum (Burnham and Anderson, Model Selection and Multimodel Inference, 2002,
    section 2.9), with AIC = N log((ν s² + Σ n r²) / N) + Σ (p / b)² + 2 parameters. Here r is log(measured / fitted) of
    a point, n its repeats, s² the spread of a run with ν degrees of freedom, and N = ν + points. p is the share of the
    step by which a law misses the transfer or the wait of the communication breakdown, with spread b. The law of the
    breakdown takes both as measured. Like a measured all-reduce, they are no parameters.

    Two numbers of ranks determine every law of two parameters exactly. Only the breakdown tells these laws apart.
    """
    names = [name for name, law_fit in fits.items() if isinstance(law_fit, Fit)]
    criteria = []
    for name in names:
        law_fit = fits[name]
        assert isinstance(law_fit, Fit)
        residuals = series.log_step() - np.log(law_fit.step_s(series.measured))
        weighted_squares = float((series.points["n"].to_numpy(dtype=float) * residuals**2).sum())
        count = spread.degrees + len(residuals)
        criterion = count * np.log((spread.degrees * spread.variance + weighted_squares) / count + RESOLUTION**2)
        criteria.append(criterion + 2 * len(law_fit.law.parameters) + _misses_of_parts(series, law_fit))
    likelihood = np.exp((min(criteria, default=0.0) - np.array(criteria)) / 2)
    return dict(zip(names, (likelihood / likelihood.sum()).tolist(), strict=True))


def _misses_of_parts(series: ScalingSeries, law_fit: Fit) -> float:
    """Return what the communication breakdown adds to the AIC of a law."""
    parts = series.breakdown
    if parts is None or law_fit.law.part is None:
        return 0.0
    points = series.measured[series.measured.world_size == parts.world_size]
    cost = 1 - float(law_fit.values[0] * points.work[0] / law_fit.step_s(points)[0])
    shares = {"transfer": parts.wire_s / parts.step_s, "wait": parts.wait_s / parts.step_s}
    misses = [cost * (law_fit.law.part == part) - share for part, share in shares.items()]
    return float(np.square(misses).sum()) / BREAKDOWN_SPREAD**2


def averaged_interval(
    laws: Sequence[Fit], weights: Sequence[float], points: Points, run: Spread, law_error: Array | float = 0.0
) -> tuple[Array, Array]:
    """Return the 95 % interval of the log step of a new run, averaged over laws.

    Two arrays of shape (points,). law_error: variance of the log step at these points because no law is exact; it has
    the degrees of freedom of `LAW_ERROR`. Each law has a predictive distribution: Student's t with the uncertainty of
    its parameters, the spread of one run and the error of the law (degrees by Welch and Satterthwaite). The ends leave
    2.5 % of the weighted average of these distributions on each side (model-averaged tail area: Turek and Fletcher,
    Computational Statistics and Data Analysis 56, 2012). A law with a small weight therefore counts little, and the
    interval never extends beyond that of the furthest law. Above a law's prediction the step itself is assumed to
    spread, which is linear in most parameters. Below it the logarithm spreads, since no step is negative. For small
    spreads both agree.
    """
    share = np.array(weights) / np.sum(weights)
    middle = np.log([law.step_s(points) for law in laws])
    of_run = np.array([run.variance * (1 + law.leverage(points)) for law in laws])
    of_law = np.broadcast_to(law_error, of_run.shape)
    degrees = (of_run + of_law) ** 2 / (of_run**2 / run.degrees + of_law**2 / LAW_ERROR.degrees)
    scale = np.sqrt(of_run + of_law + RESOLUTION**2)

    def quantile(below: float) -> Array:
        offset = stdtrit(degrees, below) * scale
        law_quantiles = middle + np.where(offset > 0, np.log1p(np.maximum(offset, 0)), offset)
        low, high = law_quantiles.min(axis=0), law_quantiles.max(axis=0)
        for _ in range(50):  # bisection, to 2⁻⁵⁰ of the distance between the laws
            middle_of_bracket = (low + high) / 2
            distance = middle_of_bracket - middle
            offset = np.where(distance > 0, np.expm1(np.maximum(distance, 0)), distance) / scale
            too_low = share @ stdtr(degrees, offset) < below
            low, high = np.where(too_low, middle_of_bracket, low), np.where(too_low, high, middle_of_bracket)
        return np.asarray((low + high) / 2)

    return quantile(0.5 - CONFIDENCE / 2), quantile(0.5 + CONFIDENCE / 2)
