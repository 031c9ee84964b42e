"""What a study's own question asks for, in words: its ladder, the fields that it compares, memory, and parts of a step.

Each sentence is None where the study has nothing to say about it.
"""

import pandas as pd

from analysis.compare.ladder import OURS
from analysis.compare.one_field import against_reference
from analysis.load.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import GIB, configuration_label, join, number, percent, value_label

WORTH_A_WORD = 0.05
"""share of a step below which nothing is said of loading and copying"""

MOST_VALUES, MOST_CURVES = 4, 3
"""values of a field, and curves of memory over the batch, that are named one by one"""


def climbed(analysis: Analysis) -> str | None:
    """What the rungs of a ladder bring together, which brings most, and which slow it down."""
    rows = analysis.ladder
    rows = rows[rows["machine"] == OURS]
    if len(rows) < 2:
        return None
    together = rows["cumulative_ratio"].astype(float)
    steps = rows.set_index("rung")["step_ratio"].astype(float).dropna()
    top = rows.iloc[int(together.to_numpy().argmax())]
    text = (
        f"From {rows['rung'].iloc[0]} on, {len(rows) - 1} further rung{'s make' if len(rows) > 2 else ' makes'} training up to "
        f"{number(float(together.max()), 2)} times as fast ({top['rung']}); {steps.idxmax()} brings most, {number(steps.max(), 2)} "
        "times the rung before"
    )
    slower = steps[steps.round(2) < 1]
    if slower.empty:
        return f"{text}."
    return f"{text}; slower than the rung before {'is' if len(slower) == 1 else 'are'} " + (
        f"{join([f'{name} ({number(ratio, 2)})' for name, ratio in slower.items()])}."
    )


def compared(analysis: Analysis) -> str | None:
    """How many times as fast the values of each compared field are as its reference, at otherwise equal fields."""
    if not analysis.ladder.empty:
        return None  # its rungs are such comparisons
    ranks, said = study_ranks(analysis), []
    for field in [name for name in analysis.fields.compared_in("own") if name in analysis.axes]:
        rows = against_reference(analysis.configurations, field, analysis.fields[field].order)
        rows = rows.assign(value=analysis.configurations[field].reindex(rows["configuration"]).to_numpy())
        for against, part in rows[rows["value"] != rows["against"]].groupby("against", sort=False):
            by_value = part.astype({"ratio": float}).groupby("value", sort=False)["ratio"].agg(["min", "max"])
            if by_value.empty or len(by_value) > MOST_VALUES:
                continue
            noise = part.groupby("value", sort=False)[["ratio_low", "ratio_high"]].apply(_beyond_noise)
            listed = [
                f"{value_label(field, value, ranks)} is {_span(low, high)} times as fast{noise[value]}"
                for value, low, high in by_value.itertuples()
            ]
            said.append(f"Against {value_label(field, against, ranks)}, all else equal, {join(listed)}.")
    return " ".join(said) or None


def _beyond_noise(intervals: pd.DataFrame) -> str:
    """How many of some ratios differ from 1 beyond noise, in brackets; nothing where all do, or no interval is known."""
    known = intervals.astype(float).dropna()
    beyond = int(((known["ratio_low"] > 1) | (known["ratio_high"] < 1)).sum())
    if known.empty or beyond == len(intervals):
        return ""
    return f" (beyond noise in {beyond} of {len(intervals)})"


def memory(analysis: Analysis) -> str | None:
    """From what to what peak memory goes over the batch, and the largest batch that fits where that is known."""
    rows = analysis.batch_curve
    rows = rows[rows["peak_memory_bytes"].notna()]
    one, _ = study_ranks(analysis)
    names = [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]
    said = []
    for _, curve in rows.groupby("series", sort=False):
        small, large = curve.iloc[0], curve.iloc[-1]
        if small["batch_per_gpu"] == large["batch_per_gpu"]:
            continue
        label = configuration_label(large, names, study_ranks(analysis))
        text = (
            f"from {number(small['peak_memory_bytes'] / GIB, 1)} GiB at batch {small['batch_per_gpu']} to "
            f"{number(large['peak_memory_bytes'] / GIB, 1)} at {large['batch_per_gpu']}"
        )
        fits = ", the largest tried that fits" if "fits" in str(large["outcome"]) else ""
        said.append(f"{text}{fits}{f' ({label})' if label else ''}")
    if not said or len(said) > MOST_CURVES:
        return None
    return f"On one {one} peak memory goes {join(said)}."


def parts(analysis: Analysis) -> str | None:
    """What loading, the copy to the device and processing take of a step, where one of the first two is more than nothing."""
    found = analysis.configurations
    timed = found[list(PHASES)].astype(float)
    total_s = timed.sum(axis=1, min_count=1)
    total_s = total_s.where(total_s > 0)
    if len(found) < 2 or total_s.notna().sum() < 2:
        return None
    shares = pd.DataFrame(
        {
            "waiting for a batch": timed["load_wait_s"].fillna(0.0) / total_s,
            "its copy to the device": timed["host_to_device_s"].fillna(0.0) / total_s,
        }
    ).dropna()
    if shares.to_numpy().max() < WORTH_A_WORD:
        return None
    shares["processing"] = 1 - shares.sum(axis=1)
    listed = [
        f"{name} {percent(values.median())} ({percent(values.min())} to {percent(values.max())})"
        for name, values in shares.items()
    ]
    return f"Of a step, in the median of {len(shares)} configurations (least to most), {join(listed)}."


def _span(low: float, high: float) -> str:
    shown, most = number(low, 2), number(high, 2)
    return shown if shown == most else f"{shown} to {most}"
