"""Sentences on efficiency and speed-up."""

import pandas as pd

from analysis.compare.scaling import STRONG, WEAK
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, join, number, value_label, with_interval


def efficiency(analysis: Analysis, label: str) -> str | None:
    """How the largest number of ranks compares with the smallest, from the best series to the worst."""
    rows = compared_series(analysis, label)
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    largest = rows["world_size"].max()
    rows = rows[rows["world_size"] == largest].sort_values("efficiency", ascending=False)
    references = sorted(rows["reference_world_size"].astype(int).unique())
    held = f"the batch per {ranks[0]}" if label == WEAK else "the global batch"
    reference = join([value_label("world_size", size, ranks) for size in references], "or")
    head = f"With {held} held ({label} scaling), {value_label('world_size', int(largest), ranks)}"
    top, bottom = rows.iloc[0], rows.iloc[-1]
    if len(rows) == 1:
        return f"{head} reach {_speed_up(top)} the throughput of {reference}, an efficiency of {efficiency_text(top)}."
    return (
        f"{head} reach {_speed_up(top)} the throughput of {reference} at best, an efficiency of {efficiency_text(top)} "
        f"({series_label(analysis, top, label)}), and {_speed_up(bottom)} at worst, {efficiency_text(bottom)} "
        f"({series_label(analysis, bottom, label)})."
    )


def compared_series(analysis: Analysis, label: str) -> pd.DataFrame:
    """The rows of such scaling on more ranks than their reference."""
    return analysis.scaling[(analysis.scaling["scaling"] == label) & (analysis.scaling["ideal"] > 1)]


def _speed_up(row: pd.Series) -> str:
    return f"{number(row['speed_up'], 2)} times"


def efficiency_text(row: pd.Series) -> str:
    middle, low, high = (100 * float(row[name]) for name in ("efficiency", "efficiency_low", "efficiency_high"))
    value, _, interval = with_interval(middle, low, high, 1).partition(" ")
    return f"{value}\u00a0% {interval}".rstrip()


def series_label(analysis: Analysis, row: pd.Series, label: str) -> str:
    fields = [name for name in analysis.axes if name not in ("world_size", "nodes")]
    if label == STRONG:
        fields = ["global_batch", *(name for name in fields if name != "batch_per_gpu")]
    return configuration_label(analysis.configurations.loc[row["configuration"]], fields, study_ranks(analysis))
