"""The sections of the report, in their order: each a table, and the figures that belong to it.

To add a table or a figure: a function from `ReportInputs` to a `Table`, or to a matplotlib figure (None if there is nothing
to draw), and its name in `SECTIONS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis.accuracy_plots import accuracy_batch, curve_rows, lr_schedules, training_curves
from analysis.accuracy_tables import accuracy_table, elbow, goodput_table, report_epoch, time_to_target
from analysis.bandwidth_table import bandwidth
from analysis.batch_plots import batch_size as batch_size_figure
from analysis.batch_plots import ladder as ladder_figure
from analysis.batch_tables import batch_size, speed_up_strong_table, speed_up_weak_table
from analysis.check_table import data_checks
from analysis.communication_plots import bus_bandwidth
from analysis.communication_plots import slowdown as slowdown_figure
from analysis.communication_tables import (
    audit,
    bucket_utilisation,
    ceiling,
    communication,
    exposed_cost,
    slowdown,
    sweep,
)
from analysis.comparison_tables import execution, interconnects, parallel, precision, settings, storage
from analysis.evidence import gpus, hosts, ranks
from analysis.formatting import field_value
from analysis.hardware_tables import hardware, memory_balance
from analysis.host_tables import host, transfer
from analysis.ladder_table import ladder
from analysis.plots import efficiency_strong, efficiency_weak, speed_up_strong, speed_up_weak
from analysis.plots import phases as phases_figure
from analysis.prediction_plots import prediction_fan
from analysis.prediction_tables import law_parameters, laws, predictions
from analysis.report_inputs import ReportInputs
from analysis.step_plots import loss, timeline
from analysis.table import Table
from analysis.tables import failures, phases, strong_scaling, throughput, weak_scaling
from analysis.trace_table import trace
from analysis.trials_table import trials

Rows = Callable[[ReportInputs], pd.DataFrame]


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    draw: its name names the figure's files, its docstring is the caption. rows: what it draws, in the units of the column
    names; None if it draws its section's table.
    """

    draw: Callable[[ReportInputs], Drawing | None]
    rows: Rows | None = None

    @property
    def name(self) -> str:
        return self.draw.__name__

    @property
    def caption(self) -> str:
        return (self.draw.__doc__ or "").strip()

    def data_csv(self, inputs: ReportInputs, table: Table | None) -> str | None:
        """What the figure draws. table: that of its section, None if it is not shown."""
        if self.rows is not None:
            return self.rows(inputs).to_csv(index=False, float_format="%.6g")
        return None if table is None else table.to_csv()


@dataclass(frozen=True)
class Section:
    """A table of the report and its figures. at_end: the page shows it after the numbers, at a place of its own."""

    name: str
    table: Callable[[ReportInputs], Table]
    figures: tuple[Figure, ...] = ()
    at_end: bool = False


def _losses(inputs: ReportInputs) -> pd.DataFrame:
    found = inputs.configurations
    fields = {name: [field_value(name, value) for value in found[name]] for name in inputs.axes}
    return inputs.loss_curves.join(pd.DataFrame(fields, index=found.index), on="configuration")


def _curves(inputs: ReportInputs) -> pd.DataFrame:
    return curve_rows(inputs.accuracy) if inputs.accuracy else pd.DataFrame()


def _timeline(inputs: ReportInputs) -> pd.DataFrame:
    return inputs.timeline


SECTIONS: tuple[Section, ...] = (
    Section("ladder", ladder, (Figure(ladder_figure),)),
    Section(
        "accuracy",
        accuracy_table,
        (Figure(accuracy_batch), Figure(training_curves, _curves), Figure(lr_schedules, _curves)),
    ),
    Section("elbow", elbow),
    Section("report_epoch", report_epoch),
    Section("time_to_target", time_to_target),
    Section("goodput", goodput_table),
    Section("weak_scaling", weak_scaling, (Figure(speed_up_weak), Figure(efficiency_weak))),
    Section("speed_up_weak", speed_up_weak_table),
    Section("strong_scaling", strong_scaling, (Figure(speed_up_strong), Figure(efficiency_strong))),
    Section("speed_up_strong", speed_up_strong_table),
    Section("batch_size", batch_size, (Figure(batch_size_figure),)),
    Section("phases", phases, (Figure(phases_figure),)),
    Section("host", host),
    Section("transfer", transfer),
    Section("slowdown", slowdown, (Figure(slowdown_figure),)),
    Section("exposed_cost", exposed_cost),
    Section("communication", communication, (Figure(timeline, _timeline),)),
    Section("bandwidth", bandwidth),
    Section("ceiling", ceiling),
    Section("sweep", sweep, (Figure(bus_bandwidth),)),
    Section("bucket_utilisation", bucket_utilisation),
    Section("predictions", predictions, (Figure(prediction_fan),)),
    Section("laws", laws),
    Section("law_parameters", law_parameters),
    Section("parallel", parallel),
    Section("precision", precision, (Figure(loss, _losses),)),
    Section("execution", execution),
    Section("storage", storage),
    Section("interconnects", interconnects),
    Section("settings", settings),
    Section("memory_balance", memory_balance),
    Section("hardware", hardware),
    Section("throughput", throughput),
    Section("data_checks", data_checks),
    Section("trace", trace),
    Section("audit", audit),
    Section("failures", failures, at_end=True),
    Section("hosts", hosts, at_end=True),
    Section("gpus", gpus, at_end=True),
    Section("ranks", ranks, at_end=True),
    Section("trials", trials, at_end=True),
)

TABLES: Mapping[str, Callable[[ReportInputs], Table]] = {section.name: section.table for section in SECTIONS}

PLOTS: Mapping[str, Callable[[ReportInputs], Drawing | None]] = {
    figure.name: figure.draw for section in SECTIONS for figure in section.figures
}
