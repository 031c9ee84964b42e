"""The answer about trainings, in words: where accuracy holds and fails, what mends it, and what trains soonest."""

import numpy as np
import pandas as pd

from analysis.compare.accuracy import Accuracy, goodput
from analysis.compare.recipes import NOTHING
from analysis.compare.report_epoch import report_epoch_rows
from analysis.statistics import welch_difference
from analysis.study import Analysis
from analysis.text import join, number, percent, with_interval


def sentences(analysis: Analysis) -> list[str]:
    """Sentences about accuracy; empty where nothing was trained."""
    found = analysis.accuracy
    if found is None:
        return []
    said = (
        reference(found), at_one_batch(found), at_report_epoch(found, analysis.record.report_epoch), failure(found), mended(found), critical(found), soonest(found),
        most_goodput(found),
    )  # fmt: skip
    return [sentence for sentence in said if sentence]


def trust(analysis: Analysis) -> list[str]:
    """Whether to believe the accuracies: seeds, runs side by side, steps that were not finite."""
    found = analysis.accuracy
    if found is None:
        return []
    lines = []
    fewest, most = int(found.cells["n"].min()), int(found.cells["n"].max())
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    half = (found.cells["difference_high"] - found.cells["difference_low"]).median() / 2
    if fewest < 2:
        lines.append(
            f"{int((found.cells['n'] < 2).sum())} of {len(found.cells)} accuracies have one seed and no interval: run more repeats."
        )
    if pd.notna(half):
        lines.append(
            f"{seeds} seeds of each training; the middle one of the differences in accuracy is known to ±{number(100 * half, 2)} points, each as its interval says."
        )
    beside = found.runs["side_by_side"].max()
    if beside > 1:
        lines.append(
            f"Up to {number(beside, 0)} trainings ran side by side on a host, each on a device of its own: accuracies are not touched by it, "
            "times may be."
        )
    if bad := int(found.epochs["non_finite_steps"].fillna(0).sum()):
        trials = found.epochs.loc[found.epochs["non_finite_steps"] > 0, "trial_id"].nunique()
        lines.append(f"{bad} steps of {trials} trainings had a loss or gradient that was not finite.")
    return lines


def reference(found: Accuracy) -> str | None:
    """The accuracy that all is compared with."""
    rows = found.cells[found.cells["is_reference"] & (found.cells["remedy"] == found.plain)]
    if rows.empty:
        return None
    row = rows.iloc[0]
    value, low, high = (100 * row[f"top1{end}"] for end in ("", "_low", "_high"))
    seeds = "one seed" if row["n"] == 1 else f"{row['n']} seeds"
    return (
        f"The plain training at global batch {number(row['global_batch'], 0)} reaches {_percent(value, low, high)} of the held-out samples "
        f"({seeds}, last epoch)."
    )


def at_one_batch(found: Accuracy) -> str | None:
    """How trainings of another kind differ from the plain one, where no larger batch was tried: number formats, say."""
    rows = found.cells[found.cells["is_reference"] & (found.cells["remedy"] != found.plain)]
    rows = rows.dropna(subset="plain_difference")
    if len(found.lossless_batches) or rows.empty:
        return None
    return f"At the same batch {join([_beside_plain(row) for _, row in rows.iterrows()])}."


def _beside_plain(row: pd.Series) -> str:
    value, low, high = (100 * row[f"plain_difference{end}"] for end in ("", "_low", "_high"))
    interval = "" if pd.isna(low) else f" [{number(low, 2)}, {number(high, 2)}]"
    noise = "" if pd.isna(low) else ", within noise" if low <= 0 <= high else ", beyond noise"
    more = "more" if value > 0 else "less"
    return (
        f"{row['remedy']} reaches {number(abs(value), 2)} points {more}{interval and f' (difference{interval}{noise})'}"
    )


def at_report_epoch(found: Accuracy, epoch: int | None) -> str | None:
    """Training loss and accuracy of the largest batch and the reference at the study's report epoch."""
    rows = pd.DataFrame() if epoch is None else report_epoch_rows(found, epoch)
    if len(rows) < 2:
        return None
    listed = [
        f"{number(row['epoch_loss'], 3)} and {number(100 * row['epoch_top1'], 1)}\u00a0% with {label(row)}"
        for _, row in rows.iterrows()
    ]
    return f"In epoch {epoch} mean training loss and accuracy are {join(listed)}."


def failure(found: Accuracy) -> str | None:
    """Up to which batch nothing need be done."""
    own = found.lossless_batches[found.lossless_batches["remedy"] == found.plain]
    if own.empty:
        return None
    row = own.iloc[0]
    if pd.isna(row["elbow"]):
        return "Whether a larger batch costs accuracy cannot be told from so few seeds: run more repeats."
    if row["is_open"]:
        return f"Without any remedy, accuracy stays within noise of that up to {number(row['elbow'], 0)}, the largest batch here."
    return (
        f"Without any remedy, accuracy stays within noise of that up to batch {number(row['elbow'], 0)} and falls by {_points(row)} at "
        f"{number(row['failing_batch'], 0)}."
    )


def mended(found: Accuracy) -> str | None:
    """How far each remedy moves the elbow, the one that moves it most first."""
    others = found.lossless_batches[found.lossless_batches["remedy"] != found.plain]
    others = others.dropna(subset="elbow").sort_values(["elbow", "is_open"], ascending=False, kind="stable")
    if others.empty:
        return None
    own = found.lossless_batches[found.lossless_batches["remedy"] == found.plain]["elbow"]
    plain = own.iloc[0] if len(own) else float("nan")
    better = others[others["elbow"] > plain]
    worse = others[others["elbow"] <= plain]
    text = []
    if len(better):
        references = found.cells[found.cells["is_reference"]].set_index("remedy")
        below = {
            str(name): f"; its own reference is {number(-100 * row['plain_difference'], 2)} points lower"
            for name, row in references.iterrows() if row["plain_difference_high"] < 0
        }  # fmt: skip
        listed = join(
            [
                f"{row['remedy']} ({'at least ' if row['is_open'] else ''}{number(row['elbow'], 0)}{below.get(row['remedy'], '')})"
                for _, row in better.iterrows()
            ]
        )
        text.append(f"What moves that limit, to the batch in brackets: {listed}.")
    if len(worse):
        text.append(f"No larger batch is won by {join(list(worse['remedy']), 'or')}.")
    return " ".join(text)


def critical(found: Accuracy) -> str | None:
    """The elbow against what the noise scale says of it."""
    known = found.lossless_batches.dropna(subset="critical_batch")
    if known.empty:
        return None
    row = known.iloc[0]
    shown = with_interval(row["critical_batch"], row["critical_batch_low"], row["critical_batch_high"], 0)
    return f"The gradient noise scale puts the critical batch of “{row['remedy']}” at {shown} samples ({row['critical_from']}); this is an estimate."


def soonest(found: Accuracy) -> str | None:
    """The cell that reaches the target soonest, and whether the next differs beyond noise."""
    if found.target is None:
        return None
    rows = found.cells.dropna(subset="time_to_target_s").sort_values("time_to_target_s", kind="stable")
    rows = rows.drop_duplicates("trial_ids")  # a reference stands in every remedy that shares it
    rows["cell"] = _cells_in_words(rows)
    target = percent(found.target, 1)
    if rows.empty:
        return f"No batch reached {target} with every seed."
    first = rows.iloc[0]
    low, high = first["time_to_target_s_low"], first["time_to_target_s_high"]
    shown = with_interval(first["time_to_target_s"], low, high, 1)
    text = f"{target} is reached soonest with {first['cell']}: {shown} s of training, {number(first['samples_to_target'], 0)} samples"
    if len(rows) == 1:
        return f"{text}; no other reached it with every seed."
    second = rows.iloc[1]
    times = pd.Series(found.runs["time_to_target_s"].to_numpy(), index=found.runs["trial_id"])
    _, low, high = welch_difference(times.reindex(list(second["trial_ids"])), times.reindex(list(first["trial_ids"])))
    later = (
        f"{text}; next is {second['cell']}, {number(second['time_to_target_s'] - first['time_to_target_s'], 1)} s later"
    )
    if pd.isna(low):
        return f"{later}, and one seed cannot tell whether they differ."
    return f"{later}, which is {'within' if low <= 0 <= high else 'beyond'} noise."


_GOODPUT = "goodput_samples_per_s"


def most_goodput(found: Accuracy) -> str | None:
    """The batch that the noise scale would choose, of those that keep their accuracy."""
    rows = goodput(found.cells, found.plain)
    rows = rows[rows["is_reference"] | rows["within_noise"].eq(True)]
    if rows.empty:
        return None
    row, *others = (each for _, each in rows.sort_values(_GOODPUT, ascending=False, kind="stable").iterrows())
    text = (
        "Of what keeps its accuracy, throughput times predicted statistical efficiency is highest with "
        f"{label(row)}: {number(row[_GOODPUT], 0)} samples/s that count, of {number(row['throughput_samples_per_s'], 0)}"
    )
    if not others:
        return f"{text}."
    apart = float(np.log(row[_GOODPUT] / others[0][_GOODPUT]))
    noise = float(
        np.hypot(
            np.log(row[_GOODPUT] / row[f"{_GOODPUT}_low"]), np.log(others[0][f"{_GOODPUT}_high"] / others[0][_GOODPUT])
        )
    )
    if np.isnan(noise):
        return f"{text}; one seed cannot tell whether the next ({label(others[0])}) differs."
    return f"{text}; the next ({label(others[0])}) has {number(others[0][_GOODPUT], 0)}, {'within' if apart <= noise else 'beyond'} noise."


def _cells_in_words(rows: pd.DataFrame) -> list[str]:
    """Labels, with the layout where that alone tells cells apart."""
    several = rows.duplicated(["remedy", "global_batch"], keep=False)
    return [
        label(row) + (f" ({row['made_of']})" if again else "")
        for (_, row), again in zip(rows.iterrows(), several, strict=True)
    ]


def label(row: pd.Series) -> str:
    """A cell in words."""
    remedy = "no remedy" if row["remedy"] == NOTHING else row["remedy"]
    return f"{remedy} at batch {number(row['global_batch'], 0)}"


def _points(row: pd.Series) -> str:
    value, low, high = (-100 * row[f"failing_difference{end}"] for end in ("", "_high", "_low"))
    first, _, interval = with_interval(value, low, high, 2).partition(" ")
    return f"{first} points {interval}".rstrip()


def _percent(value: float, low: float, high: float) -> str:
    first, _, interval = with_interval(value, low, high, 2).partition(" ")
    return f"{first}\u00a0% {interval}".rstrip()
