"""Combine laws that the measured points cannot distinguish: their weights and their common interval.

The law used for prediction has the smallest error on held-out points. Only laws with fewer parameters than points can
be tested in this way, and one of several laws may hit such a point by chance. The interval of the chosen law ignores
this. The interval is therefore averaged over all laws, weighted by how well each fits the measured points.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from analysis.predict.fit import UNKNOWN, Fit, NotIdentifiable, Spread, has_lack_of_fit, pool
from analysis.predict.laws import Array, Points
from analysis.predict.series import ScalingSeries, pooled
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

RESOLUTION = 1e-6
"""Log steps closer than this count as equal. Without spread, rounding errors would decide the weights."""


def akaike_weights(
    series: Sequence[ScalingSeries], fits: Sequence[Mapping[str, Fit | NotIdentifiable]], spreads: Sequence[Spread]
) -> dict[str, float]:
    """Return the weight of one_series law fitted to all of these series; weights add up to 1.

    The series are assumed to follow one law. A weight is exp(-AIC / 2) over its sum (Burnham and Anderson, Model
    Selection and Multimodel Inference, 2002, section 2.9), with AIC = Σ N log((ν s² + Σ n r²) / N) + 2 parameters. Here
    r is log(measured / fitted) of a point, n its repeats, s² the spread of a run with ν degrees of freedom (one value
    per series), and N = ν + points. A joint law counts its parameters once per group. NaN if the spread is unknown.

    There is no correction for few points (AICc: Hurvich and Tsai, Biometrika 76, 1989). It is undefined unless points
    exceed parameters by more than one, so it would exclude laws of three parameters from studies of three points.
    Measured over 200 generated series of 3 points that follow alpha_beta: with AICc, 95 % intervals held 43 % of new
    runs at twice the ranks instead of 85 % (two repeats), and 83 % instead of 88 % (five repeats).
    """
    names = [name for name in fits[0] if all(isinstance(series_fits.get(name), Fit) for series_fits in fits)]
    groups = len({one_series.group for one_series in series})
    criteria = []
    for name in names:
        criterion = 0.0
        for one_series, series_fits, spread in zip(series, fits, spreads, strict=True):
            law_fit = series_fits[name]
            assert isinstance(law_fit, Fit)
            residuals = one_series.log_step() - np.log(law_fit.step_s(one_series.measured))
            weighted_squares = float((one_series.points["n"].to_numpy(dtype=float) * residuals**2).sum())
            count = spread.degrees + len(residuals)
            criterion += count * np.log((spread.degrees * spread.variance + weighted_squares) / count + RESOLUTION**2)
        law = fits[0][name].law
        criteria.append(criterion + 2 * len(law.parameters) * (groups if law.joint else len(series)))
    likelihood = np.exp((min(criteria) - np.array(criteria)) / 2)
    return dict(zip(names, (likelihood / likelihood.sum()).tolist(), strict=True))


def averaged_interval(
    laws: Sequence[Fit], weights: Sequence[float], points: Points, run: Spread
) -> tuple[Array, Array]:
    """Return the 95 % interval of the log step of a new run, averaged over laws.

    Two arrays of shape (points,). Each law has a predictive distribution: Student's t with the uncertainty of its
    parameters and the spread of one run. The ends leave 2.5 % of the weighted average of these distributions on each
    side (model-averaged tail area: Turek and Fletcher, Computational Statistics and Data Analysis 56, 2012). A law with
    a small weight therefore counts little, and the interval never extends beyond that of the furthest law. Above a
    law's prediction the step itself is assumed to spread, which is linear in most parameters. Below it the logarithm
    spreads, since no step is negative. For small spreads both agree.
    """
    share = np.array(weights) / np.sum(weights)
    middle = np.log([law.step_s(points) for law in laws])
    scale = np.sqrt([run.variance * (1 + law.leverage(points)) + RESOLUTION**2 for law in laws])

    def quantile(below: float) -> Array:
        offset = stdtrit(run.degrees, below) * scale
        law_quantiles = middle + np.where(offset > 0, np.log1p(np.maximum(offset, 0)), offset)
        low, high = law_quantiles.min(axis=0), law_quantiles.max(axis=0)
        for _ in range(50):  # bisection, to 2⁻⁵⁰ of the distance between the laws
            middle_of_bracket = (low + high) / 2
            distance = middle_of_bracket - middle
            offset = np.where(distance > 0, np.expm1(np.maximum(distance, 0)), distance) / scale
            too_low = share @ stdtr(run.degrees, offset) < below
            low, high = np.where(too_low, middle_of_bracket, low), np.where(too_low, high, middle_of_bracket)
        return np.asarray((low + high) / 2)

    return quantile(0.5 - CONFIDENCE / 2), quantile(0.5 + CONFIDENCE / 2)


ENOUGH_DEGREES = 3
"""With this many degrees of freedom, repeats of a series are used alone. With fewer, Student's t is above 4."""


LACK_OF_FIT_LEVEL = 0.01
"""Level of the F test that excludes a law's residuals from the spread. If few repeats agree by chance, a correct law
fails the test this often, and the interval of a run is then too narrow. At this level that costs at most 1 % of
coverage.
"""


def pooled_spread(analysis: Analysis) -> Spread:
    """Return the spread of repeats, pooled over all configurations of a study."""
    configurations = analysis.configurations
    if configurations.empty:
        return UNKNOWN
    variance = configurations["throughput_own_variance"].astype(float)
    return pooled(
        pd.DataFrame({"variance": variance, "degrees": configurations["throughput_own_degrees"].astype(float)})
    )


def run_spread(series: ScalingSeries, chosen: Fit, like: Sequence[Fit | NotIdentifiable], common: Spread) -> Spread:
    """Return the spread of the log step of one run in a series; 0 degrees of freedom if unknown.

    chosen: fit of the chosen law to the series. like: fits of that law to all similar series. common: spread of repeats
    anywhere in the study. Repeats and residuals of the law are pooled by their degrees of freedom. If the series has at
    least `ENOUGH_DEGREES` of its own, only the series counts, since series may spread differently; otherwise
    all count. An extra repeat therefore adds to the estimate instead of replacing it. The residuals are excluded if
    they are significantly larger than repeats explain, because the law is then wrong (pooling after a preliminary test:
    Bancroft, Biometrics 20, 1964).
    """
    series_spread = series.spread()
    repeats, fits = (
        (series_spread, [chosen])
        if series_spread.degrees >= ENOUGH_DEGREES
        else (common if common.degrees > 0 else series_spread, like)
    )
    # Series of one joint fit share its residuals, so count them once.
    distinct = {id(law_fit): law_fit for law_fit in fits if isinstance(law_fit, Fit)}
    residual_spread = pool(*(law_fit.residual_spread for law_fit in distinct.values()))
    return repeats if has_lack_of_fit(residual_spread, repeats, LACK_OF_FIT_LEVEL) else pool(repeats, residual_spread)
