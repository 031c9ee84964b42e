"""The answer of number-formats: what each number format costs in accuracy, and what it gains in speed."""

from typing import Any

from analysis.answers.reply import Missing, Reply, share, times
from analysis.compare.accuracy import by_precision
from analysis.predict.inputs import ReportInputs
from analysis.text import join, number


def cost(inputs: ReportInputs) -> Reply | Missing:
    """State accuracy and speed of trainings in each number format next to fp32."""
    rows = {str(name): row for name, row in by_precision(inputs.accuracy).iterrows()}
    if "fp32" not in rows or len(rows) < 2:
        return Missing("fp32 and another number format were not both trained")
    base: Any = rows["fp32"]
    speeds = {name: row["throughput_samples_per_s"] / base["throughput_samples_per_s"] for name, row in rows.items()}
    listed = [
        f"{name}: {number(row['throughput_samples_per_s'], 0)} samples/s ({times(speeds[name])} of fp32), "
        f"accuracy {share(row, 'top1', 2, 'one seed')}"
        for name, row in rows.items()
    ]
    others = {name: row for name, row in rows.items() if name != "fp32"}
    lost = [name for name, row in others.items() if row["plain_difference_high"] < 0]
    most = -100 * min(row["plain_difference_low"] for row in others.values())
    first = (
        f"Accuracy falls in {join(lost)}"
        if lost
        else f"No format loses accuracy significantly, and losses above {number(most, 1)} points are excluded"
    )
    return Reply(
        f"{first} (95 %, {number(base['n'], 0)} seeds, {base['trained']}). {'; '.join(listed)}.",
        {f"{name}_speed": float(speeds[name]) for name in others}
        | {f"{name}_points": 100 * float(row["plain_difference"]) for name, row in others.items()},
    )
