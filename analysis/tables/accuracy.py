"""Tables of trainings: accuracy over the batch, where it fails, time to a target, throughput that counts, one epoch."""

import numpy as np
import pandas as pd

from analysis.compare.accuracy import RELEVANT_LOSS, Accuracy, goodput
from analysis.compare.report_epoch import EPOCH_COLUMNS, report_epoch_rows
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Column, Table
from analysis.text import number, percent

_REMEDY = Column("remedy", "remedy", "what differs from the plain training besides batch and seed.")
_BATCH = Column("global_batch", "global batch", "samples of one optimizer step.", decimals=0)
_MADE_OF = Column(
    "made_of",
    "made of",
    "ranks × samples of a forward pass (which is what batch normalisation sees) × accumulated parts.",
)
_SEEDS = Column("n", "n", "trainings, each with a seed of its own; one has no interval.", decimals=0)
_TOGETHER = Column(
    "side_by_side",
    "side by side",
    "trainings that a host ran at a time, each on a GPU or core of its own: their times are not those of a run alone.",
    decimals=0,
    optional=True,
)


def accuracy_table(analysis: Analysis) -> Table:
    """Accuracy after the last epoch, by remedy and global batch, against the reference batch."""
    found = analysis.accuracy
    frame = _cells(found)
    frame["verdict"] = [_verdict(row) for _, row in frame.iterrows()]
    frame = _percent(frame, "top1", "difference", "plain_difference")
    frame["top1_sd_percent"], frame["top5_percent"] = 100 * frame["top1_sd"], 100 * frame["top5"]
    return Table(
        "Accuracy over the global batch",
        (
            _REMEDY,
            _BATCH,
            _MADE_OF,
            Column("top1_percent", "accuracy (%)", "of the held-out samples after the last epoch, mean of the seeds [95 % interval].", 1, 2, True),
            Column("top1_sd_percent", "sd (points)", "standard deviation over seeds, in percentage points.", 1, 2, optional=True),
            Column("difference_percent", "difference (points)", "to the same remedy at the reference batch, or without one there to the plain training [95 % interval, Welch's t].", 1, 2, True),
            Column("verdict", "against the reference", f"within noise: the interval holds 0 and excludes a loss of {100 * RELEVANT_LOSS:g} point."),
            Column("plain_difference_percent", "to the plain reference (points)", "the same, against the reference batch without any remedy.", 1, 2, True, optional=True),
            Column("top5_percent", "top-5 (%)", "right answer among the five likeliest.", 1, 2, optional=True),
            Column("train_loss", "training loss", "of the last epoch; label smoothing raises it.", decimals=3, optional=True),
            _SEEDS,
            _TOGETHER,
        ),
        frame,
        "Measured. Many intervals are compared here: one in twenty leaves the noise by chance.",
        blocks=("remedy",),
    )  # fmt: skip


def elbow(analysis: Analysis) -> Table:
    """The largest batch within noise of the reference, for each remedy, against the critical batch of the noise scale."""
    found = analysis.accuracy
    frame = found.lossless_batches.copy() if found else pd.DataFrame(columns=_ELBOW_COLUMNS)
    if found and len(frame):
        of_remedy = {
            remedy: tuple(dict.fromkeys(cells.explode()))
            for remedy, cells in found.cells.groupby("remedy")["trial_ids"]
        }
        frame["trial_ids"] = frame["remedy"].map(of_remedy)
        frame["elbow_text"] = [_elbow_text(row) for _, row in frame.iterrows()]
        frame = _percent(frame, "failing_difference", "reference_top1")
        frame["critical_from"] = [
            f"{value}; means over {_epochs(found)}" if isinstance(value, str) else None
            for value in frame["critical_from"]
        ]
    return Table(
        "The elbow: how far the batch can grow",
        (
            _REMEDY,
            Column("reference_batch", "reference batch", "the global batch that the remedy's larger ones are held against.", decimals=0),
            Column("reference_top1_percent", "its accuracy (%)", "of the held-out samples after the last epoch, mean of the seeds.", decimals=2),
            Column("elbow_text", "elbow", "largest batch before accuracy first falls out of the reference's noise; ≥: it never did."),
            Column("failing_batch", "first failing batch", "the next one that was measured.", decimals=0, optional=True),
            Column("failing_difference_percent", "its difference (points)", "to the reference [95 % interval, Welch's t].", 1, 2, True, optional=True),
            Column("critical_batch", "critical batch", "gradient noise scale tr(Σ)/|G|², the batch at which a step and a sample are worth the same (McCandlish et al. 2018) [95 % interval over seeds].", decimals=0, interval=True, optional=True),
            Column("critical_from", "estimated from", "cell, seeds, and the epochs that are averaged: it grows as training goes on.", optional=True),
        ),
        frame,
        "The elbow is measured; the critical batch is an estimate from gradients at another batch, not a measurement of accuracy.",
    )  # fmt: skip


_ELBOW_COLUMNS = [
    "remedy", "reference_batch", "reference_top1_percent", "elbow_text", "failing_batch", "failing_difference_percent",
    "failing_difference_percent_low", "failing_difference_percent_high", "critical_batch", "critical_batch_low",
    "critical_batch_high", "critical_from",
]  # fmt: skip


def time_to_target(analysis: Analysis) -> Table:
    """Steps, samples, time, rank-hours and money until the target accuracy was reached."""
    found = analysis.accuracy
    ranks = study_ranks(analysis)
    frame = _cells(found)
    price = analysis.record.price_per_gpu_hour
    frame["reached_text"] = [f"{row['reached']} of {row['runs']}" for _, row in frame.iterrows()]
    frame["money_to_target"] = frame["hours_to_target"] * (np.nan if price is None else price)
    currency = "currency of --price-per-gpu-hour" if price is None else f"{ranks[0]}-hours at {price:g} each"
    if found is None or found.target is None:
        frame = frame.iloc[:0]
    return Table(
        "Time to the target accuracy",
        (
            _REMEDY,
            _BATCH,
            _MADE_OF,
            Column("reached_text", "reached", "trainings that reached the target, of those that ran. Where one did not, the others' times would flatter: none is shown."),
            Column("steps_to_target", "steps", "mean over seeds, to the end of the first epoch at the target.", decimals=0),
            Column("samples_to_target", "samples", "the same.", decimals=0),
            Column("time_to_target_s", "time (s)", "of training alone: without start, compilation and validation [95 % interval].", decimals=2, interval=True),
            Column("hours_to_target", f"{ranks[0]}-hours", f"{ranks[1]} × that time.", decimals=4),
            Column("money_to_target", "money", currency + ".", decimals=4, optional=True),
            _SEEDS,
            _TOGETHER,
        ),
        frame,
        _target_note(found),
        blocks=("remedy",),
    )  # fmt: skip


def goodput_table(analysis: Analysis) -> Table:
    """Throughput x statistical efficiency, and the batch that maximises it."""
    found = analysis.accuracy
    frame = goodput(found.cells, found.plain) if found else _cells(None).assign(**dict.fromkeys(_GOODPUT, np.nan))
    frame["best"] = ["highest" if row["is_best"] else "" for _, row in frame.iterrows()]
    frame = _percent(frame, "efficiency")
    return Table(
        "Goodput: throughput that counts",
        (
            _REMEDY,
            _BATCH,
            _MADE_OF,
            Column("throughput_samples_per_s", "throughput (samples/s)", "of training alone, geometric mean of the seeds [95 % interval].", decimals=0, interval=True),
            Column("efficiency_percent", "statistical efficiency (%)", "(φ + M₀) / (φ + M), with φ the critical batch, M the global batch and M₀ the reference batch: what a sample brings, against one at the reference batch (Pollux, Qiao et al. 2021) [from φ's interval].", 1, 1, True),
            Column("goodput_samples_per_s", "goodput (samples/s)", "throughput × efficiency [from both intervals].", decimals=0, interval=True),
            Column("best", "of its remedy", "highest: the batch at which the remedy has most goodput."),
            _SEEDS,
            _TOGETHER,
        ),
        frame,
        "Predicted from the gradient noise scale; only the throughput is measured. It takes for granted that the learning rate suits each batch; a remedy without "
        "a noise scale of its own is given the plain training's.",
        blocks=("remedy",),
    )  # fmt: skip


_GOODPUT = (
    "is_best", "throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "efficiency", "efficiency_low", "efficiency_high", "goodput_samples_per_s",
    "goodput_samples_per_s_low", "goodput_samples_per_s_high",
)  # fmt: skip


def report_epoch(analysis: Analysis) -> Table:
    """Training loss and accuracy at the study's report epoch: the largest batch on all ranks against the reference batch."""
    epoch, found = analysis.record.report_epoch, analysis.accuracy
    frame = pd.DataFrame(columns=EPOCH_COLUMNS) if found is None or epoch is None else report_epoch_rows(found, epoch)
    frame = _percent(frame, "epoch_top1", "epoch_top1_difference")
    return Table(
        f"Epoch {epoch}: the largest batch on all {study_ranks(analysis)[1]} against the reference batch",
        (
            _REMEDY,
            _BATCH,
            _MADE_OF,
            Column("epoch_loss", "training loss", f"mean over the steps of epoch {epoch}, mean of the seeds [95 % interval].", decimals=3, interval=True),
            Column("epoch_loss_difference", "difference", "to the reference batch [95 % interval, Welch's t].", decimals=3, interval=True),
            Column("epoch_top1_percent", "training accuracy (%)", f"of the samples of epoch {epoch} as they were trained on.", 1, 2, True),
            Column("epoch_top1_difference_percent", "difference (points)", "the same.", 1, 2, True),
            _SEEDS,
        ),
        frame,
        blocks=("global_batch",),
    )  # fmt: skip


def _cells(found: Accuracy | None) -> pd.DataFrame:
    """Cells in the order of remedies and batches; with every column and no row where nothing was trained."""
    if found is None:
        return pd.DataFrame(columns=_CELL_COLUMNS)
    again = found.cells["is_shared"] & ~found.cells["is_reference"]  # shown with the remedy that they were run for
    return found.cells[~again].sort_values(
        ["remedy_number", "global_batch", "accumulation_steps", "world_size"], kind="stable"
    )


_CELL_COLUMNS = [
    "remedy", "global_batch", "made_of", "n", "top1", "top1_low", "top1_high", "top1_sd", "top5", "train_loss", "within_noise",
    "difference", "difference_low", "difference_high", "plain_difference", "plain_difference_low", "plain_difference_high",
    "is_reference", "reached", "runs", "steps_to_target", "samples_to_target", "time_to_target_s", "time_to_target_s_low",
    "time_to_target_s_high", "hours_to_target", "side_by_side", "trial_ids",
]  # fmt: skip


def _percent(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Shares as percentages, in columns of their own, with the ends of intervals where there are any."""
    columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high") if f"{name}{end}" in frame]

    def renamed(column: str) -> str:
        for end in ("_low", "_high"):
            if column.endswith(end):
                return f"{column.removesuffix(end)}_percent{end}"
        return f"{column}_percent"

    return frame.assign(**{renamed(column): 100 * frame[column].astype(float) for column in columns})


def _verdict(row: pd.Series) -> str:
    if row["is_reference"]:
        return "reference"
    if row["within_noise"] is None or pd.isna(row["within_noise"]):
        return "not known: too few seeds"
    if row["within_noise"]:
        return "within noise"
    return "lower" if row["difference"] < 0 else "higher"


def _elbow_text(row: pd.Series) -> str:
    if pd.isna(row["elbow"]):
        return "not known: too few seeds"
    return f"{'≥ ' if row['is_open'] else ''}{number(row['elbow'], 0)}"


def _epochs(found: Accuracy) -> str:
    known = found.epochs.dropna(subset=["noise_trace", "noise_norm2"])["epoch"]
    return f"epochs {known.min()} to {known.max()}" if len(known) else "no epoch"


def _target_note(found: Accuracy | None) -> str:
    if found is None or found.target is None:
        return ""
    if found.target_is_asked:
        return f"Measured, at the end of epochs. Target: {percent(found.target, 2)} of the held-out samples."
    return (
        f"Measured, at the end of epochs. No target was asked for, so it is {percent(found.target, 2)}: 99 % of the mean accuracy of the "
        f"plain training at the reference batch, chosen after the fact (--target-accuracy asks for another)."
    )
