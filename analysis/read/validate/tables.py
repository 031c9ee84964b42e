"""Check the tables of trials against their records: sizes before reading, then ranks, windows, steps and times."""

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from analysis.read.schema import SCHEMAS
from analysis.read.validate.records import MAX_ROWS, TrialFile

WINDOWS = (
    "warmup", "plain", "phases", "issue", "busy", "transfer_synced", "communication_warmup", "lead_in", "synchronised",
    "no_sync", "communication", "profile", "evaluation", "train",
)  # fmt: skip
"""Windows that ranks write."""

MAX_BYTES_PER_ROW = 1024
"""Largest size of a row before compression, on average; the widest table has 35 numbers."""

MAX_OVERHEAD_BYTES = 2**20

MAX_TEXT = 256
"""Longest name of a window, operation or process group."""

_FACTOR = 4
_ROWS_PER_RANK: Mapping[str, int] = {"buckets": 4096, "collectives": 4096, "sweep": 100_000}
_SHORTEST_S, _LONGEST_S = 1e-15, 1e9
_NOT_FINITE_IS_UNKNOWN = (
    "loss", "train_loss", "validation_loss", "noise_trace", "noise_norm2",
)  # fmt: skip
_POSITIVE = ("window_s", "step_s", "seconds", "train_s", "group_size")
_SHARES = ("train_top1", "train_top5", "validation_top1", "validation_top5")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "steps": ("rank", "window", "step"),
    "buckets": ("rank", "window", "step", "bucket"),
    "collectives": ("rank", "window", "step", "operation", "group", "bytes", "collective"),
    "sweep": ("rank", "bytes", "repetition"),
    "epochs": ("epoch",),
}
"""Columns that identify a row of a trial."""


def most_rows(name: str, file: TrialFile) -> int:
    """Return the largest number of rows that a table of this trial may have."""
    fields = file.trial
    if name == "epochs":
        return min(MAX_ROWS, _FACTOR * (fields.epochs + 1))
    if name == "steps" and fields.epochs:
        return MAX_ROWS  # the record does not say how many steps an epoch has
    longest = max(file.most_plain_steps, fields.warmup_steps, fields.communication_steps, 64)
    per_rank = _ROWS_PER_RANK.get(name, 1) * (1 if name == "sweep" else longest)
    if name == "steps":
        per_rank = len(WINDOWS) * longest * _FACTOR
    return min(MAX_ROWS, max(file.processes, 1) * per_rank)


def without_infinities(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with null for losses that are not finite."""
    names = [name for name in _NOT_FINITE_IS_UNKNOWN if name in frame]
    return frame.assign(**{name: frame[name].where(np.isfinite(frame[name].astype(float))) for name in names})


def damage(name: str, frame: pd.DataFrame, files: Mapping[str, TrialFile]) -> dict[str, str]:
    """Return what is wrong with a table, by trial id; empty if nothing is.

    frame: rows of complete trials, with trial_id. files: the record of each trial in it.
    """
    found: dict[str, str] = {}
    for bad, reason in _bad_rows(name, frame, files):
        for trial_id in frame["trial_id"][bad.to_numpy(dtype=bool)].unique():
            found.setdefault(str(trial_id), reason)
    return found


def _bad_rows(name: str, frame: pd.DataFrame, files: Mapping[str, TrialFile]) -> Iterator[tuple[pd.Series, str]]:
    """Yield masks of damaged rows with the reason."""
    if frame.empty:
        return
    keys = [key for key in _KEYS[name] if key in frame]
    for column in SCHEMAS[name]:
        if not column.nullable and column.name in frame:
            yield frame[column.name].isna(), f"{column.name} is null"
    for column in frame.columns:
        if pd.api.types.is_numeric_dtype(frame[column]):
            yield from _out_of_range(column, frame[column])
    if name == "sweep":
        yield frame["bytes"] <= 0, "bytes is not positive"
    if "window" in frame:
        yield ~frame["window"].isin(WINDOWS), "has an unknown window"
    yield frame.duplicated(["trial_id", *keys]), f"two rows have the same {', '.join(keys)}"
    if "rank" in frame:
        processes = _of_trial(frame, {key: file.processes for key, file in files.items()})
        yield frame["rank"] >= processes, "has a rank that the trial does not have"
    if name == "steps":
        yield from _bad_steps(frame, files)
    if name == "epochs":
        ordered = frame.sort_values("epoch").groupby("trial_id", observed=True)
        for column in ("step", "samples", "train_s"):
            yield (ordered[column].diff() < 0).reindex(frame.index), f"{column} decreases"


def _out_of_range(column: str, values: pd.Series) -> Iterator[tuple[pd.Series, str]]:
    numbers = values.astype(float)
    yield numbers.isin([np.inf, -np.inf]), f"{column} is not finite"
    if column in _POSITIVE:
        yield numbers <= 0, f"{column} is not positive"
        if column != "group_size":
            yield numbers < _SHORTEST_S, f"{column} is shorter than a femtosecond"
    elif column in _SHARES:
        yield (numbers < 0) | (numbers > 1), f"{column} is not between 0 and 1"
    elif not column.endswith("_s") and column not in _NOT_FINITE_IS_UNKNOWN:
        yield numbers < 0, f"{column} is negative"
    limit = _LONGEST_S if column.endswith("_s") or column == "seconds" else 2.0**53
    if column not in _NOT_FINITE_IS_UNKNOWN:
        yield numbers.abs() > limit, f"{column} is too large"


def _bad_steps(frame: pd.DataFrame, files: Mapping[str, TrialFile]) -> Iterator[tuple[pd.Series, str]]:
    """Yield masks of the steps of trials that are not done as their record says."""
    done = frame["trial_id"].map({key: file.status == "done" for key, file in files.items()}).astype(bool)
    trains = frame["window"] == "train"
    by_trial = frame.groupby("trial_id", observed=True)
    processes = _of_trial(frame, {key: file.processes for key, file in files.items()})
    yield done & ~trains & (by_trial["rank"].transform("nunique") != processes), "a rank has no steps"
    by_window = frame.groupby(["trial_id", "rank", "window"], observed=True)
    yield by_window["window_s"].transform("nunique") > 1, "window_s differs within a window"
    plain = frame["window"] == "plain"
    timed = ~_of_trial(frame, {key: file.trial.epochs > 0 for key, file in files.items()}).astype(bool)
    yield (
        done & timed & ~plain.groupby(frame["trial_id"], observed=True).transform("any"),
        "has no plain window",
    )
    steps = by_window["step"].transform("size")
    planned = _of_trial(frame, {key: file.most_plain_steps for key, file in files.items()})
    yield plain & (steps > planned), "the plain window has more steps than planned"
    fewest = {key: file.fewest_plain_steps for key, file in files.items()}
    yield done & plain & (steps < _of_trial(frame, fewest)), "the plain window has fewer steps than planned"
    for name in ("plain", "phases"):
        here = frame[frame["window"] == name]
        ranks = here.groupby("trial_id", observed=True)["rank"].transform("nunique").reindex(frame.index)
        yield done & (ranks < processes), f"a rank has no {name} window"
        counts = steps[here.index].groupby(here["trial_id"], observed=True).transform("nunique")
        yield counts.reindex(frame.index) > 1, f"ranks have different numbers of steps in the {name} window"
    samples = frame["samples"].where(plain).groupby(frame["trial_id"], observed=True).transform("max")
    yield done & (samples <= 0), "no sample was processed"


def _of_trial(frame: pd.DataFrame, values: Mapping[str, float]) -> pd.Series:
    """Return a value of each row's trial."""
    return frame["trial_id"].astype("str").map(values)
