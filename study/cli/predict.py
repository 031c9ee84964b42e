"""The `predict` command: predictions from a results folder, and with options the laws and details behind them."""

import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.predict.forecast import NETWORK, Forecast, forecast
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.predict.model import ScalingModel
from analysis.predict.next_trial import next_trial
from analysis.read.results import load
from analysis.read.study_record import GOALS
from analysis.report.summary import left_out
from analysis.tables.predictions import forecast_table, law_parameters, laws, outlook_table
from analysis.tables.table import Table
from analysis.verdict.next_steps import best, best_predicted, sentence
from study.errors import ConfigurationError

MARK = "*"
"""marks predictions beyond one node"""

_LONG_NAMES = re.compile(r"(batch \d+) per (?:GPU|CPU rank)|(?<=\d )loader (?=worker)")
"""The answer above the table has these names in full."""

ShownTable = tuple[str, list[str], list[tuple[str, ...]]]


@dataclass(frozen=True)
class Outlook:
    """Tables (title, headers, rows of strings) and lines for people, and the same as JSON values.

    answer: the best predicted configurations. tables and lines: the predictions, and what to do next. details,
    detail_lines: the complete table of predictions and further notes. laws: the candidate laws and their parameters.
    """

    answer: list[str]
    tables: list[ShownTable]
    lines: list[str]
    details: list[ShownTable]
    detail_lines: list[str]
    laws: list[ShownTable]
    as_json: dict[str, Any]


def outlook(
    directory: str, gpus: str, interconnect: str | None, price_per_gpu_hour: float | None, goal: str | None
) -> Outlook:
    """Predict the step time, efficiency and cost on `gpus` GPUs (a comma list).

    Price and goal default to those of the study. Raises ConfigurationError, ResultsError or PredictionError.
    """
    sizes = _sizes(gpus)
    if goal is not None and goal not in GOALS:
        raise ConfigurationError(f"--goal {goal!r} is not known; allowed: {', '.join(GOALS)}")
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < math.inf:
        raise ConfigurationError(f"--price-per-gpu-hour must be >= 0, got {price_per_gpu_hour:g}")
    analysis, *others = report_inputs(load(directory))
    goal = goal or analysis.record.goal
    price = analysis.record.price_per_gpu_hour if price_per_gpu_hour is None else price_per_gpu_hour
    predicted = forecast(analysis, sizes, interconnect, price, directory)
    with_interval = predicted.rows.loc[predicted.rows["step_s_low"].notna(), "world_size"]
    trial = next_trial(analysis, predicted.models, None if with_interval.empty else int(with_interval.max()))
    if goal == "time-to-accuracy":
        answer = [f"Measured, not predicted: {best(analysis, goal)}"]
    else:
        answer = best_predicted(analysis, predicted.rows, goal or "throughput")
    advice = [*answer, sentence(analysis, trial)]
    caveats = [f"{MARK} {note}" if note.startswith(NETWORK) else note for note in predicted.notes]
    notes = [*caveats, *filter(None, [left_out(analysis, others)]), advice[-1]]
    if price is not None:
        notes.insert(0, f"cost: at {price:g} per GPU-hour, in the currency of that price.")
    return Outlook(
        answer,
        [_shortened(_shown(outlook_table(analysis, predicted.models, predicted.rows)))],
        notes,
        [_shown(forecast_table(analysis, predicted.models, predicted.rows))],
        predicted.details,
        [_shown(laws(analysis)), _shown(law_parameters(analysis))],
        _as_json(analysis, predicted, trial, advice),
    )


def _shown(table: Table) -> ShownTable:
    cells = table.cells()
    return table.title, list(cells.columns), [tuple(row) for row in cells.itertuples(index=False)]


def _shortened(table: ShownTable) -> ShownTable:
    """Return the table with short names, and a mark instead of the longest caveat, which a line below explains."""
    title, columns, rows = table

    def short(cell: str) -> str:
        return _LONG_NAMES.sub(r"\1", cell).replace(f" [{NETWORK}]", MARK)

    return title, columns, [tuple(map(short, row)) for row in rows]


def _sizes(gpus: str) -> list[int]:
    parts = [part.strip() for part in gpus.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}", part) for part in parts):
        raise ConfigurationError(f"--gpus {gpus!r}: allowed: numbers from 1 to 999999, separated by commas")
    return sorted({int(part) for part in parts})


def _as_json(analysis: ReportInputs, predicted: Forecast, trial: Any, advice: list[str]) -> dict[str, Any]:
    return {
        "label": "predicted, not measured",
        "series": [_series(model) for model in predicted.models],
        "predictions": _records(predicted.rows),
        "laws": _records(laws(analysis).frame.drop(columns="order", errors="ignore")),
        "notes": [*predicted.notes, *predicted.details],
        "next_trial": _plain(trial.__dict__) if trial else None,
        "advice": advice,
    }


def _series(model: ScalingModel) -> dict[str, Any]:
    bounds = model.chosen.intervals()
    return {
        "series": model.number,
        "scaling": model.series.scaling,
        "fields": _plain(model.series.fields),
        "world_sizes": model.series.sizes,
        "law": model.law,
        "formula": model.chosen.law.formula,
        "weights": dict(model.weights),
        "run_spread": math.sqrt(model.run_spread.variance),
        "parameters": [
            _plain({"name": parameter.name, "unit": parameter.unit, "value": value, "interval": list(bound)})
            for parameter, value, bound in zip(model.chosen.law.parameters, model.chosen.values, bounds, strict=True)
        ],
        "held_out_error": _plain({"error": model.held_out_error})["error"],
        "laws": _records(model.law_table().drop(columns="series")),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [_plain(row) for row in frame.to_dict("records")]


def _plain(row: dict[Any, Any]) -> dict[str, Any]:
    """Return JSON values. Unknown values are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        value = value.item() if hasattr(value, "item") else value
        return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value

    return {str(name): plain(value) for name, value in row.items()}
