"""The answer of number-formats: what each number format costs in accuracy, and what it gains in speed."""

from analysis.answers.reply import Missing, Reply, share, times
from analysis.compare.accuracy import by_precision
from analysis.predict.inputs import ReportInputs
from analysis.text import join, number


def cost(inputs: ReportInputs) -> Reply | Missing:
    """State accuracy and speed of trainings in each number format next to fp32."""
    rows = by_precision(inputs.accuracy)
    if "fp32" not in rows.index or len(rows) < 2:
        return Missing("fp32 and another number format were not both trained")
    base = rows.loc["fp32"]
    listed, numbers = [], {}
    for name, row in rows.iterrows():
        speed = row["throughput_samples_per_s"] / base["throughput_samples_per_s"]
        rate = f"{number(row['throughput_samples_per_s'], 0)} samples/s"
        compared = "" if name == "fp32" else f" ({times(speed)} of fp32)"
        difference = row["plain_difference"]
        listed.append(f"{name}: {rate}{compared}, accuracy {share(row, 'top1', 2, 'one seed')}")
        if name != "fp32":
            numbers |= {f"{name}_speed": float(speed), f"{name}_points": float(difference)}
    lost = [str(name) for name, row in rows.iterrows() if row["plain_difference_high"] < 0]
    largest_loss = number(-100 * rows["plain_difference_low"].min(), 1)
    first = (
        f"Accuracy falls in {join(lost)}"
        if lost
        else f"No format loses accuracy significantly, and losses above {largest_loss} points are excluded"
    )
    return Reply(f"{first} (95 %, {number(base['n'], 0)} seeds, {base['trained']}). {'; '.join(listed)}.", numbers)
