"""What the steps of one window look like: one row a trial, from which `analysis.checks.steps` tells whether something is odd.

Like `analysis.load.reduce` this is made while steps are read, so that they need not all be in memory.
"""

from typing import Any

import numpy as np
import pandas as pd
from diptest import diptest

from analysis.load.reduce import require

WINDOW = "phases"
"""The window whose steps are timed one by one, all in free running."""

FEWEST_STEPS = 8
"""Below this nothing is said of how the steps of a window look."""

OUTLIER_DEVIATIONS = 5.0
"""A step is an outlier above the median by so many standard deviations, estimated as 1.4826 times the median deviation
(Rousseeuw and Croux, Journal of the American Statistical Association 88, 1993)..."""

OUTLIER_EXCESS = 0.05
"""...and by this part of the median, so that steps that are equal to rounding have none."""

SHAPE_COLUMNS = (
    "trial_id", "steps", "median_s", "first_s", "first_is_slowest", "early_s", "late_s", "early_u", "early_u_mean",
    "early_u_variance", "outliers", "outliers_s", "dip_p", "low_s", "high_s", "high_share",
)  # fmt: skip


def step_shapes(steps: pd.DataFrame) -> pd.DataFrame:
    """A row for each trial with at least `FEWEST_STEPS` steps in its window with phases, with `SHAPE_COLUMNS`.

    steps: in the layout of steps.parquet. A step's time is the median over its ranks, which wait for each other anyway.
    Raises ValueError naming missing columns.

    steps: how many. median_s: of all but the first. first_s: the first, first_is_slowest: no other takes longer.
    early_s, late_s: medians of the first quarter after the first step and of the last half. early_u: how many pairs of an
    early and a late step have the early one slower (Mann and Whitney's U, ties half), with its mean and variance where
    order says nothing. outliers: positions of steps, after the first, far above the median; outliers_s: what they
    take beyond the median, together. dip_p: Hartigan's dip test (Annals of Statistics 13, 1985): how likely a sample of one
    mode is as unlike one as this. low_s, high_s, high_share: medians of the two classes that divide the logarithms with
    least variance within (Otsu, 1979), and the share of the slower.
    """
    require(steps, ("trial_id", "window", "step", "step_s"), "the frame of steps")
    timed = steps.loc[steps["window"] == WINDOW, ["trial_id", "step", "step_s"]]
    timed = timed[timed["step_s"] > 0]
    each = timed.groupby(["trial_id", "step"], observed=True)["step_s"].median()
    rows = [
        {"trial_id": trial_id} | _shape(step_s.to_numpy())
        for trial_id, step_s in each.groupby(level="trial_id", observed=True)
        if len(step_s) >= FEWEST_STEPS
    ]
    return pd.DataFrame(rows, columns=list(SHAPE_COLUMNS))


def _shape(step_s: np.ndarray) -> dict[str, Any]:
    first_s, rest_s = float(step_s[0]), step_s[1:]
    rest = np.log(rest_s)
    middle = np.median(rest)
    spread = 1.4826 * np.median(np.abs(rest - middle))
    far = np.flatnonzero(rest - middle > max(OUTLIER_DEVIATIONS * spread, np.log1p(OUTLIER_EXCESS)))
    early, late = rest[: max(2, len(rest) // 4)], np.sort(rest[-(len(rest) // 2) :])
    below = np.searchsorted(late, early, side="left") + np.searchsorted(late, early, side="right")
    pairs = len(early) * len(late)
    ordered = np.sort(rest)
    low, high = _two_classes(ordered)
    return {
        "steps": len(step_s),
        "median_s": np.exp(middle),
        "first_s": first_s,
        "first_is_slowest": first_s > rest_s.max(),
        "early_s": np.exp(np.median(early)),
        "late_s": np.exp(np.median(late)),
        "early_u": below.sum() / 2,
        "early_u_mean": pairs / 2,
        "early_u_variance": pairs * (len(early) + len(late) + 1) / 12,
        "outliers": tuple((far + 1).tolist()),
        "outliers_s": float((rest_s[far] - np.exp(middle)).sum()),
        "dip_p": diptest(ordered, sort_x=False)[1] if ordered[-1] > ordered[0] else 1.0,
        "low_s": np.exp(np.median(low)),
        "high_s": np.exp(np.median(high)),
        "high_share": len(high) / len(ordered),
    }


def _two_classes(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cut of a sorted sample into two that leaves the least variance within them."""
    count = np.arange(1, len(ordered))
    left = np.cumsum(ordered)[:-1]
    right = ordered.sum() - left
    between = left**2 / count + right**2 / (len(ordered) - count)
    cut = int(between.argmax()) + 1
    return ordered[:cut], ordered[cut:]
