"""Describe the distribution of step times: one row per trial, in which `analysis.checks.steps` looks for anomalies.

As in `analysis.read.reduce`, steps are reduced while they are read, so they need not all fit in memory.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from diptest import diptest

from analysis.read.reduce import require
from analysis.read.schema import PHASES

WINDOW = "phases"
"""The window whose steps are timed one by one, without synchronisation between them."""

FEWEST_STEPS = 8
"""Trials with fewer steps in the window get no row."""

OUTLIER_DEVIATIONS = 5.0
"""A step is an outlier if it exceeds the median by this many standard deviations, estimated as 1.4826 times the median
absolute deviation (Rousseeuw and Croux, Journal of the American Statistical Association 88, 1993)..."""

OUTLIER_EXCESS = 0.05
"""...and by this share of the median, so that nearly constant step times have no outliers."""

SHAPE_COLUMNS = (
    "trial_id", "steps", "median_s", "first_s", "first_is_slowest", "early_s", "late_s", "early_u", "early_u_mean",
    "early_u_variance", "outliers", "outliers_s", "dip_p", "low_s", "high_s", "high_share", "longest_step", "longest_s",
    "usual_s", "recurring_s", "longest_after_s", "longest_rank", "longest_phase", "plain_steps", "rare", "rare_times",
    "rare_share",
)  # fmt: skip

RECURRING = 3
"""Steps that must be at least as long for a time to be one that recurs."""

RARE_TIMES, MOST_RARE = 3.0, 0.25
"""Rare steps of a plain window take at least this many times the median, and are at most this share of its steps."""

_WAITING = ("backward_s", "reduce_s")
"""Phases in which a rank waits for the others."""


def step_shapes(steps: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial with at least `FEWEST_STEPS` steps in the window with phases, with `SHAPE_COLUMNS`.

    The argument has the layout of steps.parquet. The time of a step is the median over ranks, which wait for each other
    anyway, without the longest wait of a rank for its batch: loader processes deliver in bursts. Raises ValueError for
    missing columns.

    Columns of the result:
    steps: number of steps. first_s: time of the first step. median_s: median of the others.
    first_is_slowest: whether the first step is slower than all others.
    early_s, late_s: medians of the first quarter, without the first step, and of the last half.
    early_u: Mann-Whitney U, the number of (early, late) pairs in which the early step is slower; ties count half.
    early_u_mean, early_u_variance: mean and variance of U if the order has no influence but that neighbours are alike.
    outliers: positions of the steps after the first that are far above the median. outliers_s: their total excess.
    dip_p: p-value of Hartigan's dip test for one mode (Annals of Statistics 13, 1985).
    low_s, high_s: medians of the two classes with the least variance of log time within classes (Otsu, 1979).
    high_share: share of the slower class.
    longest_step, longest_s, longest_after_s: number of the longest step, with the wait for its batch, its time on the
    slowest rank, and the time of the steps before it. usual_s: the median of such times. recurring_s: that of the step
    with `RECURRING` others between it and the longest. longest_rank, longest_phase: where most of its excess is,
    outside of phases in which ranks wait for each other; null if there is no such rank.
    plain_steps: steps of the plain window, null if they have no times of their own. rare: how many of them are rare,
    see `RARE_TIMES`. rare_times: median of their times / that of all. rare_share: median excess of one / the window.
    """
    require(steps, ("trial_id", "window", "step", "step_s"), "the frame of steps")
    phases = [name for name in PHASES if name in steps]
    ranks = ["rank"] if "rank" in steps else []
    timed = steps.loc[steps["window"] == WINDOW, ["trial_id", *ranks, "step", "step_s", *phases]]
    timed = timed[timed["step_s"] > 0]
    of_trial = dict(list(timed.groupby("trial_id", observed=True)))
    by_step = timed.groupby(["trial_id", "step"], observed=True)
    step_times_s = by_step["step_s"].median()
    if "load_wait_s" in phases:
        unloaded_s = step_times_s - by_step["load_wait_s"].max().astype(float).fillna(0.0)
        step_times_s = unloaded_s.where(unloaded_s > 0, step_times_s)
    is_plain = (steps["window"] == "plain") & (steps["step_s"] > 0)
    plain_s = steps[is_plain].groupby(["trial_id", "step"], observed=True)["step_s"].median()
    rare = {trial_id: _rare(step_s.to_numpy()) for trial_id, step_s in plain_s.groupby(level="trial_id", observed=True)}
    rows = [
        {"trial_id": trial_id}
        | _shape(step_s.to_numpy())
        | _longest(of_trial[trial_id], phases)
        | rare.get(trial_id, {})
        for trial_id, step_s in step_times_s.groupby(level="trial_id", observed=True)
        if len(step_s) >= FEWEST_STEPS
    ]
    return pd.DataFrame(rows, columns=list(SHAPE_COLUMNS))


def _longest(timed: pd.DataFrame, phases: Sequence[str]) -> dict[str, Any]:
    """Describe the longest step of a trial; timed: its steps on all ranks."""
    by_step = timed.groupby("step")["step_s"].max()
    step: Any = by_step.idxmax()
    median_s = by_step.median()
    place: Any = (np.nan, None)
    names = [name for name in phases if name not in _WAITING]
    if "rank" in timed and names:
        usual_s = timed.groupby("rank")[names].median()
        excess_s = timed[timed["step"] == step].set_index("rank")[names].fillna(0.0).sub(usual_s.fillna(0.0)).stack()
        if excess_s.max() > (by_step.max() - median_s) / 2:
            place = excess_s.idxmax()
    return {
        "longest_step": step,
        "longest_s": by_step.max(),
        "usual_s": median_s,
        "recurring_s": by_step.nlargest(RECURRING + 2).min(),
        "longest_after_s": by_step[by_step.index < step].sum(),
        "longest_rank": place[0],
        "longest_phase": place[1],
    }


def _rare(step_s: np.ndarray) -> dict[str, Any]:
    """Describe the rare steps of a plain window."""
    middle_s = float(np.median(step_s))
    far_s = step_s[step_s >= RARE_TIMES * middle_s]
    is_rare = 0 < len(far_s) <= MOST_RARE * len(step_s)
    return {
        "plain_steps": len(step_s),
        "rare": len(far_s) if is_rare else 0,
        "rare_times": float(np.median(far_s)) / middle_s if is_rare else np.nan,
        "rare_share": (float(np.median(far_s)) - middle_s) / step_s.sum() if is_rare else 0.0,
    }


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
        "early_u_variance": pairs * (len(early) + len(late) + 1) / 12 * _correlated(rest[-len(late) :]),
        "outliers": tuple((far + 1).tolist()),
        "outliers_s": float((rest_s[far] - np.exp(middle)).sum()),
        "dip_p": diptest(ordered, sort_x=False)[1] if ordered[-1] > ordered[0] else 1.0,
        "low_s": np.exp(np.median(low)),
        "high_s": np.exp(np.median(high)),
        "high_share": len(high) / len(ordered),
    }


def _correlated(values: np.ndarray) -> float:
    """Return the factor by which correlation of neighbours increases the variance of a mean: (1 + r) / (1 - r).

    r: correlation with the next value, at least 0 and below 1 (a process of first order; Priestley: Spectral Analysis
    and Time Series, section 5.3.2).
    """
    deviations = values - values.mean()
    total = float((deviations**2).sum())
    r = max(0.0, float((deviations[1:] * deviations[:-1]).sum()) / total) if total else 0.0
    return (1 + r) / (1 - r)


def _two_classes(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a sorted sample into the two classes with the least variance within classes."""
    count = np.arange(1, len(ordered))
    left = np.cumsum(ordered)[:-1]
    right = ordered.sum() - left
    between = left**2 / count + right**2 / (len(ordered) - count)
    cut = int(between.argmax()) + 1
    return ordered[:cut], ordered[cut:]
