"""What `predict` tells of a results folder: predictions, the laws tried for them, and what to do next."""

import math
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.load.results import load
from analysis.load.study_record import GOALS
from analysis.predict.forecast import Forecast, forecast
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.predict.model import ScalingModel
from analysis.predict.next_trial import next_trial
from analysis.report.summary import left_out
from analysis.tables.predictions import forecast_table, law_parameters, laws
from analysis.verdict.next_steps import best, sentence
from study.errors import ConfigurationError


@dataclass(frozen=True)
class Outlook:
    """Tables (title, heads, rows of strings) and lines for people, and the same as plain values."""

    tables: list[tuple[str, list[str], list[tuple[str, ...]]]]
    lines: list[str]
    as_json: dict[str, Any]


def outlook(
    directory: str, gpus: str, interconnect: str | None, price_per_gpu_hour: float | None, goal: str | None
) -> Outlook:
    """Predictions for so many GPUs (a comma list). Price and goal left out are those that the study was run with.

    Raises ConfigurationError, ResultsError or PredictionError.
    """
    sizes = _sizes(gpus)
    if goal is not None and goal not in GOALS:
        raise ConfigurationError(f"--goal {goal!r} is not known; allowed: {', '.join(GOALS)}")
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < math.inf:
        raise ConfigurationError(f"--price-per-gpu-hour {price_per_gpu_hour:g}: allowed: 0 or more")
    analysis, *others = report_inputs(load(directory))
    goal = goal or analysis.record.goal
    price = analysis.record.price_per_gpu_hour if price_per_gpu_hour is None else price_per_gpu_hour
    found = forecast(analysis, sizes, interconnect, price, directory)
    trial = next_trial(analysis, found.models, max(sizes))
    advice = [
        sentence(analysis, trial),
        *(best(analysis, name) for name in ([goal] if goal else ("throughput", "cost"))),
    ]
    aside = left_out(analysis, others)
    made = (forecast_table(analysis, found.models, found.rows), laws(analysis), law_parameters(analysis))
    tables = []
    for table in made:
        cells = table.cells()
        tables.append((table.title, list(cells.columns), [tuple(row) for row in cells.itertuples(index=False)]))
    return Outlook(
        tables, [*found.notes, *([aside] if aside else []), *advice], _as_json(analysis, found, trial, advice)
    )


def _sizes(gpus: str) -> list[int]:
    parts = [part.strip() for part in gpus.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}", part) for part in parts):
        raise ConfigurationError(f"--gpus {gpus!r}: allowed: numbers of 1 to 999999, separated by commas")
    return sorted({int(part) for part in parts})


def _as_json(analysis: ReportInputs, found: Forecast, trial: Any, advice: list[str]) -> dict[str, Any]:
    return {
        "label": "predicted, not measured",
        "series": [_series(model) for model in found.models],
        "predictions": _records(found.rows),
        "laws": _records(laws(analysis).frame.drop(columns="order", errors="ignore")),
        "notes": found.notes,
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
    """Values as JSON has them; what is not known is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        value = value.item() if hasattr(value, "item") else value
        return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value

    return {str(name): plain(value) for name, value in row.items()}
