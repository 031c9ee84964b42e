"""Tables of predictions; every predicted value is labelled as such."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.predict.forecast import FORECAST_FACTORS, forecast, held_batch
from analysis.predict.inputs import ReportInputs
from analysis.predict.laws import LAWS
from analysis.predict.model import ScalingModel
from analysis.predict.series import alike_but_for_timing
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import configuration_label, decimals_for, field_value, with_interval

_SYMBOLS = (
    "on N ranks at a constant batch per rank; at a constant global batch the computed part shrinks with it. T₁: step "
    "on "
    "one rank; W(N): all-reduce of the gradients according to the sweep; E[largest of N]: of standard normal values; "
    "host, wait and exposed buckets: from the communication breakdown, whose wait grows like E[largest of N], or is "
    "constant if the slowest rank is always the same; other letters: parameters."
)
_SERIES = Column(
    "series",
    "series",
    "number of a set of configurations that differ only in the number of ranks, at a constant batch; see the "
    "parameters of its law under the same number.",
    decimals=0,
)
_HELD = Column("held", "constant batch", "batch per rank or global batch, equal for all numbers of ranks of a series.")
_ERROR_NOTE = "the laws are fitted and weighted without the largest number of ranks and then predict it"


def predictions(analysis: ReportInputs) -> Table:
    """Tabulate predictions for twice and four times the measured ranks."""
    models = analysis.models
    if not models:
        return forecast_table(analysis, models, pd.DataFrame())
    largest = max(model.series.sizes[-1] for model in models)
    forecasts = forecast(analysis, [largest * factor for factor in FORECAST_FACTORS])
    table = forecast_table(analysis, models, forecasts.rows)
    return replace(table, note=" ".join([table.note, *forecasts.notes, *forecasts.details]))


def outlook_table(analysis: Analysis, models: list[ScalingModel], rows: pd.DataFrame) -> Table:
    """Tabulate the rows of a `forecast.Forecast` in a few columns: one row per number of ranks and series."""
    ranks = study_ranks(analysis)
    by_number = {model.number: model for model in models}
    frame = rows.sort_values(["world_size", "series"], kind="stable", ignore_index=True)
    frame["label"] = [series_label(analysis, models, by_number[number]) for number in frame["series"]]
    columns = (
        Column("world_size", ranks[1], decimals=0),
        Column("label", "configuration"),
        Column("step_s", "step (ms)", scale=1e3, interval=True, instead="caveat"),
        Column("efficiency", "efficiency (%)", scale=100, decimals=1, interval=True),
        Column("held_out_error", "held-out error (%)", scale=100, decimals=1),
        Column("cost_per_million_samples", "cost / 10⁶ samples", decimals=3),
    )
    return Table("Predicted, not measured (95 % intervals of a new run)", columns, frame).shown()


def series_label(analysis: Analysis, models: list[ScalingModel], model: ScalingModel) -> str:
    """Return the batch of a series and those of the varying fields that it has."""
    ranks = study_ranks(analysis)
    excluded = ("world_size", "nodes", "batch_per_gpu", *_redundant_timing(analysis, models))
    fields = model.series.fields
    unset = {"interconnect": "auto"}
    names = [
        name for name in analysis.axes if name not in excluded and fields.get(name) not in (None, "", unset.get(name))
    ]
    return ", ".join(part for part in (held_batch(model, ranks), configuration_label(fields, names, ranks)) if part)


def _redundant_timing(analysis: Analysis, models: list[ScalingModel]) -> list[str]:
    return alike_but_for_timing([model.series for model in models], analysis.fields.timing)


def forecast_table(analysis: Analysis, models: list[ScalingModel], rows: pd.DataFrame) -> Table:
    """Tabulate the rows of a `forecast.Forecast`."""
    ranks = study_ranks(analysis)
    excluded = (
        *_redundant_timing(analysis, models),
        "nodes",
        "batch_per_gpu",
        "interconnect",
    )
    axes = [column for column in axis_columns(analysis) if column.name not in excluded]
    columns = [
        _SERIES,
        _HELD,
        *axes,
        Column("link", "interconnect", "measured, or stated by the user."),
        Column("law", "heaviest law", "the law with the largest weight; see the parameters under the same number."),
        Column(
            "step_s",
            "step time (ms)",
            "predicted, not measured [95 % prediction interval of a new run, or why there is none].",
            1e3,
            interval=True,
            instead="caveat",
        ),
        Column("throughput_samples_per_s", "throughput (samples/s)", "global batch / predicted step time."),
        Column(
            "efficiency_percent",
            "efficiency (%)",
            f"predicted throughput per {ranks[0]} / measured throughput per {ranks[0]} on the fewest {ranks[1]} [95 % "
            "prediction interval].",
            decimals=1,
            interval=True,
        ),
        Column(
            "measured_step_ms",
            "measured (ms)",
            "step time on this number of ranks, not used for the prediction.",
        ),
        Column(
            "held_out_percent",
            "held-out error (%)",
            f"predicted / measured - 1 if {_ERROR_NOTE}.",
            decimals=1,
        ),
        Column(
            "naive_percent",
            "naive error (%)",
            "error of the naive prediction (throughput of the fewest ranks × N) at the same point.",
            decimals=1,
        ),
        Column("cost_per_million_samples", "cost / 10⁶ samples", "in the currency of the price.", decimals=3),
        Column(
            "energy_wh_per_million_samples",
            "Wh / 10⁶ samples",
            "power per GPU on the most measured ranks × predicted GPU-hours.",
            decimals=1,
        ),
    ]
    frame = _labelled(analysis, models, rows, ranks)
    if frame.empty:
        frame = pd.DataFrame(columns=[name for column in columns for name in (column.name,)])
    empty = [column.name for column in axes if len(frame) and frame[column.name].isin([""]).all()]
    columns = [column for column in columns if column.name not in empty]
    if set(frame["link"]) <= {"auto"}:
        columns = [column for column in columns if column.name != "link"]
    return Table(
        "Predictions (not measured)",
        tuple(columns),
        frame,
        "Laws are fitted to each series, weighted and extrapolated to more ranks. Nothing in this table is measured "
        "unless marked as such.",
        blocks=("series",),
    )


def _labelled(
    analysis: Analysis, models: list[ScalingModel], rows: pd.DataFrame, ranks: tuple[str, str]
) -> pd.DataFrame:
    frame = rows.copy()
    if frame.empty:
        return frame
    by_number = {model.number: model for model in models}
    series = [by_number[number] for number in frame["series"]]
    for name in {name for model in models for name in model.series.fields if name not in frame}:
        frame[name] = [model.series.fields.get(name) for model in series]
    frame["held"] = [held_batch(model, ranks) for model in series]
    frame["trial_ids"] = [_trial_ids(analysis, [model]) for model in series]
    frame["link"] = [
        link if link.startswith("stated") else field_value("interconnect", link) for link in frame["interconnect"]
    ]
    frame["law"] = [model.chosen.law.title for model in series]
    for end in ("", "_low", "_high"):
        frame[f"efficiency_percent{end}"] = 100 * frame[f"efficiency{end}"]
    frame["held_out_percent"] = 100 * frame["held_out_error"].astype(float)
    frame["naive_percent"] = 100 * frame["naive_error"].astype(float)
    frame["measured_step_ms"] = 1e3 * frame["measured_step_s"].astype(float)
    return frame


def _trial_ids(analysis: Analysis, members: list[ScalingModel]) -> tuple[str, ...]:
    """Return the distinct trials that the laws of these series are fitted to."""
    points = pd.concat([model.series.points["configuration"] for model in members])
    return tuple(dict.fromkeys(analysis.configurations.loc[points, "trial_ids"].explode()))


def laws(analysis: ReportInputs) -> Table:
    """Tabulate every candidate law with its error on held-out points, including those not chosen."""
    models = analysis.models
    rows: list[dict[str, Any]] = []
    keys = dict.fromkeys((model.series.interconnect, model.series.scaling) for model in models)
    for interconnect, scaling in keys:
        members = [m for m in models if (m.series.interconnect, m.series.scaling) == (interconnect, scaling)]
        tests = pd.concat([model.law_table() for model in members])
        trial_ids = _trial_ids(analysis, members)
        common = {"interconnect": interconnect, "scaling": scaling, "trial_ids": trial_ids}
        for name, law_tests in tests.groupby("law", sort=False):
            law = LAWS[str(name)]
            reasons = law_tests["reason"].dropna().tolist()
            rows.append(
                common
                | {"law": law.title, "formula": law.formula, "weight": law_tests["weight"].mean()}
                | {"fitted": int(law_tests["residual"].notna().sum()), "residual": 100 * law_tests["residual"].median()}
                | {"reason": reasons[0] if reasons else None}
                | _errors(law_tests["held_out_error"])
            )
        of_models = pd.DataFrame(
            {name: [getattr(m, name) for m in members] for name in ("held_out_error", "naive_error")}
        )
        for title, formula, error in (
            ("average", "weighted, as used for predictions", "held_out_error"),
            ("naive", "throughput × N, for comparison", "naive_error"),
        ):
            rows.append(
                common
                | {"law": title, "formula": formula, "weight": np.nan, "fitted": len(members), "residual": np.nan}
                | {"reason": None}
                | _errors(of_models[error])
            )
    frame = pd.DataFrame(rows)
    if len(frame):
        frame = frame.sort_values(["interconnect", "scaling", "order"], kind="stable")
    columns = (
        Column(
            "interconnect",
            "interconnect",
            "auto: chosen by NCCL or gloo.",
        ),
        Column("scaling", "scaling", "weak: constant batch per rank; strong: constant global batch."),
        Column("law", "law", "name of the law; average: of all laws, weighted; naive: throughput x N."),
        Column("formula", "step time", _SYMBOLS),
        Column(
            "weight",
            "weight",
            "Akaike weight, mean of the series: how well the law agrees with the points, and with the parts of the "
            "communication breakdown.",
            decimals=2,
        ),
        Column("fitted", "series fitted", "series whose points the law could be fitted to.", decimals=0),
        Column("held_out", "held out", f"series in which {_ERROR_NOTE}.", decimals=0),
        Column(
            "mean_error",
            "mean error (%)",
            "mean |predicted / measured - 1| over these series.",
            decimals=1,
        ),
        Column(
            "largest_error", "largest error (%)", "the largest |predicted / measured - 1| of any series.", decimals=1
        ),
        Column(
            "residual", "residual (%)", "root mean square error at the fitted points; median of the series.", decimals=2
        ),
        Column("reason", "note", "why the law was not fitted or tested, in the first such series."),
    )
    if frame.empty:
        frame = pd.DataFrame(columns=[column.name for column in columns])
    return Table("Candidate laws for the predictions", columns, frame, blocks=("interconnect", "scaling"))


def _errors(errors: pd.Series) -> dict[str, Any]:
    """Return number, mean and largest of the absolute errors in percent, and the order of rows by the mean."""
    percent = 100 * errors.astype(float).abs()
    count = int(percent.notna().sum())
    mean = percent.mean()
    return {"held_out": count, "mean_error": mean, "largest_error": percent.max(), "order": mean if count else np.inf}


def law_parameters(analysis: ReportInputs) -> Table:
    """Tabulate the heaviest law of each series with its parameters, fitted to all points."""
    models = analysis.models
    ranks = study_ranks(analysis)
    rows = [
        model.series.fields
        | {
            "series": model.number,
            "held": held_batch(model, ranks),
            "sizes": ", ".join(map(str, model.series.sizes)),
            "law": model.chosen.law.title,
            "parameters": parameters_text(model),
            "weight": model.weights[model.law],
            "trial_ids": _trial_ids(analysis, [model]),
        }
        for model in models
    ]
    excluded = (
        *_redundant_timing(analysis, models),
        "world_size",
        "nodes",
        "batch_per_gpu",
    )
    varying = [column for column in axis_columns(analysis, last=()) if column.name not in excluded]
    columns = (
        _SERIES,
        _HELD,
        *varying,
        Column("sizes", ranks[1], "measured numbers, which the law is fitted to."),
        Column("law", "heaviest law", "see the table of candidate laws for its formula."),
        Column("weight", "weight", "its Akaike weight.", decimals=2),
        Column(
            "parameters",
            "parameters",
            "[95 % interval: Student's t by the delta method, within the parameter's bounds].",
        ),
    )
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[column.name for column in columns])
    return Table("Parameters of the heaviest laws", columns, frame)


def parameters_text(model: ScalingModel) -> str:
    """Return the parameters of the heaviest law: names, values in ms or without unit, and intervals."""
    parts = []
    bounds = model.chosen.intervals()
    for parameter, value, (low, high) in zip(model.chosen.law.parameters, model.chosen.values, bounds, strict=True):
        scale, unit = (1e3, " ms") if parameter.unit == "s" else (1.0, "")
        decimals = min(4, decimals_for(pd.Series([value * scale]))) if value else 0
        parts.append(f"{parameter.name} {with_interval(value * scale, low * scale, high * scale, decimals)}{unit}")
    return "; ".join(parts)
