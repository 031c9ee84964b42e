"""Sentences about accuracy: where it holds, where it drops, which recipes help, and what trains fastest."""

import math

import numpy as np
import pandas as pd

from analysis.compare.accuracy import RELEVANT_LOSS, Accuracy, goodput, rank_speed_ups
from analysis.compare.recipes import NOTHING, in_words
from analysis.compare.report_epoch import report_epoch_rows
from analysis.measure.noise_scale import PERIODS
from analysis.statistics import mean_interval, welch_difference
from analysis.study import Analysis, study_ranks
from analysis.text import join, number, percent, significance, value_label, with_interval
from analysis.verdict.facts import trained_workload, trains_another_model


def sentences(analysis: Analysis) -> list[str]:
    """Return the sentences about accuracy; empty if the study trained nothing to an accuracy."""
    accuracy = analysis.accuracy
    if accuracy is None:
        return []
    if not accuracy.runs["validation_top1"].notna().any():
        return [without_validation(accuracy), *filter(None, [critical(accuracy)])]
    candidates = (
        reference(accuracy, f" of {trained_workload(accuracy)}" if trains_another_model(analysis) else ""),
        at_one_batch(accuracy),
        at_report_epoch(accuracy, analysis.record.report_epoch),
        largest_plain_batch(accuracy),
        recipes(accuracy),
        critical(accuracy),
        soonest(accuracy),
        more_ranks(analysis),
        most_goodput(accuracy),
    )
    return [sentence for sentence in candidates if sentence]


def trust(analysis: Analysis) -> list[str]:
    """Return caveats about the accuracies: seeds, concurrent training trials, non-finite steps."""
    accuracy = analysis.accuracy
    if accuracy is None:
        return []
    cells, epochs = accuracy.cells[accuracy.cells["n"] > 0], accuracy.epochs
    lines = []
    if trains_another_model(analysis):
        timed = join(sorted(analysis.configurations["model"].unique()))
        lines.append(
            f"The accuracies are those of {trained_workload(accuracy)}, the times those of {timed}: no accuracy of "
            f"{timed} was measured."
        )
    if cells.empty:
        return [*lines, *_non_finite(epochs)]
    fewest, most = int(cells["n"].min()), int(cells["n"].max())
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    half_width = difference_half_width(accuracy)
    if fewest < 2:
        lines.append(
            f"{int((cells['n'] < 2).sum())} of {len(cells)} accuracies come from one seed and have no interval: "
            "run more repeats."
        )
    if half_width is not None:
        lines.append(
            f"{seeds} seeds per training; the median 95 % interval of a difference in accuracy is {points(half_width)}."
        )
    concurrent = accuracy.runs["concurrent"].max()
    if concurrent > 1:
        lines.append(
            f"Up to {number(concurrent, 0)} trainings ran concurrently on a host, each on its own device. "
            "This does not affect accuracies, but it may affect times."
        )
    return [*lines, *_non_finite(epochs)]


def difference_half_width(accuracy: Accuracy) -> float | None:
    """Return half the median 95 % interval of a difference in accuracy, as a share; None without intervals."""
    cells = accuracy.cells[accuracy.cells["n"] > 0]
    half_width = float((cells["difference_high"] - cells["difference_low"]).median() / 2)
    return half_width if math.isfinite(half_width) else None


def points(half_width: float) -> str:
    """Return half an interval of an accuracy in points, with two decimals only below one point."""
    return f"±{number(100 * half_width, 2 if half_width < 0.01 else 1)} points"


def wide_half_width(accuracy: Accuracy | None) -> float | None:
    """Return `difference_half_width` if differences are known worse than they matter; None if not, or if unknown."""
    half_width = None if accuracy is None else difference_half_width(accuracy)
    return half_width if half_width is not None and half_width > RELEVANT_LOSS else None


def _non_finite(epochs: pd.DataFrame) -> list[str]:
    """Return a caveat about steps with a non-finite loss or gradient, if there are any."""
    steps = int(epochs["non_finite_steps"].fillna(0).sum())
    trials = epochs.loc[epochs["non_finite_steps"] > 0, "trial_id"].nunique()
    return [f"{steps} steps of {trials} trainings had a non-finite loss or gradient."] if steps else []


def without_validation(accuracy: Accuracy) -> str:
    """State the training loss of trainings whose workload has no held-out samples, and what would give an accuracy."""
    losses = accuracy.runs["train_loss"].astype(float)
    low, high = mean_interval(losses)
    trainings = "1 training" if len(losses) == 1 else f"{len(losses)} trainings"
    own = "workload" in accuracy.runs and accuracy.runs["workload"].fillna("").ne("").any()
    fix = "; give Workload(validation=...) to measure it" if own else ""
    return (
        f"{trained_workload(accuracy)} has no validation set, so there is no accuracy{fix}. The training loss of the "
        f"last epoch is {with_interval(losses.mean(), low, high, 3)} (mean of {trainings})."
    )


def reference(accuracy: Accuracy, of: str = "") -> str | None:
    """State the accuracy that all others are compared with. `of` names what was trained, such as " of mlp"."""
    rows = accuracy.cells[accuracy.cells["is_reference"] & (accuracy.cells["recipe"] == accuracy.plain)]
    if rows.empty:
        return None
    row = rows.iloc[0]
    value, low, high = (100 * row[f"top1{end}"] for end in ("", "_low", "_high"))
    seeds = "one seed" if row["n"] == 1 else f"{row['n']} seeds"
    training = "Plain training" if accuracy.plain == NOTHING else "Training"
    recipe = "" if accuracy.plain == NOTHING else f" {in_words(accuracy.plain)}"
    return (
        f"{training}{of}{recipe} at global batch {number(row['global_batch'], 0)} reaches a held-out accuracy of "
        f"{_percent(value, low, high)} ({seeds}, last epoch)."
    )


def at_one_batch(accuracy: Accuracy) -> str | None:
    """Compare recipes with plain training if no larger batch was trained, as in a study of number formats."""
    rows = accuracy.cells[accuracy.cells["is_reference"] & (accuracy.cells["recipe"] != accuracy.plain)]
    rows = rows.dropna(subset="plain_difference")
    if len(accuracy.lossless_batches) or rows.empty:
        return None
    return f"At the same batch, {join([_against_plain(row) for _, row in rows.iterrows()])}."


def _against_plain(row: pd.Series) -> str:
    value, low, high = (100 * row[f"plain_difference{end}"] for end in ("", "_low", "_high"))
    text = f"{row['recipe']} reaches {number(abs(value), 2)} points {'more' if value > 0 else 'less'}"
    if pd.isna(low):
        return text
    return f"{text} (difference [{number(low, 2)}, {number(high, 2)}], {significance(low <= 0 <= high)})"


def at_report_epoch(accuracy: Accuracy, epoch: int | None) -> str | None:
    """State training loss and accuracy of the largest batch and of the reference at the study's report epoch."""
    rows = pd.DataFrame() if epoch is None else report_epoch_rows(accuracy, epoch)
    if len(rows) < 2:
        return None
    listed = [
        f"{number(row['epoch_loss'], 3)} and {number(100 * row['epoch_top1'], 1)}\u00a0% with {label(row)}"
        for _, row in rows.iterrows()
    ]
    return f"In epoch {epoch}, mean training loss and training accuracy are {join(listed)}."


def largest_plain_batch(accuracy: Accuracy) -> str | None:
    """State up to which batch training without a recipe keeps its accuracy, or with the only one."""
    plain = accuracy.lossless_batches[accuracy.lossless_batches["recipe"] == accuracy.plain]
    if plain.empty:
        return None
    row = plain.iloc[0]
    if pd.isna(row["lossless_batch"]):
        return "Too few seeds to tell whether a larger batch costs accuracy: run more repeats."
    batch = number(row["lossless_batch"], 0)
    recipe = in_words(accuracy.plain)
    start = f"{recipe[0].upper()}{recipe[1:]}, accuracy"
    if not row["is_open"] and row["lossless_batch"] == row["reference_batch"]:
        return (
            f"{start} drops by {_points(row)} from batch {batch}, the reference, to {number(row['failing_batch'], 0)}."
        )
    text = f"{start} is not significantly different (95 %) up to batch {batch}"
    if row["is_open"]:
        return f"{text}, the largest batch measured."
    return f"{text} and drops by {_points(row)} at {number(row['failing_batch'], 0)}."


def recipes(accuracy: Accuracy) -> str | None:
    """State the largest lossless batch of each recipe, the largest one first."""
    others = accuracy.lossless_batches[accuracy.lossless_batches["recipe"] != accuracy.plain]
    others = others.dropna(subset="lossless_batch").sort_values(
        ["lossless_batch", "is_open"], ascending=False, kind="stable"
    )
    if others.empty:
        return None
    plain_batch = accuracy.lossless_batches[accuracy.lossless_batches["recipe"] == accuracy.plain]["lossless_batch"]
    limit = plain_batch.iloc[0] if len(plain_batch) else float("nan")
    better = others[others["lossless_batch"] > limit]
    worse = others[others["lossless_batch"] <= limit]
    text = []
    if len(better):
        references = accuracy.cells[accuracy.cells["is_reference"]].set_index("recipe")
        lower_references = {
            str(name): f"; its own reference is {number(-100 * row['plain_difference'], 2)} points lower"
            for name, row in references.iterrows() if row["plain_difference_high"] < 0
        }  # fmt: skip
        listed = [
            f"{row['recipe']} ({'at least ' if row['is_open'] else ''}{number(row['lossless_batch'], 0)}"
            f"{lower_references.get(row['recipe'], '')})"
            for _, row in better.iterrows()
        ]
        text.append(f"Recipes that extend the largest lossless batch: {join(listed)}.")
    if len(worse):
        text.append(f"No larger batch is gained by {join(list(worse['recipe']), 'or')}.")
    return " ".join(text)


def critical(accuracy: Accuracy) -> str | None:
    """State the critical batch that the gradient noise scale predicts, over the course of the training."""
    known = accuracy.lossless_batches.dropna(subset="critical_from")
    if known.empty:
        return None
    row = known.iloc[0]
    periods = [period for period in PERIODS if isinstance(row[f"epochs_{period}"], str)]
    listed = [f"{_samples(row, f'_{period}')} in epochs {row[f'epochs_{period}']}" for period in periods]
    overall = f"{_samples(row, '')} over all epochs"
    return (
        f"The gradient noise scale estimates the critical batch of “{row['recipe']}” in samples: "
        f"{join([*listed, overall])} ({row['critical_from']})."
    )


def _samples(row: pd.Series, suffix: str) -> str:
    """Return a critical batch with its interval; "not resolved" if the noise hides the gradient."""
    value, low, high = (float(row[f"critical_batch{suffix}{end}"]) for end in ("", "_low", "_high"))
    if pd.isna(value):
        return "not resolved"
    if np.isinf(high):
        return f"{number(value, 0)} (at least {number(low, 0)})"
    return with_interval(value, low, high, 0)


def soonest(accuracy: Accuracy) -> str | None:
    """State which training reaches the target first, and whether the runner-up differs significantly."""
    if accuracy.target is None:
        return None
    rows = by_time_to_target(accuracy)
    target = percent(accuracy.target, 1)
    if rows.empty:
        return f"No batch reached {target} with every seed."
    first = rows.iloc[0]
    low, high = first["time_to_target_s_low"], first["time_to_target_s_high"]
    shown = with_interval(first["time_to_target_s"], low, high, 1)
    text = (
        f"The fastest to reach {target} is {first['cell']}: {shown} s of training, "
        f"{number(first['samples_to_target'], 0)} samples"
    )
    if len(rows) == 1:
        return f"{text}; no other reached it with every seed."
    second = rows.iloc[1]
    times = pd.Series(accuracy.runs["time_to_target_s"].to_numpy(), index=accuracy.runs["trial_id"])
    _, low, high = welch_difference(times.reindex(list(second["trial_ids"])), times.reindex(list(first["trial_ids"])))
    text += f"; runner-up: {second['cell']}, {number(second['time_to_target_s'], 1)} s"
    if pd.isna(low):
        return f"{text} (one seed cannot tell whether they differ)."
    return f"{text} ({significance(low <= 0 <= high)})."


def more_ranks(analysis: Analysis) -> str | None:
    """State how much faster most ranks train than fewest at the same global batch; None if one number was measured."""
    speed_ups = pd.DataFrame() if analysis.accuracy is None else rank_speed_ups(analysis.accuracy)
    if speed_ups.empty:
        return None
    row = speed_ups.iloc[0]
    value, low, high = (float(row[f"speed_up{end}"]) for end in ("", "_low", "_high"))
    shown = with_interval(value, low, high, 2, "one seed")
    return f"{as_fast_as(analysis, row, shown)}, without validation."


def as_fast_as(analysis: Analysis, row: pd.Series, times: str) -> str:
    """Return that more ranks train so many times as fast as fewer. row: of `rank_speed_ups`."""
    many, few = (
        value_label("world_size", int(row[name]), study_ranks(analysis)) for name in ("world_size", "baseline")
    )
    return f"{many} train {times} times as fast as {few} at global batch {number(row['global_batch'], 0)}"


def by_time_to_target(accuracy: Accuracy) -> pd.DataFrame:
    """Return the cells that reach the target with every seed, the fastest first. Column cell: its label."""
    rows = accuracy.cells.dropna(subset="time_to_target_s").sort_values("time_to_target_s", kind="stable")
    rows = rows.drop_duplicates("trial_ids")  # a reference is listed under every recipe that shares it
    return rows.assign(cell=_cell_labels(rows))


_GOODPUT = "goodput_samples_per_s"


def most_goodput(accuracy: Accuracy) -> str | None:
    """State the batch with the highest goodput among those that keep their accuracy."""
    rows = goodput(accuracy.cells, accuracy.plain)
    rows = rows[rows["is_reference"] | rows["within_noise"].eq(True)]
    if rows.empty:
        return None
    first, *others = (row for _, row in rows.sort_values(_GOODPUT, ascending=False, kind="stable").iterrows())
    text = (
        f"Among batches that keep their accuracy, predicted goodput is highest with {label(first)}: "
        f"{number(first[_GOODPUT], 0)} samples/s, at a throughput of "
        f"{number(first['throughput_samples_per_s'], 0)} samples/s"
    )
    if not others:
        return f"{text}."
    second = others[0]
    log_ratio = float(np.log(first[_GOODPUT] / second[_GOODPUT]))
    below = np.log(first[_GOODPUT] / first[f"{_GOODPUT}_low"])
    above = np.log(second[f"{_GOODPUT}_high"] / second[_GOODPUT])
    half_width = float(np.hypot(below, above))
    text += f"; runner-up: {label(second)}, {number(second[_GOODPUT], 0)} samples/s"
    if np.isnan(half_width):
        return f"{text} (one seed cannot tell whether they differ)."
    return f"{text} ({significance(log_ratio <= half_width)})."


def _cell_labels(rows: pd.DataFrame) -> list[str]:
    """Label each row; add the layout if recipe and batch alone are ambiguous."""
    ambiguous = rows.duplicated(["recipe", "global_batch"], keep=False)
    return [
        label(row) + (f" ({row['made_of']})" if is_ambiguous else "")
        for (_, row), is_ambiguous in zip(rows.iterrows(), ambiguous, strict=True)
    ]


def label(row: pd.Series) -> str:
    """Return recipe and batch of a cell, as in "linear at batch 512"."""
    recipe = "plain training" if row["recipe"] == NOTHING else row["recipe"]
    return f"{recipe} at batch {number(row['global_batch'], 0)}"


def _points(row: pd.Series) -> str:
    value, low, high = (-100 * row[f"failing_difference{end}"] for end in ("", "_high", "_low"))
    first, _, interval = with_interval(value, low, high, 2).partition(" ")
    return f"{first} points {interval}".rstrip()


def _percent(value: float, low: float, high: float) -> str:
    first, _, interval = with_interval(value, low, high, 2).partition(" ")
    return f"{first}\u00a0% {interval}".rstrip()
