"""The numbers behind each figure, as CSV: those of the table that it draws, or rows of its own."""

from collections.abc import Callable, Mapping

import pandas as pd

from analysis.accuracy_plots import curve_rows
from analysis.formatting import field_value
from analysis.scaling import Analysis
from analysis.step_plots import loss_rows, timeline_rows
from analysis.table import Table

DRAWN_FROM: Mapping[str, str] = {
    "speed_up_weak": "weak_scaling",
    "efficiency_weak": "weak_scaling",
    "speed_up_strong": "strong_scaling",
    "efficiency_strong": "strong_scaling",
    "bus_bandwidth": "sweep",
    "prediction_fan": "predictions",
    "accuracy_batch": "accuracy",
}
"""Figures whose table has another name than they."""


def _losses(analysis: Analysis) -> pd.DataFrame:
    found = analysis.configurations
    fields = {name: [field_value(name, value) for value in found[name]] for name in analysis.axes}
    return loss_rows(analysis).join(pd.DataFrame(fields, index=found.index), on="configuration")


def _curves(analysis: Analysis) -> pd.DataFrame:
    return curve_rows(analysis.accuracy) if analysis.accuracy else pd.DataFrame()


_OWN: Mapping[str, Callable[[Analysis], pd.DataFrame]] = {
    "timeline": timeline_rows,
    "loss": _losses,
    "training_curves": _curves,
    "lr_schedules": _curves,
}


def data_csv(name: str, analysis: Analysis, tables: Mapping[str, Table]) -> str | None:
    """What the figure `name` draws, in the units of the column names; None where nothing says so.

    tables: those of the same analysis, by their names.
    """
    if name in _OWN:
        return _OWN[name](analysis).to_csv(index=False, float_format="%.6g")
    table = tables.get(DRAWN_FROM.get(name, name))
    return None if table is None else table.to_csv()
