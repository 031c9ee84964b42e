"""Sentences on efficiency and speed-up."""

import pandas as pd

from analysis.compare.scaling import STRONG, WEAK
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, further_repeats, join, not_resolved, number, value_label, with_interval


def efficiency(analysis: Analysis, scaling: str) -> str | None:
    """Compare the largest number of ranks with the smallest, for the best and the worst series.

    scaling: `WEAK` or `STRONG`.
    """
    rows = compared_series(analysis, scaling)
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    largest = rows["world_size"].max()
    rows = rows[rows["world_size"] == largest].sort_values("efficiency", ascending=False)
    is_wide = rows["efficiency_more"] > 0
    wide, rows = rows[is_wide], rows[~is_wide]
    references = sorted(rows["reference_world_size"].astype(int).unique())
    constant = f"constant batch per {ranks[0]}" if scaling == WEAK else "constant global batch"
    reference = join([value_label("world_size", size, ranks) for size in references], "or")
    start = f"{scaling.capitalize()} scaling ({constant}): {value_label('world_size', int(largest), ranks)} reach"
    if rows.empty:
        return f"{start} an efficiency that is {not_resolved(wide['efficiency_more'].max())}."
    without = ""
    if len(wide):
        needed = further_repeats(wide["efficiency_more"].max())
        without = f" {len(wide)} further series {'is' if len(wide) == 1 else 'are'} not resolved (up to {needed})."
    best, worst = rows.iloc[0], rows.iloc[-1]
    if len(rows) == 1:
        text = f"{start} {_speed_up(best)} the throughput of {reference}, an efficiency of {efficiency_text(best)}."
        return text + without
    return (
        f"{start} at best {_speed_up(best)} the throughput of {reference}, an efficiency of {efficiency_text(best)} "
        f"({series_label(analysis, best, scaling)}), and at worst {_speed_up(worst)}, {efficiency_text(worst)} "
        f"({series_label(analysis, worst, scaling)}).{without}"
    )


def compared_series(analysis: Analysis, scaling: str) -> pd.DataFrame:
    """Return the scaling rows of that kind with more ranks than their reference."""
    return analysis.scaling[(analysis.scaling["scaling"] == scaling) & (analysis.scaling["ideal"] > 1)]


def _speed_up(row: pd.Series) -> str:
    return f"{number(row['speed_up'], 2)} times"


def efficiency_text(row: pd.Series) -> str:
    """Return the efficiency of a scaling row in percent, with its interval, or that it is not resolved."""
    if row["efficiency_more"] > 0:
        return not_resolved(row["efficiency_more"])
    value, low, high = (100 * float(row[name]) for name in ("efficiency", "efficiency_low", "efficiency_high"))
    shown, _, interval = with_interval(value, low, high, 1).partition(" ")
    return f"{shown}\u00a0% {interval}".rstrip()


def series_label(analysis: Analysis, row: pd.Series, scaling: str) -> str:
    """Label the series of a scaling row by its varying fields other than the number of ranks."""
    fields = [name for name in analysis.axes if name not in ("world_size", "nodes")]
    if scaling == STRONG:
        fields = ["global_batch", *(name for name in fields if name != "batch_per_gpu")]
    return configuration_label(analysis.configurations.loc[row["configuration"]], fields, study_ranks(analysis))
