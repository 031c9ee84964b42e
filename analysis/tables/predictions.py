"""Tables of predictions; every predicted value is labelled as such."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.predict.fit import Fit
from analysis.predict.forecast import FORECAST_FACTORS, forecast, held_batch
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import WIDEST, ScalingModel
from analysis.predict.series import alike_but_for_timing
from analysis.study import Analysis, study_ranks
from analysis.tables.table import Column, Table, axis_columns
from analysis.text import decimals_for, field_value, with_interval

_SYMBOLS = (
    "on N ranks at a constant batch per rank; at a constant global batch the computed part shrinks with it. T₁: step "
    "on "
    "one rank; b: batch per rank; W(N): all-reduce of the gradients according to the sweep; E[largest of N]: of "
    "standard "
    "normal values; host, wait and exposed buckets: from the communication breakdown; other letters: parameters."
)
_SERIES = Column(
    "series",
    "series",
    "number of a set of configurations that differ only in the number of ranks, at a constant batch; see the "
    "parameters of its law under the same number.",
    decimals=0,
)
_HELD = Column("held", "constant batch", "batch per rank or global batch, equal for all numbers of ranks of a series.")
_ERROR_NOTE = "the law is fitted without the largest number of ranks and then predicts it"
_OPTIMISM = "The law is chosen by this error, so it is slightly optimistic for the chosen law."


def predictions(analysis: ReportInputs) -> Table:
    """Tabulate predictions for twice and four times the measured ranks."""
    models = analysis.models
    if not models:
        return forecast_table(analysis, models, pd.DataFrame())
    largest = max(model.series.sizes[-1] for model in models)
    forecasts = forecast(analysis, [largest * factor for factor in FORECAST_FACTORS])
    table = forecast_table(analysis, models, forecasts.rows)
    return replace(table, note=" ".join([table.note, *forecasts.notes]))


def forecast_table(analysis: Analysis, models: list[ScalingModel], rows: pd.DataFrame) -> Table:
    """Tabulate the rows of a `forecast.Forecast`."""
    ranks = study_ranks(analysis)
    excluded = (
        *alike_but_for_timing([model.series for model in models], analysis.fields.timing),
        "nodes",
        "batch_per_gpu",
        "interconnect",
    )
    axes = [column for column in axis_columns(analysis) if column.name not in excluded]
    columns = [
        _SERIES,
        _HELD,
        *axes,
        Column("link", "interconnect", "measured, or stated by the user.", optional=True),
        Column(
            "kind",
            "kind",
            "predicted; or measured, no prediction: this number of ranks was measured, and the others are too few to "
            "fit a law.",
        ),
        Column("law", "law", "the law chosen for the series.", optional=True),
        Column(
            "step_s",
            "step time (ms)",
            f"[95 % prediction interval of a new run]; too wide to use if it exceeds a factor of {WIDEST:g}.",
            1e3,
            interval=True,
            too_wide="too_wide",
        ),
        Column(
            "throughput_samples_per_s", "throughput (samples/s)", "global batch / predicted step time.", optional=True
        ),
        Column(
            "efficiency_percent",
            "efficiency (%)",
            f"predicted throughput per {ranks[0]} / measured throughput per {ranks[0]} on the fewest {ranks[1]} [95 % "
            "prediction interval].",
            decimals=1,
            interval=True,
            too_wide="too_wide",
        ),
        Column(
            "measured_step_ms",
            "measured (ms)",
            "step time on this number of ranks, not used for the prediction.",
            optional=True,
        ),
        Column(
            "held_out_percent",
            "held-out error (%)",
            f"predicted / measured - 1 if {_ERROR_NOTE}. {_OPTIMISM}",
            decimals=1,
        ),
        Column(
            "naive_percent",
            "naive error (%)",
            "error of the naive prediction (throughput of the fewest ranks × N) at the same point.",
            decimals=1,
        ),
        Column(
            "cost_per_million_samples", "cost / 10⁶ samples", "in the currency of the price.", decimals=3, optional=True
        ),
        Column(
            "energy_wh_per_million_samples",
            "Wh / 10⁶ samples",
            "power per GPU on the most measured ranks × predicted GPU-hours.",
            decimals=1,
            optional=True,
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
        "A law is fitted to each series and extrapolated to more ranks. Nothing in this table is measured unless "
        "marked as such.",
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
    frame["kind"] = ["predicted" if flag else "measured, no prediction" for flag in frame["predicted"]]
    frame["law"] = [
        model.fits[law].law.title if isinstance(law, str) else None
        for model, law in zip(series, frame["law"], strict=True)
    ]
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
        tests = pd.concat([model.held_out for model in members])
        trial_ids = _trial_ids(analysis, members)
        for name, law_tests in tests.groupby("law", sort=False):
            fitted = [model.fits[str(name)] for model in members]
            errors = 100 * law_tests["held_out_error"].abs()
            reasons = law_tests["reason"].dropna().tolist()
            rows.append(
                {
                    "interconnect": interconnect,
                    "scaling": scaling,
                    "law": fitted[0].law.title,
                    "formula": fitted[0].law.formula,
                    "fitted": sum(isinstance(fit, Fit) for fit in fitted),
                    "held_out": int(errors.notna().sum()),
                    "mean_error": errors.mean(),
                    "largest_error": errors.max(),
                    "residual": 100 * law_tests["residual"].median(),
                    "chosen": int((law_tests["chosen"]).sum()),
                    "reason": reasons[0] if reasons else None,
                    "order": errors.mean() if errors.notna().any() else np.inf,
                    "trial_ids": trial_ids,
                }
            )
        naive = 100 * tests.drop_duplicates("series")["naive_error"].abs()
        rows.append(
            {
                "interconnect": interconnect,
                "scaling": scaling,
                "law": "naive",
                "formula": "throughput × N",
                "fitted": len(members),
                "held_out": int(naive.notna().sum()),
                "mean_error": naive.mean(),
                "largest_error": naive.max(),
                "residual": np.nan,
                "chosen": 0,
                "reason": "for comparison, never chosen",
                "order": naive.mean() if naive.notna().any() else np.inf,
                "trial_ids": trial_ids,
            }
        )
    frame = pd.DataFrame(rows)
    if len(frame):
        frame = frame.sort_values(["interconnect", "scaling", "order"], kind="stable")
    columns = (
        Column(
            "interconnect",
            "interconnect",
            "auto: chosen by NCCL or gloo. All series over one interconnect use the same law.",
        ),
        Column("scaling", "scaling", "weak: constant batch per rank; strong: constant global batch."),
        Column("law", "law", "name of the law; naive: throughput proportional to the number of ranks."),
        Column("formula", "step time", _SYMBOLS),
        Column(
            "chosen",
            "chosen for",
            "number of series; with held-out points, the law with the smallest mean |log(predicted / measured)| is "
            "chosen.",
            decimals=0,
        ),
        Column("fitted", "series fitted", "series whose points the law could be fitted to.", decimals=0),
        Column("held_out", "held out", f"series in which {_ERROR_NOTE}.", decimals=0),
        Column(
            "mean_error",
            "mean error (%)",
            f"mean |predicted / measured - 1| over these series. {_OPTIMISM}",
            decimals=1,
        ),
        Column(
            "largest_error", "largest error (%)", "the largest |predicted / measured - 1| of any series.", decimals=1
        ),
        Column(
            "residual", "residual (%)", "root mean square error at the fitted points; median of the series.", decimals=2
        ),
        Column("reason", "note", "why the law was not fitted or tested, in the first such series.", optional=True),
    )
    if frame.empty:
        frame = pd.DataFrame(columns=[column.name for column in columns])
    return Table("Candidate laws for the predictions", columns, frame, blocks=("interconnect", "scaling"))


def law_parameters(analysis: ReportInputs) -> Table:
    """Tabulate the law of each series with its parameters, fitted to all points."""
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
            "why": model.why,
            "trial_ids": _trial_ids(analysis, [model]),
        }
        for model in models
    ]
    excluded = (
        *alike_but_for_timing([model.series for model in models], analysis.fields.timing),
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
        Column("law", "law", "see the table of candidate laws for its formula."),
        Column(
            "parameters",
            "parameters",
            "[95 % interval: Student's t by the delta method, within the parameter's bounds].",
        ),
        Column("why", "chosen for", "reason for choosing this law."),
    )
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[column.name for column in columns])
    return Table("Parameters of the chosen laws", columns, frame)


def parameters_text(model: ScalingModel) -> str:
    """Return the parameters of the chosen law: names, values in ms or without unit, and intervals."""
    parts = []
    bounds = model.chosen.intervals()
    for parameter, value, (low, high) in zip(model.chosen.law.parameters, model.chosen.values, bounds, strict=True):
        scale, unit = (1e3, " ms") if parameter.unit == "s" else (1.0, "")
        decimals = min(4, decimals_for(pd.Series([value * scale]))) if value else 0
        parts.append(f"{parameter.name} {with_interval(value * scale, low * scale, high * scale, decimals)}{unit}")
    return "; ".join(parts)
