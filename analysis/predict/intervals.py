"""Laws that the measured points cannot tell apart: how much each weighs, and the interval that they span together.

The law that predicts is chosen for its least error on what was held out, which only laws with fewer parameters than
points can be asked about, and among several some law hits that point by chance. Its own interval knows nothing of this; so
the interval is averaged over all laws, each by how well it passes what was measured.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from analysis.predict.fit import UNKNOWN, Fit, NotIdentifiable, Spread, leaves_more, pool
from analysis.predict.laws import Array, Points
from analysis.predict.series import Series, pooled
from analysis.statistics import CONFIDENCE
from analysis.study import Analysis

RESOLUTION = 1e-6
"""Log steps nearer to each other than this count as equal: where nothing spreads, rounding would weigh the laws."""


def akaike_weights(
    series: Sequence[Series], fits: Sequence[Mapping[str, Fit | NotIdentifiable]], spreads: Sequence[Spread]
) -> dict[str, float]:
    """The weight of each law fitted to all of these series, which are taken to follow one law; together 1.

    exp(-AIC / 2) over its sum (Burnham and Anderson, Model Selection and Multimodel Inference, 2002, section 2.9), with
    AIC = Σ N log((ν s² + Σ n r²) / N) + 2 parameters: r is log(measured / fitted) of a point, n its repeats, s² the spread
    of a run with ν degrees, a value a series, and N = ν + points. A law over several batches counts its parameters once
    for each group. NaN where no spread is known. Not corrected for few points (AICc: Hurvich and Tsai, Biometrika 76, 1989;
    undefined for points no more than parameters and one more): laws of three parameters would drop out of studies of three
    points, though these may follow one. Over 200 generated series of 3 points that follow alpha_beta, twice each, 95 %
    intervals then held 43 % of new runs at twice the ranks instead of 85 %, and 83 % instead of 88 % with five repeats.
    """
    names = [name for name in fits[0] if all(isinstance(of_series.get(name), Fit) for of_series in fits)]
    groups = len({each.group for each in series})
    criteria = []
    for name in names:
        criterion = 0.0
        for each, of_series, spread in zip(series, fits, spreads, strict=True):
            found = of_series[name]
            assert isinstance(found, Fit)
            residuals = each.log_step() - np.log(found.step_s(each.measured))
            left = float((each.points["n"].to_numpy(dtype=float) * residuals**2).sum())
            count = spread.degrees + len(residuals)
            criterion += count * np.log((spread.degrees * spread.variance + left) / count + RESOLUTION**2)
        law = fits[0][name].law
        criteria.append(criterion + 2 * len(law.parameters) * (groups if law.joint else len(series)))
    likelihood = np.exp((min(criteria) - np.array(criteria)) / 2)
    return dict(zip(names, (likelihood / likelihood.sum()).tolist(), strict=True))


def averaged_interval(
    laws: Sequence[Fit], weights: Sequence[float], points: Points, run: Spread
) -> tuple[Array, Array]:
    """Ends of the 95 % interval of the log of a new run's step, shape (points,), averaged over laws.

    The ends leave 2.5 % on each side of the laws' predictive distributions, each Student's t with its parameters'
    uncertainty and the spread of one run, averaged by their weights (model-averaged tail area: Turek and Fletcher,
    Computational Statistics and Data Analysis 56, 2012). So a law of little weight counts little, and the interval
    reaches no further than the furthest law's. Above a law the step itself is taken to spread, which is linear in most
    parameters, and below it the logarithm, for no step is negative: the same where either spreads little.
    """
    share = np.array(weights) / np.sum(weights)
    middle = np.log([law.step_s(points) for law in laws])
    scale = np.sqrt([run.variance * (1 + law.leverage(points)) + RESOLUTION**2 for law in laws])

    def quantile(below: float) -> Array:
        at = stdtrit(run.degrees, below) * scale
        of_laws = middle + np.where(at > 0, np.log1p(np.maximum(at, 0)), at)
        low, high = of_laws.min(axis=0), of_laws.max(axis=0)
        for _ in range(50):  # bisection, to 2⁻⁵⁰ of how far the laws are apart
            half_way = (low + high) / 2
            beyond = half_way - middle
            at = np.where(beyond > 0, np.expm1(np.maximum(beyond, 0)), beyond) / scale
            too_low = share @ stdtr(run.degrees, at) < below
            low, high = np.where(too_low, half_way, low), np.where(too_low, high, half_way)
        return np.asarray((low + high) / 2)

    return quantile(0.5 - CONFIDENCE / 2), quantile(0.5 + CONFIDENCE / 2)


ENOUGH = 3
"""Degrees of freedom from which repeats of a series stand for it alone; with fewer, Student's t is above 4."""


SURELY = 0.01
"""Level of the F test that leaves a law's residuals out. Few repeats that agree by chance pass for a wrong law as often as
this, and the interval of a run is then too narrow; so at this level that costs at most 1 % of its coverage."""


def pooled_spread(analysis: Analysis) -> Spread:
    """Spread of repeats over all configurations of a study."""
    found = analysis.configurations
    if found.empty:
        return UNKNOWN
    variance = found["throughput_log_variance"].astype(float) * found["n"].astype(float)
    return pooled(pd.DataFrame({"variance": variance, "degrees": found["throughput_degrees"].astype(float)}))


def run_spread(series: Series, chosen: Fit, like: Sequence[Fit | NotIdentifiable], common: Spread) -> Spread:
    """Spread of the log of one run's step in a series; its degrees are 0 where nothing tells it.

    chosen: the law's fit to the series; like: the law's fits to all series like it; common: spread of repeats anywhere in
    the study. Repeats and what the law leaves are pooled by their degrees of freedom: of the series alone where its own
    repeats have `ENOUGH` of them, for series may spread differently, and else of all. So one repeat more adds to what was
    known, and does not replace it. What the law leaves is left out where it is significantly more than repeats explain,
    for then the law is wrong (pooling after a preliminary test: Bancroft, Biometrics 20, 1964).
    """
    own = series.spread()
    repeats, fits = (own, [chosen]) if own.degrees >= ENOUGH else (common if common.degrees > 0 else own, like)
    once = {id(found): found for found in fits if isinstance(found, Fit)}  # series of one joint fit share its residuals
    left = pool(*(found.left for found in once.values()))
    return repeats if leaves_more(left, repeats, SURELY) else pool(repeats, left)
