"""How much one run of a series spreads: from every repeat and every residual that can tell it, each by its degrees of freedom."""

from collections.abc import Sequence

import pandas as pd

from analysis.fitting import UNKNOWN, Fit, NotIdentifiable, Spread, leaves_more, pool
from analysis.series import Series, pooled
from analysis.study import Analysis

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
