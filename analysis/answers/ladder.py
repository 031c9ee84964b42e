"""Answers of acceleration-ladder: what each step changes and gains, all steps together, and what a precision costs."""

import pandas as pd

from analysis.answers.reply import Missing, Reply, highest, measured, repeats, share, times
from analysis.compare.accuracy import by_precision
from analysis.compare.ladder import BATCHES, NO_GAIN, OURS, is_gain
from analysis.measure.configurations import trial_fields
from analysis.predict.inputs import ReportInputs
from analysis.text import MISSING, join, number, text

_NOT_SETTINGS = ("repeat", "seed", "nodes")
_STRATEGY_ONLY = ("batch_per_gpu",)
"""Fields that follow from the number of ranks, because the global batch is held."""


def steps(inputs: ReportInputs) -> Reply | Missing:
    """State, for each step of the ladder, what it changed and its gain against the step it differs from."""
    rows = _ours(inputs)
    if len(rows) < 2:
        return Missing("fewer than two steps of the ladder are done", "--data-dir DIR")
    fields = _fields(inputs)
    lines, numbers = [], {}
    for _, row in rows.iloc[1:].iterrows():
        against = rows[rows["step"] == row["against"]].iloc[0]
        changed = _changes(fields.loc[against["trial_ids"][0]], fields.loc[row["trial_ids"][0]])
        gain = measured(row.drop("n"), "step_ratio", 2, unit="x")
        lines.append(
            f"“{row['step']}” ({join(changed)}): {gain} of “{row['against']}”, {times(row['cumulative_ratio'])} in all."
        )
        numbers[str(row["step"])] = float(row["step_ratio"])
    return Reply("\n".join([_largest_gain(rows), *lines]), numbers)


def _largest_gain(rows: pd.DataFrame) -> str:
    """Name the step that gains most, unless its interval contains no gain."""
    largest = highest(rows, "step_ratio")
    runs = f"({repeats(rows['n'].min())} per step)"
    if not is_gain(largest, "step_ratio"):
        return f"{NO_GAIN} {runs}."
    return f"Largest gain: “{largest['step']}”, {times(largest['step_ratio'])} {runs}."


def total(inputs: ReportInputs) -> Reply | Missing:
    """State the gain of all steps together, next to that of each published ladder."""
    rows = _ours(inputs)
    if len(rows) < 2:
        return Missing("fewer than two steps of the ladder are done", "--data-dir DIR")
    best = highest(rows, "cumulative_ratio")
    first = rows.iloc[0]
    published = inputs.ladder[inputs.ladder["machine"] != OURS]
    listed = []
    for machine, ladder in published.groupby("machine", sort=False):
        end = ladder.iloc[-1]
        listed.append(
            f"{machine} gains {times(end['cumulative_ratio'])} after {len(ladder) - 1} changes "
            f"({number(ladder['batches_s'].iloc[0], 1)} s to {number(end['batches_s'], 1)} s per {BATCHES} batches)"
        )
    next_to_it = f" Published: {'; '.join(listed)}, on other hardware, so compare gains only." if listed else ""
    timed = _timed_batches(inputs, rows)
    counts = " to ".join(str(count) for count in sorted({*timed}))
    scaled = "" if {*timed} == {BATCHES} else f"{counts} timed, scaled; "
    gain = "gain" if is_gain(best, "cumulative_ratio") else "gain nothing that is resolved,"
    return Reply(
        f"All steps together {gain} {measured(best, 'cumulative_ratio', 2, unit='x')}, at “{best['step']}”: "
        f"{BATCHES} batches of {number(best['samples'], 0)} samples take {number(best['batches_s'], 1)} s in place of "
        f"{number(first['batches_s'], 1)} s ({scaled}{repeats(rows['n'].min())}).{next_to_it}{_without_result(inputs)}",
        {"gain": float(best["cumulative_ratio"]), "least_timed": timed[0], "most_timed": timed[1]},
    )


def precision(inputs: ReportInputs) -> Reply | Missing:
    """State speed and accuracy of each number format next to fp32 on one rank."""
    rows, reached = _ours(inputs), by_precision(inputs.accuracy)
    if reached.empty:
        return Missing("no number format was trained to an accuracy", "--data-dir DIR")
    fields = _fields(inputs)
    speeds: dict[str, float] = {}
    for _, row in rows.iterrows():
        name = str(fields.loc[row["trial_ids"][0], "precision"])
        speeds.setdefault(name, float(row["throughput_samples_per_s"]))
    base = _speed_before_mixed_precision(rows, fields)
    listed, numbers = [], {}
    if base:
        speeds["fp32"] = base
    for index, row in reached.iterrows():
        name = str(index)
        speed = f"{times(speeds[name] / base)} as fast" if base and name in speeds else "speed not measured"
        listed.append(f"{row['recipe']}: {speed}, accuracy {share(row, 'top1', 2, 'one seed')}")
        numbers[name] = float(row["top1"])
    spread = 100 * (reached["top1"].max() - reached["top1"].min())
    return Reply(
        f"Accuracies of the number formats lie within {number(spread, 2)} points. {'; '.join(listed)}. "
        "Speed is on one rank with raw pixels, relative to fp32; accuracy is of a short training on the shipped "
        "sample.",
        numbers,
    )


def _speed_before_mixed_precision(rows: pd.DataFrame, fields: pd.DataFrame) -> float | None:
    """Return the throughput of the fp32 step from which the first step in another precision differs."""
    names = rows["trial_ids"].map(lambda ids: fields.loc[ids[0], "precision"])
    others = rows[names != "fp32"]
    if others.empty:
        return None
    before = rows[rows["step"] == others.iloc[0]["against"]]
    return float(before["throughput_samples_per_s"].iloc[0]) if len(before) else None


def _ours(inputs: ReportInputs) -> pd.DataFrame:
    rows = inputs.ladder
    return rows[rows["machine"] == OURS] if len(rows) else rows


def _fields(inputs: ReportInputs) -> pd.DataFrame:
    trials = inputs.results.trials.set_index("trial_id")
    return trials[[name for name in trial_fields(trials) if name not in _NOT_SETTINGS]]


def _changes(before: pd.Series, after: pd.Series) -> list[str]:
    """Return the settings that differ, as `storage jpeg to lmdb`."""
    names = [name for name in before.index if text(before[name]) != text(after[name]) and text(after[name]) != MISSING]
    ranks_differ = "world_size" in names
    return [
        f"{name.replace('_', ' ')} {text(before[name])} to {text(after[name])}"
        for name in names
        if not (ranks_differ and name in _STRATEGY_ONLY)
    ] or ["nothing else"]


def _timed_batches(inputs: ReportInputs, rows: pd.DataFrame) -> tuple[int, int]:
    """Return how many batches were timed in the shortest and in the longest window of the steps."""
    windows = inputs.results.windows
    of_steps = windows["trial_id"].isin(rows["trial_ids"].explode()) & (windows["window"] == "plain")
    timed = windows[of_steps]["steps"].astype(int)
    return int(timed.min()), int(timed.max())


def _without_result(inputs: ReportInputs) -> str:
    """Name the steps of the ladder without a result, with the reason."""
    trials = inputs.results.trials.set_index("trial_id")
    texts = []
    for name, ids in inputs.record.ladder_steps:
        there = trials[trials.index.isin(ids)]
        if len(there) and not (there["status"] == "done").any():
            texts.append(f"“{name}” has no result: {there['reason'].iloc[0]}")
    return f" {'. '.join(texts)}." if texts else ""
