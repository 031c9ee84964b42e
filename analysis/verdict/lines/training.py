"""Lines of the card on trainings, and on acceleration ladders."""

from dataclasses import replace

import pandas as pd

from analysis.compare.accuracy import Accuracy, goodput, rank_speed_ups
from analysis.compare.ladder import OURS, is_gain
from analysis.compare.recipes import in_words
from analysis.compare.report_epoch import report_epoch_rows
from analysis.study import Analysis
from analysis.text import join, number, percent
from analysis.verdict.accuracy import as_fast_as, by_time_to_target, label
from analysis.verdict.facts import trained_workload, trains_another_model
from analysis.verdict.lines.value import CardLine, Quantity

MOST_STEPS = 2
"""Maximum slower steps of a ladder that are listed."""


def training_lines(analysis: Analysis) -> list[CardLine]:
    """Return accuracy, the study's epoch, accuracy lost, lossless batch, time to target, more ranks, and what to do."""
    accuracy = analysis.accuracy
    if accuracy is None:
        return []
    lines = (
        accuracy_line(analysis),
        _report_epoch(accuracy, analysis.record.report_epoch),
        _accuracy_lost(accuracy),
        _lossless_batch(accuracy),
        _time_to_target(accuracy),
        _scales(analysis, accuracy),
        _do_next(accuracy),
    )
    return [line for line in lines if line is not None]


def accuracy_line(analysis: Analysis) -> CardLine | None:
    """State the accuracy of the reference, or the training loss if there is no validation set."""
    accuracy = analysis.accuracy
    if accuracy is None:
        return None
    of = _trained(analysis, accuracy)
    if not accuracy.runs["validation_top1"].notna().any():
        loss = float(accuracy.runs["train_loss"].astype(float).mean())
        quantity = Quantity.of("training_loss", "1", loss)
        return CardLine(
            "accuracy", "accuracy", f"none: no validation set{of}; training loss {number(loss, 3)}", (quantity,)
        )
    cells = accuracy.cells
    rows = cells[cells["is_reference"] & (cells["recipe"] == accuracy.plain) & (cells["n"] > 0)]
    if rows.empty:
        return None
    row = rows.iloc[0]
    top1 = Quantity.of("accuracy", "1", *(float(row[f"top1{end}"]) for end in ("", "_low", "_high")))
    seeds = "1 seed" if row["n"] == 1 else f"{row['n']} seeds"
    batch = number(row["global_batch"], 0)
    decimals = top1.telling_decimals(2, 100)
    ends = f" ({ends})" if (ends := top1.ends(decimals, 100)) else ""
    text = f"{percent(float(row['top1']), decimals)}{ends} at global batch {batch}, {seeds}{of}"
    return CardLine(
        "accuracy", "accuracy", text, (top1, Quantity("reference_batch", float(row["global_batch"]), "samples"))
    )


def accuracy_in_one_line(analysis: Analysis) -> CardLine | None:
    """State accuracy, largest lossless batch, first loss and time to target, for a card that is also about speed."""
    line, accuracy = accuracy_line(analysis), analysis.accuracy
    if line is None or accuracy is None or accuracy.lossless_batches.empty:  # one batch was trained
        return line
    rows = accuracy.lossless_batches
    plain = rows[rows["recipe"] == accuracy.plain]
    known, failing = rows.dropna(subset="lossless_batch"), plain.dropna(subset="failing_batch")
    texts = [line.text]
    if len(known):
        best = _most_lossless(known)
        recipe = "" if best["lossless_batch"] in set(plain["lossless_batch"]) else f" with {best['recipe']}"
        note = ", the largest measured" if best["is_open"] else ""
        texts.append(f"lossless up to {number(best['lossless_batch'], 0)}{recipe}{note}")
    if len(failing):
        row = failing.iloc[0]
        texts.append(f"{number(100 * row['failing_difference'], 1)} points at {number(row['failing_batch'], 0)}")
    further = [_accuracy_lost(accuracy) if len(failing) else None, _lossless_batch(accuracy), _time_to_target(accuracy)]
    if (target := further[-1]) is not None and len(target.quantities) > 1:
        texts.append(f"target {target.text}")
    return replace(
        line,
        text="; ".join(texts),
        quantities=(*line.quantities, *(number for part in further if part is not None for number in part.quantities)),
    )


def _trained(analysis: Analysis, accuracy: Accuracy) -> str:
    """Name, in brackets, what of the trained workload and number format the title does not say."""
    parts = [trained_workload(accuracy)] if trains_another_model(analysis) else []
    reference = accuracy.runs[accuracy.runs["recipe"] == accuracy.plain]
    formats = list(dict.fromkeys(reference["precision"])) if "precision" in reference else []
    in_title = formats if analysis.headline is None else [analysis.headline_row["precision"]]
    if formats == [accuracy.plain] or formats != in_title:
        parts += [f"in {join(formats)}"]
    return f" ({' '.join(parts)})" if parts else ""


def _report_epoch(accuracy: Accuracy, epoch: int | None) -> CardLine | None:
    """State training loss and accuracy of the largest batch and of the reference at the epoch that the study names."""
    rows = pd.DataFrame() if epoch is None else report_epoch_rows(accuracy, epoch)
    if len(rows) < 2:
        return None
    quantities, texts = [], []
    for _, row in rows.iterrows():
        loss, top1 = (
            Quantity.of(name, "1", *(float(row[f"{column}{end}"]) for end in ("", "_low", "_high")), part=label(row))
            for name, column in (("training_loss", "epoch_loss"), ("training_accuracy", "epoch_top1"))
        )
        quantities += [loss, top1]
        texts.append(f"{number(loss.value, 3)} and {percent(float(row['epoch_top1']), 1)}")
    small, large = (number(rows["global_batch"].iloc[end], 0) for end in (0, -1))
    others = [f"{shown} {in_words(str(recipe))}" for shown, recipe in zip(texts, rows["recipe"], strict=True)][1:]
    text = f"training loss and accuracy {texts[0]} at batch {small}; at batch {large} {join(others)}"
    return CardLine("report_epoch", f"epoch {epoch}", text, tuple(quantities))


def _accuracy_lost(accuracy: Accuracy) -> CardLine | None:
    """State the loss of accuracy at the first batch where it is significant, of plain training; or of other recipes."""
    plain = accuracy.lossless_batches[accuracy.lossless_batches["recipe"] == accuracy.plain]
    if plain.empty:
        return _against_plain(accuracy)
    row = plain.iloc[0]
    if pd.notna(row["failing_batch"]):
        ends = (-float(row[f"failing_difference{end}"]) for end in ("", "_high", "_low"))
        lost = Quantity.of("accuracy_lost", "1", *ends)
        batch = number(row["failing_batch"], 0)
        text = f"{lost.text(2, 100)} points of accuracy at batch {batch}, {in_words(accuracy.plain)}"
        return CardLine("accuracy_lost", "lost", text, (lost,))
    if pd.isna(row["lossless_batch"]):
        return CardLine("accuracy_lost", "lost", "unknown: too few seeds to tell whether larger batches cost accuracy")
    text = f"nothing significant up to batch {number(row['lossless_batch'], 0)}, the largest measured"
    return CardLine("accuracy_lost", "lost", text)


def _against_plain(accuracy: Accuracy) -> CardLine | None:
    """Compare recipes, such as number formats, at the reference batch."""
    cells = accuracy.cells
    rows = cells[cells["is_reference"] & (cells["recipe"] != accuracy.plain)].dropna(subset="plain_difference")
    if rows.empty:
        return None
    quantities, texts = [], []
    for _, row in rows.iterrows():
        ends = (-float(row[f"plain_difference{end}"]) for end in ("", "_high", "_low"))
        quantities.append(Quantity.of("accuracy_lost", "1", *ends, part=str(row["recipe"])))
        gained = Quantity.of("", "1", *(float(row[f"plain_difference{end}"]) for end in ("", "_low", "_high")))
        texts.append(f"{gained.text(2, 100)} points with {row['recipe']}")
    text = f"{join(texts)}, compared with {accuracy.plain}"
    return CardLine("accuracy_lost", "difference", text, tuple(quantities))


def _lossless_batch(accuracy: Accuracy) -> CardLine | None:
    """State the largest lossless batch of the best recipe, and of plain training."""
    rows = accuracy.lossless_batches.dropna(subset="lossless_batch")
    if rows.empty:
        return None
    best = _most_lossless(rows)
    plain = rows[rows["recipe"] == accuracy.plain]
    batches = [Quantity("largest_lossless_batch", float(best["lossless_batch"]), "samples", part=str(best["recipe"]))]
    if len(plain) and plain["lossless_batch"].iloc[0] == best["lossless_batch"]:
        text = f"{_lossless(best)} {in_words(accuracy.plain)}"
        return CardLine("largest_lossless_batch", "lossless", text, tuple(batches))
    text = f"{_lossless(best)} with {best['recipe']}"
    if len(plain):
        text += f"; {_lossless(plain.iloc[0])} {in_words(accuracy.plain)}"
        batches.append(
            Quantity("largest_lossless_batch", float(plain["lossless_batch"].iloc[0]), "samples", part=accuracy.plain)
        )
    return CardLine("largest_lossless_batch", "lossless", text, tuple(batches))


def _most_lossless(rows: pd.DataFrame) -> pd.Series:
    return rows.sort_values(["lossless_batch", "is_open"], ascending=False, kind="stable").iloc[0]


def _lossless(row: pd.Series) -> str:
    """Name the largest lossless batch of a recipe; say so if it is the reference, so that no larger one is lossless."""
    batch = number(row["lossless_batch"], 0)
    if row["is_open"]:
        return f"at least batch {batch}"
    return f"only the reference batch {batch}" if row["lossless_batch"] == row["reference_batch"] else f"batch {batch}"


def _time_to_target(accuracy: Accuracy) -> CardLine | None:
    """State the training that reaches the target accuracy first."""
    if accuracy.target is None:
        return None
    rows = by_time_to_target(accuracy)
    target = Quantity("target_accuracy", accuracy.target, "1")
    shown = percent(accuracy.target, 1)
    if rows.empty:
        text = f"not reached: no batch reaches {shown} with every seed"
        return CardLine("time_to_target", "target", text, (target,))
    row = rows.iloc[0]
    time_s = Quantity.of(
        "time_to_target", "s", *(float(row[f"time_to_target_s{end}"]) for end in ("", "_low", "_high"))
    )
    text = f"{shown} in {number(time_s.value, 1)} s" + (f" ({ends})" if (ends := time_s.ends(1)) else "")
    return CardLine("time_to_target", "target", f"{text}: {row['cell']}", (time_s, target))


def _scales(analysis: Analysis, accuracy: Accuracy) -> CardLine | None:
    """State how much faster more ranks train at the same global batch; None if one number of ranks was measured."""
    rows = rank_speed_ups(accuracy)
    if rows.empty:
        return None
    value, low, high = (float(rows[f"speed_up{end}"].iloc[0]) for end in ("", "_low", "_high"))
    speed_up = Quantity.of("speed_up", "1", value, low, high)
    return CardLine("scales", "scales", as_fast_as(analysis, rows.iloc[0], speed_up.text(2)), (speed_up,))


def _do_next(accuracy: Accuracy) -> CardLine | None:
    """Recommend more seeds, larger batches, or the batch with the highest goodput that keeps its accuracy."""
    rows = accuracy.lossless_batches
    if len(accuracy.cells) and (accuracy.cells["n"] < 2).any():
        return CardLine("do_next", "do next", "more seeds: --repeats 5")
    known = rows.dropna(subset="lossless_batch")
    if len(rows) and known.empty:
        return CardLine("do_next", "do next", "more seeds: --repeats 5")
    if len(known) and known["is_open"].any():
        row = known[known["is_open"].astype(bool)].sort_values("lossless_batch").iloc[-1]
        recipe = in_words(str(row["recipe"]))
        return CardLine(
            "do_next", "do next", f"batches above {number(row['lossless_batch'], 0)} {recipe}: no limit found yet"
        )
    best = best_goodput(accuracy)
    if best is None:
        return None
    value = Quantity("goodput", float(best["goodput_samples_per_s"]), "samples/s")
    text = f"use {label(best)}: the fastest predicted training that keeps the accuracy"
    return CardLine("do_next", "do next", text, (value,))


def best_goodput(accuracy: Accuracy) -> pd.Series | None:
    """Return the cell with the highest goodput among those that keep their accuracy; None if there is none."""
    rows = goodput(accuracy.cells, accuracy.plain)
    rows = rows[rows["is_reference"] | rows["within_noise"].eq(True)]
    if rows.empty:
        return None
    return rows.sort_values("goodput_samples_per_s", ascending=False, kind="stable").iloc[0]


def ladder_lines(analysis: Analysis) -> list[CardLine]:
    """State the total speed-up of a ladder, its largest step, and the steps that slow training down."""
    rows = analysis.ladder
    rows = rows[rows["machine"] == OURS]
    if len(rows) < 2:
        return []
    fastest = rows.iloc[int(rows["cumulative_ratio"].astype(float).to_numpy().argmax())]
    total = _ratio("speed_up", fastest, "cumulative_ratio")
    shown = f"{number(total.value, 2)}x" if total.value is not None else total.unresolved
    if total.value is not None and not is_gain(fastest, "cumulative_ratio"):
        shown = f"not resolved: {shown} ({number(total.low, 2)}–{number(total.high, 2)})"
    first = rows["step"].iloc[0]
    text = (
        f"{shown} from “{first}” to “{fastest['step']}”"
        if fastest["step"] != first
        else f"none is faster than “{first}”"
    )
    lines = [CardLine("ladder", "speed-up", text, (total,))]
    steps = rows.dropna(subset="step_ratio")
    steps = steps[~(steps["step_ratio_more"].astype(float) > 0)]
    if len(steps):
        largest = steps.iloc[int(steps["step_ratio"].astype(float).to_numpy().argmax())]
        gain = _ratio("step_gain", largest, "step_ratio")
        text = f"“{largest['step']}”: {number(gain.value, 2)}x as fast as “{largest['against']}”"
        if not is_gain(largest, "step_ratio"):
            text = "none gains more than its interval"
        lines.append(CardLine("largest_step", "best step", text, (gain,)))
    ratio, high = (steps[f"step_ratio{end}"].astype(float) for end in ("", "_high"))
    slower = steps[(ratio.round(2) < 1) & ~(high >= 1)].sort_values("step_ratio")  # single runs have no interval
    if len(slower):
        listed = [
            f"“{row['step']}” ({number(row['step_ratio'], 2)}x of “{row['against']}”)"
            for _, row in slower.head(MOST_STEPS).iterrows()
        ]
        more = len(slower) - len(listed)
        text = join([*listed, *([f"{more} more"] if more else [])])
        quantities = tuple(_ratio("step_gain", row, "step_ratio") for _, row in slower.iterrows())
        lines.append(CardLine("slower_steps", "slower", text, quantities))
    return lines


def _ratio(name: str, row: pd.Series, column: str) -> Quantity:
    return Quantity.of(
        name, "1", *(float(row[f"{column}{end}"]) for end in ("", "_low", "_high", "_more")), part=row["step"]
    )
