"""Lines of the card on the step of one configuration: its speed, its batch, its bottleneck, and what to change."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from analysis.compare.batch_size import OUT_OF_MEMORY
from analysis.compare.best import MAX_LISTED_WORKLOADS
from analysis.compare.bottleneck import (
    WORDS,
    change_for,
    faster_compute,
    fewer_launches,
    is_exposed_only,
    larger_compute,
    largest_gain,
    removable,
)
from analysis.measure.configurations import units_per_s
from analysis.measure.hardware import use
from analysis.study import Analysis, study_ranks
from analysis.text import GIB, join, number, percent, telling_label, value_label
from analysis.verdict.bottleneck import NOISE, launching
from analysis.verdict.lines.improve import measured_advice
from analysis.verdict.lines.scaling import fewer_and_faster
from analysis.verdict.lines.subject import Subject, label_before
from analysis.verdict.lines.value import CardLine, Quantity


def bound_by(analysis: Analysis, subject: Subject) -> CardLine | None:
    """State what bounds the subject's step, and its share; None if no phase is known."""
    shares = _regions(analysis, subject)
    kind = shares["bound"]
    if not isinstance(kind, str):
        return None
    row = subject.row
    share = float(shares[kind])
    text = f"{label_before(subject)}{WORDS[kind].label}"
    quantities = []
    if kind == "host" and (math.isnan(share) or share <= 0):
        text += f" ({launching(row)})"
    else:
        text += f" ({percent(share)} of the step{larger_compute(shares)}"
        text += ", including unmeasured communication)" if kind == "compute" and math.isnan(shares["wire"]) else ")"
        quantities.append(Quantity("share_of_step", share, "1"))
    trials = use(analysis.measured, analysis.results.windows).reindex(list(row["trial_ids"]))
    utilisation, share_of_matmul = (_possible(trials[name]) for name in ("mfu", "share_of_matmul"))
    if utilisation is not None:
        text += f"; GPU at {percent(utilisation)} of its peak in {row['precision']}"
        quantities.append(Quantity("model_flops_utilisation", utilisation, "1"))
    if utilisation is not None and share_of_matmul is not None:
        text += f", {percent(share_of_matmul)} of what a matrix product reaches here"
        quantities.append(Quantity("share_of_matmul", share_of_matmul, "1"))
    return CardLine("bound_by", "bound by", text, tuple(quantities))


def skips_communication(row: pd.Series) -> bool:
    """Return True for a configuration on several ranks whose study did not measure communication."""
    return bool(row["world_size"] > 1 and row.get("communication_steps") == 0)


def _possible(shares: pd.Series) -> float | None:
    """Return the median over repeats; None if unknown or impossible."""
    values = shares.astype(float)
    value = float(values.median()) if values.notna().any() else math.nan
    return value if 0 < value <= 1 else None


def _regions(analysis: Analysis, subject: Subject) -> pd.Series:
    return analysis.regions.loc[[subject.configuration]].iloc[0]


def do_next(analysis: Analysis, subject: Subject) -> CardLine | None:
    """State the changes that `improve` measured, else fewer ranks if they train faster, and the largest upper bound.

    An upper bound is the gain from removing the largest part of the step besides compute.
    """
    if (measured := measured_advice(analysis.record.improvement)) is not None:
        return measured
    line = _upper_bound(analysis, subject)
    best = fewer_and_faster(analysis, subject.configuration)
    if line is None or best is None:
        return line
    few = value_label("world_size", int(best["world_size"]), study_ranks(analysis))
    start = label_before(subject)
    verb = "trains" if best["world_size"] == 1 else "train"
    text = f"{start}use {few}, which {verb} faster, or {line.text.removeprefix(start)}"
    return replace(line, text=text)


def _upper_bound(analysis: Analysis, subject: Subject) -> CardLine | None:
    """State the change with the largest upper bound, and that bound."""
    shares = _regions(analysis, subject)
    row = subject.row
    kind = shares["bound"]
    if not isinstance(kind, str):
        return None
    parts = removable(analysis.regions.loc[[subject.configuration]]).iloc[0]
    largest = str(parts.idxmax())
    share = float(parts[largest])
    if kind == "host" and share < NOISE:
        return CardLine("do_next", "do next", f"{label_before(subject)}{fewer_launches(row)} (gain unknown)")
    if share < NOISE and skips_communication(row):
        text = "measure communication, which may take any part of the step: --set communication_steps=10"
        return CardLine("do_next", "do next", label_before(subject) + text)
    if share < NOISE:
        known = "all else that was measured" if math.isnan(shares["wire"]) else "all else"
        text = f"{faster_compute(row)} ({known} is below {percent(NOISE)})"
        return CardLine("do_next", "do next", label_before(subject) + text)
    gain, bound = _gain(share, largest, shares)
    return CardLine("do_next", "do next", f"{label_before(subject)}{change_for(largest, row)}: {bound}", (gain,))


def _gain(share: float, part: str, shares: pd.Series) -> tuple[Quantity, str]:
    """Return the largest possible speed-up from removing a part with this share of a step, and its text."""
    gain = largest_gain(share)
    if math.isinf(gain):
        return Quantity("largest_possible_speed_up", None, "1"), "no upper bound, since this takes the entire step"
    of = " of what is exposed" if is_exposed_only(part, shares) else ""
    return Quantity("largest_possible_speed_up", gain, "1"), f"up to +{percent(gain - 1)} (upper bound{of})"


def speed(analysis: Analysis, chosen: Sequence[Subject]) -> CardLine:
    """State the highest throughput of a study that cannot compare numbers of ranks, of few workloads."""
    units = units_per_s(analysis.configurations, analysis.measured, analysis.fields)
    quantities, texts = [], []
    for subject in chosen:
        row = subject.row
        ends = (float(row[f"throughput_samples_per_s{end}"]) for end in ("", "_low", "_high", "_more"))
        throughput = Quantity.of("throughput", "samples/s", *ends, part=subject.label)
        quantities.append(throughput)
        shown = throughput.text(0 if (throughput.value or 0) >= 100 else 1)
        texts.append(label_before(subject) + (f"{shown} samples/s" if throughput.value is not None else shown))
        for name, values in units.items():
            if throughput.value is not None and math.isfinite(value := float(values[subject.configuration])):
                quantities.append(Quantity("throughput", value, f"{name}/s", part=subject.label))
                texts[-1] += f", {number(value, 0)} {name}/s"
    if len(texts) > MAX_LISTED_WORKLOADS:
        trials = analysis.results.trials
        done = f"{int((trials['status'] == 'done').sum())} of {len(trials)} trials are done"
        texts = [f"{done}; their {len(texts)} workloads are not comparable (see the table of throughputs)"]
    return CardLine("speed", "speed", "; ".join(texts), tuple(quantities))


def unit_speed(analysis: Analysis, chosen: Sequence[Subject]) -> CardLine | None:
    """State the characters or tokens per second of each subject; None if all count in samples, or they are many."""
    if len(chosen) > MAX_LISTED_WORKLOADS:
        return None
    units = units_per_s(analysis.configurations, analysis.measured, analysis.fields)
    rates = [
        Quantity("throughput", value, f"{name}/s", part=subject.label)
        for subject in chosen
        for name, values in units.items()
        if not subject.row["throughput_samples_per_s_more"] > 0
        and math.isfinite(value := float(values[subject.configuration]))
    ]
    texts = [f"{f'{rate.part}: ' if rate.part else ''}{number(rate.value, 0)} {rate.unit}" for rate in rates]
    return CardLine("speed", "speed", "; ".join(texts), tuple(rates)) if rates else None


def batch(analysis: Analysis, subject: Subject) -> CardLine | None:
    """Compare the best batch on one rank with the smallest; None if only one batch was tried."""
    curve = analysis.batch_curve
    of_subject = curve[curve["configuration"] == subject.configuration]
    if of_subject.empty:
        return None
    curve = curve[curve["series"] == of_subject["series"].iloc[0]]
    measured = curve.dropna(subset="relative")
    row, smallest = of_subject.iloc[0], measured.iloc[0]
    if pd.isna(row["relative"]) or smallest["configuration"] == subject.configuration:
        return None
    ratio = float(row["relative"] / smallest["relative"])
    names = join([number(value, 0) for value in measured["batch_per_gpu"]])
    text = (
        f"{number(row['batch_per_gpu'], 0)} is the fastest of {names}: "
        f"{number(ratio, 1 if ratio >= 2 else 2)}x the rate of {number(smallest['batch_per_gpu'], 0)}"
    )
    quantities = [Quantity("speed_up_over_smallest_batch", ratio, "1")]
    if pd.notna(row["peak_memory_bytes"]):
        text += f", {number(row['peak_memory_bytes'] / GIB, 1)} GiB"
        quantities.append(Quantity("peak_memory", float(row["peak_memory_bytes"]), "B"))
        if pd.notna(row["memory_share"]):
            text += f" ({percent(row['memory_share'])} of the memory)"
    too_large = curve[curve["outcome"] == OUT_OF_MEMORY]
    if len(too_large):
        text += f"; {number(too_large['batch_per_gpu'].min(), 0)} runs out of memory"
    return CardLine("batch", "batch", text, tuple(quantities))


def bounds_of_many(analysis: Analysis) -> list[CardLine]:
    """State what bounds how many configurations of many workloads, and the largest gain of one change to the headline.

    The headline is the fastest configuration of its workload, so that no advice is for one that was already improved.
    """
    shares = analysis.regions
    counts = shares["bound"].dropna().value_counts()
    if counts.empty:
        return []
    listed = join([f"{WORDS[str(kind)].label} ({count})" for kind, count in counts.items()])
    quantities = [
        Quantity("bound_configurations", float(count), "configurations", part=str(kind))
        for kind, count in counts.items()
    ]
    lines = [CardLine("bound_by", "bound by", listed, tuple(quantities))]
    parts = removable(shares.loc[[analysis.headline]]).iloc[0]
    part, share = str(parts.idxmax()), float(parts.max())
    if share >= NOISE:
        row = analysis.headline_row
        change = change_for(part, row)
        of = telling_label(analysis.configurations, row, analysis.axes, study_ranks(analysis))
        gain, bound = _gain(share, part, analysis.headline_regions)
        text = f"{of}: {change}: {bound}"
        lines.append(CardLine("do_next", "do next", text, (gain,)))
    return lines
