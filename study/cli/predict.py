"""The `predict` command: predictions from a results folder, the laws behind them, and the next steps."""

import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.predict.forecast import Forecast, forecast
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.predict.model import ScalingModel
from analysis.predict.next_trial import next_trial
from analysis.read.results import load
from analysis.read.study_record import GOALS
from analysis.report.summary import left_out
from analysis.tables.predictions import forecast_table, law_parameters, laws
from analysis.verdict.next_steps import best, sentence
from study.errors import ConfigurationError


@dataclass(frozen=True)
class Outlook:
    """Tables (title, headers, rows of strings) and lines for people, and the same as JSON values."""

    tables: list[tuple[str, list[str], list[tuple[str, ...]]]]
    lines: list[str]
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
    trial = next_trial(analysis, predicted.models, max(sizes))
    advice = [
        sentence(analysis, trial),
        *(best(analysis, name) for name in ([goal] if goal else ("throughput", "cost"))),
    ]
    omitted = left_out(analysis, others)
    shown = (forecast_table(analysis, predicted.models, predicted.rows), laws(analysis), law_parameters(analysis))
    tables = []
    for table in shown:
        cells = table.cells()
        tables.append((table.title, list(cells.columns), [tuple(row) for row in cells.itertuples(index=False)]))
    return Outlook(
        tables,
        [*predicted.notes, *([omitted] if omitted else []), *advice],
        _as_json(analysis, predicted, trial, advice),
    )


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
        "notes": predicted.notes,
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
        "why": model.why,
        "parameters": [
            _plain({"name": parameter.name, "unit": parameter.unit, "value": value, "interval": list(bound)})
            for parameter, value, bound in zip(model.chosen.law.parameters, model.chosen.values, bounds, strict=True)
        ],
        "held_out": _records(model.held_out.drop(columns="series")),
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
