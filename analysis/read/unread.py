"""Fields that vary in a study although a user's workload never reads them: such trials are identical."""

import dataclasses
from typing import Any

import pandas as pd

from analysis.read.results import Results


def unread_axes(trials: pd.DataFrame) -> dict[str, tuple[Any, ...]]:
    """Return the values of each field that varies among trials of a workload that never reads it, by field.

    trials: as in `Results`. Trials that do not record what was read keep all their fields.
    """
    if "workload" not in trials:
        return {}
    found: dict[str, tuple[Any, ...]] = {}
    for _, part in trials[trials["workload"].fillna("") != ""].groupby("workload"):
        for name in sorted(unread_fields(part)):
            values = tuple(part[name].dropna().unique()) if name in part else ()
            if len(values) > 1:
                found[name] = values
    return found


def with_merged_axes(results: Results) -> Results:
    """Give trials that differ only in a field that their workload never reads one value of it: they are repeats."""
    trials = results.trials
    names = unread_axes(trials)
    if not names:
        return results
    own = trials["workload"].fillna("") != ""
    for name in names:
        first = trials[own].groupby("workload")[name].transform("first")
        trials = trials.assign(**{name: trials[name].where(~own, first)})
    return dataclasses.replace(results, trials=trials)


def unread_fields(trials: pd.DataFrame) -> set[str]:
    """Return the fields that no rank of any done trial read; empty if a trial has no record of it."""
    unread: set[str] | None = None
    for environment in trials.loc[trials["status"] == "done", "environment"]:
        for rank in (environment or {}).get("ranks") or [{}]:
            names = set(rank.get("unread_fields") or ())
            unread = names if unread is None else unread & names
    return unread or set()
