"""Sentences on what to run next, and on the best configuration for a goal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.compare.best import MAX_LISTED_WORKLOADS, BestConfiguration, best_configurations, without_emulated
from analysis.duration import duration
from analysis.measure.configurations import rows_with, units_per_s
from analysis.predict.inputs import ReportInputs
from analysis.predict.next_trial import LEAST_GAIN, NARROWER, NextTrial, next_trial
from analysis.predict.series import ScalingSeries
from analysis.read.study_record import GOALS
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, not_resolved, number, percent, significance, value_label, with_interval
from analysis.verdict.accuracy import soonest

_MILLION = 1_000_000


def sentence(analysis: ReportInputs, trial: NextTrial | None) -> str:
    """Recommend the next trial, with its cost and its expected benefit."""
    if trial is None:
        return f"Next trial: none on a measured node would narrow a prediction by {percent(LEAST_GAIN)} or more."
    ranks = study_ranks(analysis)
    model = next(model for model in analysis.models if model.number == trial.series)
    fields = model.series.fields | {"batch_per_gpu": trial.batch_per_gpu, "world_size": trial.world_size}
    label = configuration_label(fields, _distinguishing_fields(analysis, fields), ranks)
    hours = number(trial.gpu_hours, 4) if trial.gpu_hours < 0.01 else number(trial.gpu_hours, 2)
    is_paid = ranks[0] == "GPU"
    cost = f"{hours} GPU-hours" if is_paid else duration(3600 * trial.gpu_hours / trial.world_size)
    text = f"Next trial: one more run with {label} ({cost}): {trial.why}"
    if trial.why == NARROWER:
        text += (
            f"; for {value_label('world_size', trial.target, ranks)} the interval is expected to shrink from "
            f"±{percent(trial.half_width_before, 1)} to ±{percent(trial.half_width_after, 1)} of the step"
        )
    return f"{text}."


def best(analysis: Analysis, goal: str) -> str:
    """State the best configuration for a goal and its runner-up, per workload.

    goal: throughput (samples/s), cost (samples per GPU-hour) or time-to-accuracy. Raises ValueError for any other.
    """
    if goal not in GOALS:
        raise ValueError(f"unknown goal {goal!r}; allowed: {', '.join(GOALS)}")
    if goal == "time-to-accuracy":
        if analysis.accuracy and (text := soonest(analysis.accuracy)):
            return f"Best for time to accuracy: {text}"
        return (
            "Best for time to accuracy: unknown, since no trial trained to an accuracy. Throughput alone does not "
            "determine it, because larger batches need more samples."
        )
    configurations = analysis.configurations
    if configurations.empty:
        return f"Best for {goal}: unknown, since no timed trial is done."
    scale = pd.Series(1.0, index=configurations.index) if goal == "throughput" else 3600 / configurations["world_size"]
    workloads = best_configurations(configurations, analysis.axes, analysis.fields, scale)
    if len(workloads) > MAX_LISTED_WORKLOADS:
        return f"Best for {goal}: the study mixes {len(workloads)} workloads, so there is no single best configuration."
    return " ".join(_best_of_workload(analysis, goal, scale, workload) for workload in workloads)


def best_predicted(analysis: ReportInputs, rows: pd.DataFrame, goal: str) -> list[str]:
    """State the best predicted configuration: for throughput on each number of ranks, for cost on any of them.

    rows: of a `forecast.Forecast`. Emulated interconnects only count if nothing else is predicted. Raises ValueError
    for any other goal.
    """
    if goal not in ("throughput", "cost"):
        raise ValueError(f"unknown goal {goal!r}; allowed: throughput, cost")
    models = {model.number: model.series for model in analysis.models}
    ranks = study_ranks(analysis)
    sizes = list(rows["world_size"].unique())
    rows = rows[rows["step_s"].notna()]
    is_real = rows["interconnect"].eq("auto") | rows["interconnect"].str.startswith("stated")
    rows = rows[is_real] if is_real.any() else rows
    names = [name for name in analysis.fields.of_kind("workload") if name in analysis.axes]
    kinds = rows["series"].map(lambda number: tuple(models[number].fields.get(name) for name in names))
    if goal == "cost":
        parts = [("", rows)]
    else:
        parts = [(f" on {value_label('world_size', size, ranks)}", rows[rows["world_size"] == size]) for size in sizes]
    sentences = []
    for where, of_size in parts:
        if of_size.empty:
            sentences.append(f"Best predicted {goal}{where}: unknown, since nothing is predicted there.")
        elif kinds[of_size.index].nunique() > MAX_LISTED_WORKLOADS:
            sentences.append(f"Best predicted {goal}{where}: none, since the study mixes several workloads.")
        else:
            for kind, members in of_size.groupby(kinds[of_size.index], sort=False):
                workload = configuration_label(dict(zip(names, kind, strict=True)), names, ranks)
                start = f"Best predicted {goal}{f' of {workload}' if workload else ''}{where}"
                value = members["throughput_samples_per_s"] * (3600 / members["world_size"] if goal == "cost" else 1.0)
                row = members.iloc[int(value.argmax())]
                fields = models[row["series"]].fields | {"world_size": int(row["world_size"])}
                fields |= {"batch_per_gpu": number(row["batch_per_gpu"], 0)}
                shown = [name for name in _distinguishing_fields(analysis, fields) if name not in names]
                label = configuration_label(fields, shown if goal == "cost" else shown[1:], ranks)
                unit = "samples/s" if goal == "throughput" else f"samples per {ranks[0]}-hour"
                caveat = f" [{row['caveat']}]" if isinstance(row["caveat"], str) else ""
                measured = rows_with(analysis.configurations, dict(zip(names, kind, strict=True)))
                if goal == "throughput":
                    measured = measured[measured["world_size"] <= members["world_size"].iloc[0]]
                predicted = [models[number] for number in members["series"].unique()]
                faster = _measured_already(analysis, measured, goal, value.max(), predicted)
                sentences.append(f"{start}: {label}, {_amount(value.max())} {unit}{caveat}{faster}.")
    return sentences


def _measured_already(
    analysis: Analysis, measured: pd.DataFrame, goal: str, best_value: float, predicted: Sequence[ScalingSeries]
) -> str:
    """Return the best of the measured configurations, if it is better than the best predicted one; else "".

    A configuration that the host bounds has no prediction for more ranks, but may be faster on the measured ones.
    predicted: the series that have one.
    """
    rows = without_emulated(measured)
    rows = rows[~(rows["throughput_samples_per_s_more"].astype(float) > 0)]
    scale = 3600 / rows["world_size"] if goal == "cost" else 1.0
    value = (rows["throughput_samples_per_s"].astype(float) * scale).dropna()
    if value.empty or value.max() <= best_value:
        return ""
    fields = {str(name): entry for name, entry in rows.loc[value.index].iloc[int(value.argmax())].items()}
    workload = analysis.fields.of_kind("workload")
    names = [name for name in _distinguishing_fields(analysis, fields) if name not in workload]
    label = configuration_label(fields, names, study_ranks(analysis))
    is_predicted = any(all(fields[name] == series.fields.get(name) for name in names[1:]) for series in predicted)
    return f"; measured already: {_amount(value.max())} with {label}{'' if is_predicted else ', not predicted'}"


def _best_of_workload(analysis: Analysis, goal: str, scale: pd.Series, workload: BestConfiguration) -> str:
    configurations, ranks = analysis.configurations, study_ranks(analysis)

    def label(index: int) -> str:
        row = {str(name): value for name, value in configurations.loc[index].items()}
        names = [name for name in _distinguishing_fields(analysis, row) if name not in workload.workload]
        return configuration_label(row, names, ranks)

    names = [f"throughput_samples_per_s{end}" for end in ("", "_low", "_high")]
    value, low, high = (float(configurations[name].loc[workload.best] * scale.loc[workload.best]) for name in names)
    unit = "samples/s" if goal == "throughput" else f"samples per {ranks[0]}-hour"
    workload_label = configuration_label(workload.workload, workload.workload, ranks)
    start = f"Best for {goal}{f' of {workload_label}' if workload_label else ''}:"
    if (more := float(configurations["throughput_samples_per_s_more"].loc[workload.best])) > 0:
        return f"{start} {not_resolved(more)}."
    text = f"{start} {label(workload.best)}, {_amount(value, low, high)} {unit}"
    for unit, rates in units_per_s(configurations, analysis.measured, analysis.fields).items():
        if goal == "throughput" and pd.notna(rate := rates.loc[workload.best]):
            text += f", {_amount(rate)} {unit}/s"
    unresolved = configurations[configurations["throughput_samples_per_s_more"].astype(float) > 0]
    unresolved = rows_with(unresolved, workload.workload)
    rates = unresolved["throughput_samples_per_s"].astype(float) * scale.reindex(unresolved.index)
    if rates.max() > value:
        faster = int(unresolved.index.to_numpy()[rates.to_numpy().argmax()])
        text += f"; {label(faster)} may be faster, but its rate is not resolved"
    if workload.runner_up is None:
        return f"{text}; nothing else was measured."
    if workload.more > 0:
        return f"{text}; runner-up: {label(workload.runner_up)}, by a ratio that is {not_resolved(workload.more)}."
    text += f"; runner-up: {label(workload.runner_up)}, {percent(1 - 1 / workload.ratio, 1)} less"
    if workload.within_noise is None:
        return f"{text} (one repeat cannot tell whether they differ)."
    return f"{text} ({significance(workload.within_noise)})."


def _amount(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """Return a rate with its interval, from a million on in millions: no interval supports all of their digits."""
    if value < _MILLION:
        return with_interval(value, low, high, 0 if value >= 1000 else 1)
    value, low, high = value / _MILLION, low / _MILLION, high / _MILLION
    return f"{with_interval(value, low, high, 1 if value >= 100 else 2)} million"


def _distinguishing_fields(analysis: Analysis, fields: Mapping[str, Any]) -> list[str]:
    """Return ranks, batch, and the varying fields that are set, except fields of timing and nodes."""
    first = ("world_size", "batch_per_gpu")
    excluded = (*first, *analysis.fields.timing, "nodes")
    return [*first, *(name for name in analysis.axes if name not in excluded and fields.get(name) not in (None, ""))]


def next_steps(analysis: ReportInputs) -> list[str]:
    """Return the next trial and, on GPUs, the best configuration for cost; empty if nothing can be predicted."""
    if not analysis.models:
        return []
    is_paid = study_ranks(analysis)[0] == "GPU"
    return [sentence(analysis, next_trial(analysis)), *([best(analysis, "cost")] if is_paid else [])]
