"""The sections of the report in order: each is a table with its figures.

To add a table or a figure, write a function from `ReportInputs` to a `Table` or a matplotlib figure (None if there is
nothing to draw), and add it to `SECTIONS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis.figures import answers
from analysis.figures.accuracy import accuracy_batch, curve_rows, lr_schedules, training_curves
from analysis.figures.batch_size import batch_size as batch_size_figure
from analysis.figures.batch_size import ladder as ladder_figure
from analysis.figures.communication import bus_bandwidth
from analysis.figures.communication import slowdown as slowdown_figure
from analysis.figures.improvement import improvement, improvement_rows
from analysis.figures.predictions import prediction_fan
from analysis.figures.scaling import phases as phases_figure
from analysis.figures.scaling import scaling_strong, scaling_weak
from analysis.figures.steps import loss, timeline
from analysis.predict.inputs import ReportInputs
from analysis.tables.accuracy import accuracy_table, goodput_table, lossless_batch, report_epoch, time_to_target
from analysis.tables.bandwidth import bandwidth, bucket_utilisation, ceiling, sweep
from analysis.tables.batch_size import batch_size, ladder
from analysis.tables.checks import data_checks, trace
from analysis.tables.communication import audit, collectives, communication, exposed_cost, slowdown
from analysis.tables.environment import gpus, hosts, ranks
from analysis.tables.hardware import hardware, memory_balance
from analysis.tables.host import host, transfer
from analysis.tables.one_field import execution, interconnects, levers, parallel, precision, settings, storage
from analysis.tables.phases import phases, unmeasured
from analysis.tables.predictions import law_parameters, laws, predictions
from analysis.tables.scaling import speed_up_strong_table, speed_up_weak_table, strong_scaling, throughput, weak_scaling
from analysis.tables.table import Table, as_csv
from analysis.tables.trials import failures, trials
from analysis.text import field_value

Rows = Callable[[ReportInputs], pd.DataFrame]


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    draw: draws it; the function's name is the file name, its docstring is the caption.
    rows: returns the drawn data in the units of the column names; None if the figure draws its section's table.
    """

    draw: Callable[[ReportInputs], Drawing | None]
    rows: Rows | None = None

    @property
    def name(self) -> str:
        return self.draw.__name__

    @property
    def caption(self) -> str:
        return " ".join((self.draw.__doc__ or "").split())

    def data_csv(self, inputs: ReportInputs, table: Table | None) -> str | None:
        """Return the drawn data as CSV. table: that of its section, None if it is not shown."""
        if self.rows is not None:
            return as_csv(self.rows(inputs), float_format="%.6g")
        return None if table is None else table.to_csv()


@dataclass(frozen=True)
class Section:
    """A table of the report and its figures. at_end: the page places it separately, after all results."""

    name: str
    table: Callable[[ReportInputs], Table]
    figures: tuple[Figure, ...] = ()
    at_end: bool = False


def _losses(inputs: ReportInputs) -> pd.DataFrame:
    configurations = inputs.configurations
    fields = {name: [field_value(name, value) for value in configurations[name]] for name in inputs.axes}
    return inputs.loss_curves.join(pd.DataFrame(fields, index=configurations.index), on="configuration")


def curves(inputs: ReportInputs) -> pd.DataFrame:
    return curve_rows(inputs.accuracy) if inputs.accuracy else pd.DataFrame()


def _gains(inputs: ReportInputs) -> pd.DataFrame:
    return inputs.gains


def _improvement(inputs: ReportInputs) -> pd.DataFrame:
    return improvement_rows(inputs)


def _timeline(inputs: ReportInputs) -> pd.DataFrame:
    return inputs.timeline


SECTIONS: tuple[Section, ...] = (
    Section("levers", levers, (Figure(improvement, _improvement),)),
    Section("ladder", ladder, (Figure(ladder_figure),)),
    Section(
        "accuracy",
        accuracy_table,
        (Figure(accuracy_batch), Figure(training_curves, curves), Figure(lr_schedules, curves)),
    ),
    Section("lossless_batch", lossless_batch),
    Section("report_epoch", report_epoch),
    Section("time_to_target", time_to_target),
    Section("goodput", goodput_table),
    Section("weak_scaling", weak_scaling, (Figure(scaling_weak),)),
    Section("speed_up_weak", speed_up_weak_table),
    Section("strong_scaling", strong_scaling, (Figure(scaling_strong),)),
    Section("speed_up_strong", speed_up_strong_table),
    Section("batch_size", batch_size, (Figure(batch_size_figure),)),
    Section("phases", phases, (Figure(phases_figure),)),
    Section("unmeasured", unmeasured),
    Section("host", host),
    Section("transfer", transfer),
    Section("slowdown", slowdown, (Figure(slowdown_figure),)),
    Section("exposed_cost", exposed_cost),
    Section("communication", communication, (Figure(timeline, _timeline),)),
    Section("collectives", collectives),
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

ANSWERS: tuple[Figure, ...] = (
    Figure(answers.work, answers.work_rows),
    Figure(answers.lost_ranks, answers.lost_rows),
    Figure(answers.gains, _gains),
)
"""Figures of the answer, which belong to no section."""

TABLES: Mapping[str, Callable[[ReportInputs], Table]] = {section.name: section.table for section in SECTIONS}

RETIRED_PLOTS = ("speed_up_weak", "speed_up_strong", "efficiency_weak", "efficiency_strong")
"""Figures of earlier versions, which a new report removes."""

WITHOUT_LATEX = ("trials",)
"""Tables that no paper prints: their rows contain whole commands."""

PLOTS: Mapping[str, Callable[[ReportInputs], Drawing | None]] = {
    figure.name: figure.draw for figures in (ANSWERS, *(section.figures for section in SECTIONS)) for figure in figures
}
