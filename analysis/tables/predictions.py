"""Tables of what was predicted, each labelled so: nothing in them was measured where it says predicted."""

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
    "of N ranks, where the batch per rank is held; where the global batch is, what is computed shrinks with it. T₁: step on one "
    "rank; b: batch per rank; W(N): all-reduce of the gradients by the sweep; E[largest of N]: of standard normal values; host, "
    "wait and exposed buckets: as the account has them; other letters: parameters of the law."
)
_SERIES = Column(
    "series",
    "series",
    "number of a set of configurations that differ in the number of ranks, with one batch held; its law's parameters have the same number.",
    decimals=0,
)
_HELD = Column(
    "held", "held", "what is the same for all numbers of ranks of a series: the batch per rank, or the global one."
)
_ERROR_NOTE = "the largest number of ranks is left out, the law fitted to the rest and asked about it"
_KINDER = (
    "The law is chosen by this very error, so the chosen law's is a little kinder than on a point that took no part."
)


def predictions(analysis: ReportInputs) -> Table:
    """Twice and four times the ranks of each series."""
    found = analysis.models
    if not found:
        return forecast_table(analysis, found, pd.DataFrame())
    largest = max(model.series.sizes[-1] for model in found)
    made = forecast(analysis, [largest * factor for factor in FORECAST_FACTORS])
    table = forecast_table(analysis, found, made.rows)
    return replace(table, note=" ".join([table.note, *made.notes]))


def forecast_table(analysis: Analysis, found: list[ScalingModel], rows: pd.DataFrame) -> Table:
    """The rows of `forecast.Forecast` as people read them."""
    ranks = study_ranks(analysis)
    aside = (
        *alike_but_for_timing([model.series for model in found], analysis.fields.timing),
        "nodes",
        "batch_per_gpu",
        "interconnect",
    )
    axes = [column for column in axis_columns(analysis) if column.name not in aside]
    columns = [
        _SERIES,
        _HELD,
        *axes,
        Column("link", "interconnect", "measured, or stated by whoever asked.", optional=True),
        Column(
            "kind",
            "kind",
            "predicted; or measured, no prediction: this number of ranks was measured, and the others are too few to fit a law to.",
        ),
        Column("law", "law", "the one chosen for the series.", optional=True),
        Column(
            "step_s", "step time (ms)",
            f"[95 % prediction interval of a new run], too wide to use where it reaches beyond a factor of {WIDEST:g}.",
            1e3, interval=True, too_wide="too_wide",
        ),
        Column("throughput_samples_per_s", "throughput (samples/s)", "global batch / predicted step time.", optional=True),
        Column(
            "efficiency_percent",
            "efficiency (%)",
            f"predicted throughput a {ranks[0]} / that measured on the fewest {ranks[1]} [95 % prediction interval].",
            decimals=1,
            interval=True,
            too_wide="too_wide",
        ),
        Column("measured_step_ms", "measured (ms)", "step time on as many ranks, which the prediction did not see.", optional=True),
        Column("held_out_percent", "held-out error (%)", f"predicted / measured - 1 where {_ERROR_NOTE}. {_KINDER}", decimals=1),
        Column("naive_percent", "naive error (%)", "at the same point, of the throughput of the fewest ranks x N.", decimals=1),
        Column("cost_per_million_samples", "cost / 10⁶ samples", "in the currency of the price.", decimals=3, optional=True),
        Column("energy_wh_per_million_samples", "Wh / 10⁶ samples", "a GPU's power in training on the most ranks measured x predicted GPU-hours.", decimals=1, optional=True),
    ]  # fmt: skip
    frame = _labelled(analysis, found, rows, ranks)
    if frame.empty:
        frame = pd.DataFrame(columns=[name for column in columns for name in (column.name,)])
    empty = [column.name for column in axes if len(frame) and frame[column.name].isin([""]).all()]
    columns = [column for column in columns if column.name not in empty]
    if set(frame["link"]) <= {"auto"}:
        columns = [column for column in columns if column.name != "link"]
    return Table(
        "Predictions: predicted, not measured",
        tuple(columns),
        frame,
        "Nothing in this table was measured, but where it says so: a law is fitted to each series, and asked about more ranks.",
        blocks=("series",),
    )


def _labelled(
    analysis: Analysis, found: list[ScalingModel], rows: pd.DataFrame, ranks: tuple[str, str]
) -> pd.DataFrame:
    frame = rows.copy()
    if frame.empty:
        return frame
    by_number = {model.number: model for model in found}
    series = [by_number[number] for number in frame["series"]]
    for name in {name for model in found for name in model.series.fields if name not in frame}:
        frame[name] = [model.series.fields.get(name) for model in series]
    frame["held"] = [held_batch(model, ranks) for model in series]
    frame["trial_ids"] = [_trial_ids(analysis, [model]) for model in series]
    frame["link"] = [
        link if link.startswith("stated") else field_value("interconnect", link) for link in frame["interconnect"]
    ]
    frame["kind"] = ["predicted" if flag else "measured, no prediction" for flag in frame["predicted"]]
    frame["law"] = [
        model.fits[law].law.title if isinstance(law, str) else None for model, law in zip(series, frame["law"])
    ]
    for end in ("", "_low", "_high"):
        frame[f"efficiency_percent{end}"] = 100 * frame[f"efficiency{end}"]
    frame["held_out_percent"] = 100 * frame["held_out_error"].astype(float)
    frame["naive_percent"] = 100 * frame["naive_error"].astype(float)
    frame["measured_step_ms"] = 1e3 * frame["measured_step_s"].astype(float)
    return frame


def _trial_ids(analysis: Analysis, members: list[ScalingModel]) -> tuple[str, ...]:
    """The trials whose steps the laws of these series are fitted to, each once."""
    points = pd.concat([model.series.points["configuration"] for model in members])
    return tuple(dict.fromkeys(analysis.configurations.loc[points, "trial_ids"].explode()))


def laws(analysis: ReportInputs) -> Table:
    """Every law that was tried, with its error on held-out points: also those that were not chosen."""
    found = analysis.models
    rows: list[dict[str, Any]] = []
    keys = dict.fromkeys((model.series.interconnect, model.series.scaling) for model in found)
    for interconnect, scaling in keys:
        members = [m for m in found if (m.series.interconnect, m.series.scaling) == (interconnect, scaling)]
        tests = pd.concat([model.held_out for model in members])
        trial_ids = _trial_ids(analysis, members)
        for name, of_law in tests.groupby("law", sort=False):
            fitted = [model.fits[str(name)] for model in members]
            errors = 100 * of_law["held_out_error"].abs()
            reasons = of_law["reason"].dropna().tolist()
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
                    "residual": 100 * of_law["residual"].median(),
                    "chosen": int((of_law["chosen"]).sum()),
                    "reason": reasons[0] if reasons else None,
                    "order": errors.mean() if errors.notna().any() else np.inf,
                    "trial_ids": trial_ids,
                }
            )
        naive = 100 * tests.drop_duplicates("series")["naive_error"].abs()
        rows.append(
            {
                "interconnect": interconnect, "scaling": scaling, "law": "naive", "formula": "throughput x N",
                "fitted": len(members), "held_out": int(naive.notna().sum()), "mean_error": naive.mean(),
                "largest_error": naive.max(), "residual": np.nan, "chosen": 0, "reason": "a yardstick, never chosen",
                "order": naive.mean() if naive.notna().any() else np.inf, "trial_ids": trial_ids,
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows)
    if len(frame):
        frame = frame.sort_values(["interconnect", "scaling", "order"], kind="stable")
    columns = (
        Column("interconnect", "interconnect", "auto: what NCCL or gloo chooses itself. Series over one interconnect share the choice."),
        Column("scaling", "scaling", "weak: the batch per rank is held; strong: the global batch is."),
        Column("law", "law", "name of the law; naive: the throughput of the fewest ranks grows with their number."),
        Column("formula", "step time", _SYMBOLS),
        Column("chosen", "chosen for", "series; the least mean of |log(predicted / measured)| decides where there are held-out points.", decimals=0),
        Column("fitted", "series fitted", "series to all of whose points the law could be fitted.", decimals=0),
        Column("held_out", "held out", f"series in which {_ERROR_NOTE}.", decimals=0),
        Column("mean_error", "mean error (%)", f"of |predicted / measured - 1| over these. {_KINDER}", decimals=1),
        Column("largest_error", "largest error (%)", "the same, of the series where it is largest.", decimals=1),
        Column("residual", "residual (%)", "what the law leaves of the points that it was fitted to, root mean square; median of the series.", decimals=2),
        Column("reason", "note", "why the law was not fitted or not tested, in the first series where it was not.", optional=True),
    )  # fmt: skip
    if frame.empty:
        frame = pd.DataFrame(columns=[column.name for column in columns])
    return Table("Laws tried for the predictions", columns, frame, blocks=("interconnect", "scaling"))


def law_parameters(analysis: ReportInputs) -> Table:
    """The law of each series with its parameters, fitted to all of its points."""
    found = analysis.models
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
        for model in found
    ]
    aside = (
        *alike_but_for_timing([model.series for model in found], analysis.fields.timing),
        "world_size",
        "nodes",
        "batch_per_gpu",
    )
    varying = [column for column in axis_columns(analysis, last=()) if column.name not in aside]
    columns = (
        _SERIES,
        _HELD,
        *varying,
        Column("sizes", ranks[1], "numbers of them that were measured, to which the law is fitted."),
        Column("law", "law", "its formula is in the table of the laws tried."),
        Column("parameters", "parameters", "[95 % interval: Student's t by the delta method, within the parameter's bounds]."),
        Column("why", "chosen for", "what decided for this law."),
    )  # fmt: skip
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[column.name for column in columns])
    return Table("Parameters of the chosen laws", columns, frame)


def parameters_text(model: ScalingModel) -> str:
    """The chosen law's parameters: names, values in ms or without unit, and intervals."""
    parts = []
    bounds = model.chosen.intervals()
    for parameter, value, (low, high) in zip(model.chosen.law.parameters, model.chosen.values, bounds, strict=True):
        scale, unit = (1e3, " ms") if parameter.unit == "s" else (1.0, "")
        decimals = min(4, decimals_for(pd.Series([value * scale]))) if value else 0
        parts.append(f"{parameter.name} {with_interval(value * scale, low * scale, high * scale, decimals)}{unit}")
    return "; ".join(parts)
