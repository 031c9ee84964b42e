"""Tables of training trials: accuracy by batch, largest lossless batch, time to a target, goodput, one epoch."""

import numpy as np
import pandas as pd

from analysis.compare.accuracy import RELEVANT_LOSS, Accuracy, goodput
from analysis.compare.report_epoch import EPOCH_COLUMNS, report_epoch_rows
from analysis.measure.noise_scale import PERIODS
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Column, Table
from analysis.text import number, percent

_RECIPE = Column("recipe", "recipe", "differences from plain training other than batch and seed.")
_BATCH = Column("global_batch", "global batch", "samples per optimizer step.", decimals=0)
_MADE_OF = Column(
    "made_of",
    "composition",
    "ranks × samples per forward pass (which is what batch normalisation sees) × accumulation steps.",
)
_SEEDS = Column("n", "n", "training trials, each with its own seed; no interval for one.", decimals=0)
_CONCURRENT = Column(
    "concurrent",
    "concurrent",
    "trainings that ran at the same time on a host, each on its own GPU or core; their times differ from those of a "
    "single one.",
    decimals=0,
)


def accuracy_table(analysis: Analysis) -> Table:
    """Tabulate accuracy after the last epoch by recipe and global batch, compared with the reference batch."""
    frame = _cells(analysis.accuracy)
    frame["verdict"] = [_verdict(row) for _, row in frame.iterrows()]
    frame = _percent(frame, "top1", "difference", "plain_difference")
    frame["top1_sd_percent"], frame["top5_percent"] = 100 * frame["top1_sd"], 100 * frame["top5"]
    return Table(
        "Accuracy by global batch",
        (
            _RECIPE,
            _BATCH,
            _MADE_OF,
            Column(
                "top1_percent",
                "accuracy (%)",
                "held-out accuracy after the last epoch, mean of the seeds [95 % interval].",
                1,
                2,
                True,
            ),
            Column(
                "top1_sd_percent",
                "sd (points)",
                "standard deviation over seeds, in percentage points.",
                1,
                2,
            ),
            Column(
                "difference_percent",
                "difference (points)",
                "from the same recipe at the reference batch, or from plain training if there is none [95 % "
                "interval: Welch's t, or of pairs with equal seeds at the same global batch].",
                1,
                2,
                True,
            ),
            Column(
                "verdict",
                "compared with reference",
                "not significantly different: the 95 % interval contains 0 and excludes a loss of "
                f"{100 * RELEVANT_LOSS:g} point.",
            ),
            Column(
                "plain_difference_percent",
                "difference from plain reference (points)",
                "from plain training at the reference batch [95 % interval, Welch's t].",
                1,
                2,
                True,
            ),
            Column("top5_percent", "top-5 (%)", "correct answer among the five most likely.", 1, 2),
            Column(
                "train_loss",
                "training loss",
                "of the last epoch; label smoothing raises it.",
                decimals=3,
            ),
            _SEEDS,
            _CONCURRENT,
        ),
        frame,
        _many_intervals(frame),
        blocks=("recipe",),
    )


def _many_intervals(frame: pd.DataFrame) -> str:
    """Warn of differences by chance if there are several to look at."""
    intervals = int(frame["difference_percent_low"].notna().sum())
    return "With this many intervals, expect one in twenty to exclude 0 by chance." if intervals > 1 else ""


_CRITICAL_BATCHES = tuple(
    Column(
        f"critical_batch{suffix}",
        f"critical batch{of}",
        "gradient noise scale tr(Σ)/|G|², the batch that balances the cost of steps and samples (McCandlish et al. "
        f"2018), {over} [95 % interval, jackknife over blocks of epochs].",
        decimals=0,
        interval=True,
    )
    for suffix, of, over in (
        ("", "", "over all epochs"),
        *((f"_{period}", f", {period} third", f"over the {period} third of the epochs") for period in PERIODS),
    )
)


def lossless_batch(analysis: Analysis) -> Table:
    """Tabulate the largest lossless batch of each recipe, next to the critical batch of the noise scale."""
    accuracy = analysis.accuracy
    frame = accuracy.lossless_batches.copy() if accuracy else pd.DataFrame(columns=_LOSSLESS_BATCH_COLUMNS)
    if accuracy and len(frame):
        trial_ids = {
            recipe: tuple(dict.fromkeys(cells.explode()))
            for recipe, cells in accuracy.cells.groupby("recipe")["trial_ids"]
        }
        frame["trial_ids"] = frame["recipe"].map(trial_ids)
        frame["lossless_batch_text"] = [_lossless_batch_text(row) for _, row in frame.iterrows()]
        frame = _percent(frame, "failing_difference", "reference_top1")
    return Table(
        "Largest lossless batch",
        (
            _RECIPE,
            Column(
                "reference_batch",
                "reference batch",
                "global batch that larger batches of the recipe are compared with.",
                decimals=0,
            ),
            Column(
                "reference_top1_percent",
                "reference accuracy (%)",
                "held-out accuracy after the last epoch, mean of the seeds.",
                decimals=2,
            ),
            Column(
                "lossless_batch_text",
                "largest lossless batch",
                "largest batch before accuracy first drops significantly below the reference; ≥: it never did.",
                is_main=True,
            ),
            Column(
                "failing_batch",
                "first lossy batch",
                "the next larger measured batch.",
                decimals=0,
                is_main=True,  # the next column is about it
            ),
            Column(
                "failing_difference_percent",
                "difference there (points)",
                "from the reference [95 % interval, Welch's t].",
                1,
                2,
                True,
            ),
            *_CRITICAL_BATCHES,
            Column("critical_from", "estimated from", "cell and seeds."),
        ),
        frame,
        "The largest lossless batch is measured. The critical batch is an estimate from gradients at another batch, "
        "not a measurement of accuracy.",
    )


_LOSSLESS_BATCH_COLUMNS = [
    "recipe", "reference_batch", "reference_top1_percent", "lossless_batch_text", "failing_batch",
    "failing_difference_percent", "failing_difference_percent_low", "failing_difference_percent_high",
    *(f"{column.name}{end}" for column in _CRITICAL_BATCHES for end in ("", "_low", "_high")), "critical_from",
]  # fmt: skip


def time_to_target(analysis: Analysis) -> Table:
    """Tabulate steps, samples, time, rank-hours and cost to reach the target accuracy."""
    accuracy = analysis.accuracy
    ranks = study_ranks(analysis)
    frame = _cells(accuracy)
    price = analysis.record.price_per_gpu_hour
    frame["reached_text"] = [f"{row['reached']} of {row['runs']}" for _, row in frame.iterrows()]
    frame["money_to_target"] = frame["hours_to_target"] * (np.nan if price is None else price)
    currency = "in the currency of --price-per-gpu-hour" if price is None else f"at {price:g} per {ranks[0]}-hour"
    if accuracy is None or accuracy.target is None:
        frame = frame.iloc[:0]
    return Table(
        "Time to the target accuracy",
        (
            _RECIPE,
            _BATCH,
            _MADE_OF,
            Column(
                "reached_text",
                "reached",
                "trainings that reached the target, of all that ran. Unless all did, no mean is shown, since it "
                "would be biased.",
            ),
            Column(
                "steps_to_target", "steps", "mean over seeds, to the end of the first epoch at the target.", decimals=0
            ),
            Column("samples_to_target", "samples", "mean over seeds, to the end of the same epoch.", decimals=0),
            Column(
                "time_to_target_s",
                "time (s)",
                "training only, without start, compilation and validation [95 % interval].",
                decimals=2,
                interval=True,
            ),
            Column("hours_to_target", f"{ranks[0]}-hours", f"{ranks[1]} × time.", decimals=4),
            Column("money_to_target", "cost", f"{currency}.", decimals=4),
            _SEEDS,
            _CONCURRENT,
        ),
        frame,
        _target_note(accuracy),
        blocks=("recipe",),
    )


def goodput_table(analysis: Analysis) -> Table:
    """Tabulate goodput (throughput × statistical efficiency) and the batch that maximises it."""
    accuracy = analysis.accuracy
    if accuracy:
        frame = goodput(accuracy.cells, accuracy.plain)
    else:
        frame = _cells(None).assign(**dict.fromkeys(_GOODPUT, np.nan))
    frame["best"] = ["highest" if row["is_best"] else "" for _, row in frame.iterrows()]
    frame = _percent(frame, "efficiency")
    return Table(
        "Goodput",
        (
            _RECIPE,
            _BATCH,
            _MADE_OF,
            Column(
                "throughput_samples_per_s",
                "throughput (samples/s)",
                "training only, geometric mean of the seeds [95 % interval].",
                decimals=0,
                interval=True,
            ),
            Column(
                "efficiency_percent",
                "statistical efficiency (%)",
                "(φ + M₀) / (φ + M), where φ is the critical batch, M the global batch and M₀ the reference batch: "
                "progress per sample relative to the reference batch (Pollux, Qiao et al. 2021) [from the interval "
                "of φ].",
                1,
                1,
                True,
            ),
            Column(
                "goodput_samples_per_s",
                "goodput (samples/s)",
                "throughput × statistical efficiency [from both intervals].",
                decimals=0,
                interval=True,
            ),
            Column("best", "best batch", "highest: the batch with the highest goodput of the recipe."),
            _SEEDS,
            _CONCURRENT,
        ),
        frame,
        "Predicted from the gradient noise scale; only the throughput is measured. The prediction assumes that the "
        "learning rate suits each batch. Recipes without their own noise scale use that of plain training.",
        blocks=("recipe",),
    )


_GOODPUT = (
    "is_best",
    *(f"{name}{end}" for name in ("throughput_samples_per_s", "efficiency") for end in ("", "_low", "_high")),
    *(f"goodput_samples_per_s{end}" for end in ("", "_low", "_high")),
)


def report_epoch(analysis: Analysis) -> Table:
    """Tabulate training loss and accuracy at the study's report epoch: largest batch on all ranks and reference."""
    epoch, accuracy = analysis.record.report_epoch, analysis.accuracy
    if accuracy is None or epoch is None:
        frame = pd.DataFrame(columns=EPOCH_COLUMNS)
    else:
        frame = report_epoch_rows(accuracy, epoch)
    frame = _percent(frame, "epoch_top1", "epoch_top1_difference")
    return Table(
        f"Epoch {epoch}: largest batch on all {study_ranks(analysis)[1]} compared with the reference batch",
        (
            _RECIPE,
            _BATCH,
            _MADE_OF,
            Column(
                "epoch_loss",
                "training loss",
                f"mean over the steps of epoch {epoch} and the seeds [95 % interval].",
                decimals=3,
                interval=True,
            ),
            Column(
                "epoch_loss_difference",
                "loss difference",
                "from the reference batch [95 % interval, Welch's t].",
                decimals=3,
                interval=True,
            ),
            Column(
                "epoch_top1_percent",
                "training accuracy (%)",
                f"of the samples of epoch {epoch}, as trained on.",
                1,
                2,
                True,
            ),
            Column(
                "epoch_top1_difference_percent",
                "accuracy difference (points)",
                "from the reference batch [95 % interval, Welch's t].",
                1,
                2,
                True,
            ),
            _SEEDS,
        ),
        frame,
        blocks=("global_batch",),
    )


def _cells(accuracy: Accuracy | None) -> pd.DataFrame:
    """Return the cells ordered by recipe and batch; an empty frame with all columns if nothing was trained."""
    if accuracy is None:
        return pd.DataFrame(columns=_CELL_COLUMNS)
    cells = accuracy.cells
    duplicated = cells["is_shared"] & ~cells["is_reference"]  # listed under the recipe that they were run for
    return cells[~duplicated].sort_values(
        ["recipe_number", "global_batch", "accumulation_steps", "world_size"], kind="stable"
    )


_CELL_COLUMNS = [
    "recipe", "global_batch", "made_of", "n", "top1", "top1_low", "top1_high", "top1_sd", "top5", "train_loss",
    "within_noise", "difference", "difference_low", "difference_high", "plain_difference", "plain_difference_low",
    "plain_difference_high", "is_reference", "reached", "runs", "steps_to_target", "samples_to_target",
    "time_to_target_s", "time_to_target_s_low", "time_to_target_s_high", "hours_to_target", "concurrent", "trial_ids",
]  # fmt: skip


def _percent(frame: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Add columns with shares as percentages, including the ends of their intervals if there are any."""
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
        return "unknown: too few seeds"
    if row["within_noise"]:
        return "not significantly different"
    return "lower" if row["difference"] < 0 else "higher"


def _lossless_batch_text(row: pd.Series) -> str:
    if pd.isna(row["lossless_batch"]):
        return "unknown: too few seeds"
    return f"{'≥ ' if row['is_open'] else ''}{number(row['lossless_batch'], 0)}"


def _target_note(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.target is None:
        return ""
    if accuracy.target_is_asked:
        return f"Measured at the end of epochs. Target: a held-out accuracy of {percent(accuracy.target, 2)}."
    return (
        f"Measured at the end of epochs. Target: {percent(accuracy.target, 2)}, which is 99 % of the mean accuracy of "
        "plain training at the reference batch. It was chosen after the fact; set another one with --target-accuracy."
    )
