"""Summarise a study for the terminal: one row per configuration, and a line on trials of other environments."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.read.environment import difference
from analysis.study import Analysis
from analysis.tables.accuracy import accuracy_table
from analysis.tables.scaling import throughput
from analysis.tables.table import Table
from analysis.text import not_resolved, number


@dataclass(frozen=True)
class Summary:
    """Column headers, one row of strings per configuration, and a line on trials of other environments, if any."""

    columns: list[str]
    rows: list[tuple[str, ...]]
    left_out: str | None


def summary(first: Analysis, others: Sequence[Analysis]) -> Summary:
    """Summarise `first`, the environment with most done trials, and name how the others differ."""
    only_trained = first.configurations.empty and first.accuracy
    cells = accuracy_table(first).cells() if only_trained else _throughput(first)
    rows = [tuple(row) for row in cells.itertuples(index=False)]
    return Summary(list(cells.columns), rows, left_out(first, others))


def _throughput(analysis: Analysis) -> pd.DataFrame:
    table = throughput(analysis)
    names = {*analysis.axes, "world_size", "throughput_samples_per_s", "step_s", "n"}
    cells = Table(table.title, tuple(column for column in table.columns if column.name in names), table.frame).cells()
    weak = analysis.scaling[analysis.scaling["scaling"] == "weak"].set_index("configuration")
    weak = weak.reindex(analysis.configurations.index)
    shown = [
        not_resolved(more) if more > 0 else number(100 * efficiency, 1)
        for efficiency, more in zip(
            weak["efficiency"].astype(float), weak["efficiency_more"].astype(float), strict=True
        )
    ]
    cells.insert(len(cells.columns) - 1, "weak efficiency (%)", shown)
    return cells


def left_out(first: Analysis, others: Sequence[Analysis]) -> str | None:
    """Return a line on the trials of other environments, which the results exclude; None if there are none."""
    if not others:
        return None
    listed = [
        f"{len(other.results.trials)} with {difference(other.environment, first.environment)}" for other in others
    ]
    return (
        f"Trials from {'another environment' if len(others) == 1 else 'other environments'} are excluded from these "
        f"results: {'; '.join(listed)}."
    )
