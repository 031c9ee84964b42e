"""Checks over the duration of a study: drift or a sudden change in the throughput of repeated configurations."""

import numpy as np
import pandas as pd
from scipy import stats

from analysis.checks.finding import FALSE_ALARM, MATTERS, CheckData, Finding, probability
from analysis.text import number, percent

PERMUTATIONS = 999
MIN_TRIALS = 6


def drift(data: CheckData) -> list[Finding]:
    """Find a steady rise or fall in the throughput of repeated configurations during the study.

    Seasonal Kendall test with each configuration as a season, and Sen's slope over the pairs within one (Hirsch, Slack
    and Smith, Water Resources Research 18, 1982). Only repeats of the same configuration are compared.
    """
    rows = _timed(data)
    score = variance = 0.0
    slopes: list[float] = []
    for _, group in rows.groupby("configuration"):
        time_s, level = group["started_at"].to_numpy(), group["log"].to_numpy()
        i, j = np.triu_indices(len(group), 1)
        interval_s, change = time_s[j] - time_s[i], level[j] - level[i]
        score += float((np.sign(interval_s) * np.sign(change)).sum())
        variance += len(group) * (len(group) - 1) * (2 * len(group) + 5) / 18
        slopes += (change[interval_s != 0] / interval_s[interval_s != 0]).tolist()
    if not variance or not slopes:
        return []
    p = 2 * stats.norm.sf(max(0.0, abs(score) - 1) / variance**0.5)
    span_s = rows["started_at"].max() - rows["started_at"].min()
    change = float(np.expm1(np.median(slopes) * span_s))
    if p >= FALSE_ALARM or abs(change) < MATTERS or not _is_steady(rows):
        return []
    sentence = (
        f"Throughput of repeated configurations {'falls' if change < 0 else 'rises'} by {percent(abs(change), 1)} over "
        f"the {number(span_s / 60, 0)} minutes of the study (seasonal Kendall test, p = {probability(p)})."
    )
    fix = (
        "Look for heat, a full disk or another user. Random order keeps drift out of ratios, but not out of intervals."
    )
    return [Finding("drift", sentence, tuple(rows["trial_id"]), fix)]


def change_point(data: CheckData) -> list[Finding]:
    """Find a sudden, lasting change in throughput during the study.

    The statistic is the largest cumulative sum of the trials' deviations from their configuration's mean, in order of
    time (Page, Biometrika 41, 1954). It is compared with `PERMUTATIONS` reorderings of the repeats of each
    configuration.
    """
    rows = _timed(data)
    if len(rows) < MIN_TRIALS:
        return []
    level = _level(rows)
    if not np.ptp(level) > 0:
        return []
    order = np.argsort(rows["configuration"].to_numpy(), kind="stable")
    season = rows["configuration"].to_numpy()[order]
    rng = np.random.default_rng(0)
    largest = np.abs(np.cumsum(level)).max()
    by_season = np.lexsort(
        (rng.random((PERMUTATIONS, len(level))), np.broadcast_to(season, (PERMUTATIONS, len(level))))
    )
    permuted = np.empty((PERMUTATIONS, len(level)))
    permuted[:, order] = level[order][by_season]
    as_large = (np.abs(np.cumsum(permuted, axis=1)).max(axis=1) >= largest).sum()
    p = (1 + as_large) / (1 + PERMUTATIONS)
    cut = _cut(level)
    change = _step_between(rows.assign(after=np.arange(len(rows)) >= cut))
    if p >= FALSE_ALARM or change is None or abs(change) < MATTERS or _is_steady(rows):
        return []
    after = rows.iloc[cut:]
    minutes = (after["started_at"].iloc[0] - rows["started_at"].iloc[0]) / 60
    sentence = (
        f"From minute {number(minutes, 0)} of the study on, repeats of the same configurations are "
        f"{percent(abs(change), 1)} {'slower' if change < 0 else 'faster'} "
        f"(change point, permutation p = {probability(p)})."
    )
    first = after["trial_id"].iloc[0]
    fix = f"Find out what changed on the hosts before trial {first}; rerun the trials before it, or those after it."
    return [Finding("change_point", sentence, tuple(after["trial_id"]), fix)]


def _step_between(rows: pd.DataFrame) -> float | None:
    """Return the median relative change between repeats before and after, over configurations with both."""
    means = rows.pivot_table(index="configuration", columns="after", values="log").dropna()
    return float(np.expm1((means[True] - means[False]).median())) if means.shape[1] == 2 and len(means) else None


def _is_steady(rows: pd.DataFrame) -> bool:
    """Return True if a straight line explains more than a step: then `drift` reports it, else `change_point`."""
    level, time_s = _level(rows), rows["started_at"].to_numpy()
    after = np.arange(len(level)) >= _cut(level)
    return bool(abs(np.corrcoef(time_s, level)[0, 1]) > abs(np.corrcoef(after, level)[0, 1]))


def _level(rows: pd.DataFrame) -> np.ndarray:
    """Return the deviation of each trial's log throughput from the mean of its configuration."""
    return (rows["log"] - rows.groupby("configuration")["log"].transform("mean")).to_numpy()


def _cut(level: np.ndarray) -> int:
    """Return the number of trials before the largest cumulative sum."""
    return int(np.abs(np.cumsum(level))[:-1].argmax()) + 1


def _timed(data: CheckData) -> pd.DataFrame:
    """Return trials of configurations with repeats, with their log throughput, in order of time."""
    rows = data.trials.dropna(subset=["started_at", "throughput_samples_per_s"])
    rows = rows[rows.groupby("configuration")["trial_id"].transform("size") > 1]
    return rows.assign(log=np.log(rows["throughput_samples_per_s"])).sort_values("started_at", kind="stable")
