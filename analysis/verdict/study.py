"""Sentences that answer a study's own question: its ladder, compared fields, memory, and parts of a step.

Each function returns None if the study has no data for it.
"""

from typing import Any

import pandas as pd

from analysis.compare.ladder import NO_GAIN, OURS, is_gain
from analysis.compare.one_field import against_reference
from analysis.read.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import (
    GIB,
    configuration_label,
    further_repeats,
    join,
    not_resolved,
    number,
    percent,
    uncapitalised,
    value_label,
)

WORTH_A_WORD = 0.05
"""Share of a step below which loading and copying are not mentioned."""

MOST_VALUES, MOST_CURVES = 4, 3
"""Maximum values of a field, and memory curves, that are listed individually."""


def ladder(analysis: Analysis) -> str | None:
    """State the total speed-up of a ladder, the step that gains most, and the steps that slow training down."""
    rows = analysis.ladder
    rows = rows[rows["machine"] == OURS]
    if len(rows) < 2:
        return None
    if (rows["cumulative_ratio_more"] > 0).any():
        needed = further_repeats(float(rows[["step_ratio_more", "cumulative_ratio_more"]].astype(float).max().max()))
        return f"The speed-ups of the ladder are not resolved (need {needed})."
    speed_up = rows["cumulative_ratio"].astype(float)
    by_step = rows.set_index("step")
    step_ratios = by_step["step_ratio"].astype(float).dropna()
    against: dict[Any, Any] = rows.set_index("step")["against"].to_dict()
    fastest = rows.iloc[int(speed_up.to_numpy().argmax())]
    largest = rows[rows["step"] == step_ratios.idxmax()].iloc[0]
    total = (
        f"The ladder reaches a speed-up of {number(float(speed_up.max()), 2)}x over {rows['step'].iloc[0]} "
        f"({fastest['step']})"
    )
    largest_gain = (
        f"the largest gain in one step is {largest['step']} "
        f"({number(largest['step_ratio'], 2)}x compared with {largest['against']})"
    )
    text = NO_GAIN
    if is_gain(largest, "step_ratio"):
        text = f"{total}; {largest_gain}"
    elif speed_up.max() > 1 and is_gain(fastest, "cumulative_ratio"):
        text = f"{total}; {uncapitalised(NO_GAIN)}"
    high = by_step["step_ratio_high"].astype(float).reindex(step_ratios.index)
    slower = step_ratios[(step_ratios.round(2) < 1) & ~(high >= 1)]  # single runs have no interval
    if slower.empty:
        return f"{text}."
    listed = join([f"{name} ({number(ratio, 2)}x of {against[name]})" for name, ratio in slower.items()])
    return f"{text}; slower than what they are compared with: {listed}."


def comparisons(analysis: Analysis) -> str | None:
    """State the speed-up of each value of a compared field over its reference, with all other fields equal.

    The ranges are those of resolved ratios.
    """
    if not analysis.ladder.empty or analysis.record.search is not None:
        return None  # the steps of the ladder and the changes that `improve` tried are such comparisons
    ranks, sentences = study_ranks(analysis), []
    for field in [name for name in analysis.fields.compared_in("own") if name in analysis.axes]:
        rows = against_reference(analysis.configurations, field, analysis.fields[field].order)
        rows = rows.assign(value=analysis.configurations[field].reindex(rows["configuration"]).to_numpy())
        for reference, part in rows[rows["value"] != rows["against"]].groupby("against", sort=False):
            by_value = list(part.astype({"ratio": float}).groupby("value", sort=False))
            if not by_value or len(by_value) > MOST_VALUES:
                continue
            listed = [f"{value_label(field, value, ranks)} is {_times_as_fast(pairs)}" for value, pairs in by_value]
            sentences.append(f"Compared with {value_label(field, reference, ranks)}, {join(listed)}.")
    return " ".join(sentences) or None


def _times_as_fast(pairs: pd.DataFrame) -> str:
    """Return the range of the resolved ratios, with counts in brackets; or that none is resolved."""
    is_wide = pairs["ratio_more"].astype(float) > 0
    resolved = pairs[~is_wide]
    if resolved.empty:
        return not_resolved(float(pairs["ratio_more"].max()))
    count = _significant_count(resolved[["ratio_low", "ratio_high"]])
    notes = [count, f"{int(is_wide.sum())} not resolved" if is_wide.any() else ""]
    shown = ", ".join(note for note in notes if note)
    times = _range(float(resolved["ratio"].min()), float(resolved["ratio"].max()))
    return f"{times} times as fast{f' ({shown})' if shown else ''}"


def _significant_count(intervals: pd.DataFrame) -> str:
    """Return how many ratios differ significantly from 1; empty if all do or no interval is known."""
    known = intervals.astype(float).dropna()
    significant = int(((known["ratio_low"] > 1) | (known["ratio_high"] < 1)).sum())
    if known.empty or significant == len(intervals):
        return ""
    return "not significant" if len(intervals) == 1 else f"{significant} of {len(intervals)} significant"


def memory(analysis: Analysis) -> str | None:
    """State peak memory at the smallest and the largest batch, and whether the latter is the largest that fits."""
    rows = analysis.batch_curve
    rows = rows[rows["peak_memory_bytes"].notna()]
    rank, _ = study_ranks(analysis)
    names = [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]
    ranges = []
    for _, curve in rows.groupby("series", sort=False):
        small, large = curve.iloc[0], curve.iloc[-1]
        if small["batch_per_gpu"] == large["batch_per_gpu"]:
            continue
        label = configuration_label(large, names, study_ranks(analysis))
        text = (
            f"from {number(small['peak_memory_bytes'] / GIB, 1)} GiB at batch {number(small['batch_per_gpu'], 0)} to "
            f"{number(large['peak_memory_bytes'] / GIB, 1)} GiB at {number(large['batch_per_gpu'], 0)}"
        )
        fits = ", the largest measured batch that fits" if "fits" in str(large["outcome"]) else ""
        ranges.append(f"{text}{fits}{f' ({label})' if label else ''}")
    if not ranges or len(ranges) > MOST_CURVES:
        return None
    return f"Peak memory on one {rank} grows {join(ranges)}."


def step_parts(analysis: Analysis) -> str | None:
    """State the shares of loading, copying and processing in a step; None if loading and copying are negligible."""
    configurations = analysis.configurations
    timed = configurations[list(PHASES)].astype(float)
    total_s = timed.sum(axis=1, min_count=1)
    total_s = total_s.where(total_s > 0)
    if len(configurations) < 2 or total_s.notna().sum() < 2:
        return None
    longest = ", on the rank that waits longest," if configurations["world_size"].max() > 1 else ""
    shares = pd.DataFrame(
        {
            f"waiting for a batch{longest}": configurations["longest_load_wait_s"].astype(float).fillna(0.0) / total_s,
            "copying it to the device": timed["host_to_device_s"].fillna(0.0) / total_s,
        }
    ).dropna()
    if shares.to_numpy().max() < WORTH_A_WORD:
        return None
    shares["processing"] = 1 - shares.sum(axis=1)
    listed = [
        f"{name} takes {percent(values.median())} ({percent(values.min())} to {percent(values.max())})"
        for name, values in shares.items()
    ]
    return f"Parts of a step, median of {len(shares)} configurations (range): {join(listed)}."


def _range(low: float, high: float) -> str:
    first, last = number(low, 2), number(high, 2)
    return first if first == last else f"{first} to {last}"
