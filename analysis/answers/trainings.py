"""Answers about trainings: what number formats cost and gain, and whether ranks may divide a global batch."""

from typing import Any

import pandas as pd

from analysis.answers.reply import SAME_POINTS, Missing, Reply, share, times
from analysis.compare.accuracy import by_precision, difference_of
from analysis.compare.recipes import in_words
from analysis.predict.inputs import ReportInputs
from analysis.text import join, number, percent, with_interval


def cost(inputs: ReportInputs) -> Reply | Missing:
    """State accuracy and speed of trainings in each number format next to fp32."""
    rows = {str(name): row for name, row in by_precision(inputs.accuracy).iterrows()}
    if "fp32" not in rows or len(rows) < 2:
        return Missing("fp32 and another number format were not both trained")
    base: Any = rows["fp32"]
    speeds = {name: row["throughput_samples_per_s"] / base["throughput_samples_per_s"] for name, row in rows.items()}
    listed = [
        f"{row['recipe']}: {number(row['throughput_samples_per_s'], 0)} samples/s ({times(speeds[name])} of fp32), "
        f"accuracy {share(row, 'top1', 2, 'one seed')}"
        for name, row in rows.items()
    ]
    others = {name: row for name, row in rows.items() if name != "fp32"}
    lost = [row["recipe"] for row in others.values() if row["plain_difference_high"] < 0]
    most = -100 * min(row["plain_difference_low"] for row in others.values())
    confidence = f"95 %, {number(base['n'], 0)} seeds, "
    if lost:
        first = f"Accuracy falls in {join(lost)}"
    elif pd.isna(most):
        first, confidence = "One seed per format cannot tell whether a format loses accuracy", ""
    else:
        first = f"No format loses accuracy significantly, and losses above {number(most, 1)} points are excluded"
    return Reply(
        f"{first} ({confidence}{base['trained']}). {'; '.join(listed)}.",
        {f"{name}_speed": float(speeds[name]) for name in others}
        | {f"{name}_points": 100 * float(row["plain_difference"]) for name, row in others.items()},
    )


def divided(inputs: ReportInputs) -> Reply | Missing:
    """State the accuracy of each global batch divided over ranks, minus that of the same batch on one rank."""
    found = inputs.accuracy
    cells = pd.DataFrame() if found is None else found.cells.dropna(subset="top1").drop_duplicates("trial_ids")
    listed, numbers, ends = [], {}, []
    for _, group in cells.sort_values("world_size").groupby(["recipe", "global_batch"]) if len(cells) else ():
        one, several = group.iloc[0], group.iloc[-1]
        recipe, batch = str(one["recipe"]), int(one["global_batch"])
        if found is None or one["world_size"] != 1 or several["world_size"] == 1:
            continue
        value, low, high = (100 * part for part in difference_of(found, several, one))
        listed.append(
            f"batch {number(batch, 0)} {in_words(recipe)}: {with_interval(value, low, high, 2, 'one seed')} "
            f"({several['made_of']}: {percent(several['top1'], 2)}, {one['made_of']}: {percent(one['top1'], 2)})"
        )
        numbers[f"{recipe}_{batch}_points"] = value
        ends.append((low, high))
    if not ends:
        return Missing("no global batch was trained both on one rank and on several", "--gpus 1,2")
    text = f"The accuracy on several ranks minus that on one, in points: {'; '.join(listed)}."
    if any(low > 0 or high < 0 for low, high in ends):
        return Reply(f"No. {text}", numbers)
    if any(pd.isna(low) or max(-low, high) > SAME_POINTS for low, high in ends):
        return Missing("their seeds differ by too much", "--repeats 10", text)
    return Reply(f"Yes. {text}", numbers, "same gradient")
