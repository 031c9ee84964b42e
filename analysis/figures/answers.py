"""Figures of the study's answer: work done by the ranks, where ranks are lost, and what a change would gain."""

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from analysis.compare.causes import visible_causes
from analysis.compare.scaling import STRONG
from analysis.figures.predictions import is_predicted
from analysis.figures.style import (
    COLOURS,
    GRID,
    INK,
    NARROW_INCHES,
    STYLE,
    TEXT,
    LineEnd,
    filled,
    hollow,
    is_narrow,
    label_ends,
    legend,
    wrapped,
)
from analysis.predict.forecast import FORECAST_FACTORS, ranks_per_node
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import ScalingModel, predict
from analysis.study import Analysis, study_ranks
from analysis.text import cause_label, configuration_label, field_label, lost_decimals, number, value_label

_BAR_INCHES = 0.34
_MOST_BARS = 8


def work(analysis: ReportInputs) -> Figure | None:
    """Work of all ranks as a number of ideal ranks: measured (band: 95 % interval).

    Dashed: ideal (black), and predicted where a prediction is possible.
    """
    if analysis.headline is None:
        return None
    rows = work_rows(analysis)
    measured = rows[rows["kind"] == "measured"]
    if len(measured) < 2:
        return None
    ranks = study_ranks(analysis)
    predicted = pd.concat([measured.tail(1), rows[rows["kind"] == "predicted"]])
    colour = COLOURS[0]
    sizes = sorted(rows["world_size"].unique())
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axis = _single_panel(3.1)
        ends = [sizes[0], sizes[-1]]
        axis.plot(ends, ends, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        for part, style in ((measured, "-"), (predicted, (0, (3, 2)))):
            axis.plot(part["world_size"], part["work"], color=colour, linestyle=style, linewidth=1.8)
            known = part.dropna(subset="work_low")
            known = pd.concat([part.head(1), known]).drop_duplicates("world_size")
            low, high = (known[f"work_{end}"].fillna(known["work"]) for end in ("low", "high"))
            axis.fill_between(known["world_size"], low, high, color=colour, alpha=0.18, linewidth=0)
        is_open = measured["is_open"].astype(bool)
        known = measured[~is_open]
        axis.plot(known["world_size"], known["work"], "o", color=colour, markersize=6)
        hollow(axis, measured["world_size"][is_open], measured["work"][is_open], colour, "o")
        for scale in (axis.set_xscale, axis.set_yscale):
            scale("log", base=2)
        lowest, highest = _limits(rows, sizes)
        halves = [sizes[0] / 2**power for power in range(1, 1 + int(math.log2(sizes[0] / lowest)))]
        for side, ticks in ((axis.xaxis, sizes), (axis.yaxis, [*halves, *sizes])):
            side.set_major_locator(FixedLocator([float(tick) for tick in ticks]))
            side.set_minor_locator(NullLocator())
            side.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_ylim(lowest, highest)
        labels = [LineEnd(sizes[-1], sizes[-1], "ideal")]
        for _, point in measured.iloc[1:].iterrows():
            shown = "not resolved" if point["is_open"] else number(point["work"], 2 if point["work"] < 10 else 1)
            if point["world_size"] == sizes[-1]:
                labels.append(LineEnd(sizes[-1], point["work"], f"measured: {shown}"))
                continue
            axis.annotate(
                shown, (point["world_size"], point["work"]), xytext=(4, -11), textcoords="offset points",
                fontweight="bold",
            )  # fmt: skip
        if len(predicted) > 1:
            last = predicted.iloc[-1]
            labels.append(LineEnd(sizes[-1], last["work"], f"predicted: {number(last['work'], 1)}"))
        label_ends(axis, labels)
        axis.set_xlabel(field_label("world_size", ranks))
        axis.set_ylabel(f"work, in {ranks[1]}")
        axis.set_title(wrapped(_series_label(analysis), 1), loc="left")
    return figure


def _limits(rows: pd.DataFrame, sizes: list[int]) -> tuple[float, float]:
    """Return limits of the work that show all points, and intervals up to a factor of 2 beyond.

    Below the smallest size, they leave room for a tick and for the number under a point.
    """
    work, low, high = (rows[f"work{end}"].astype(float) for end in ("", "_low", "_high"))
    lowest = float(pd.concat([work, low.clip(lower=work.min() / 2)]).min())
    if lowest < sizes[0]:
        lowest = min(lowest / 1.2, 2.0 ** math.floor(math.log2(lowest)))
    highest = float(pd.concat([1.05 * high.clip(upper=2.0 * sizes[-1]), work]).max())
    return lowest / 1.15, max(1.2 * sizes[-1], highest)


def headline_label(analysis: Analysis) -> str:
    """Return the varying fields of the headline configuration, without the number of ranks."""
    return configuration_label(analysis.headline_row, _varying(analysis), study_ranks(analysis))


def _series_label(analysis: Analysis) -> str:
    """Return the varying fields that all points of `work` share; with a fixed global batch, this batch too."""
    series, names = _own_series(analysis), _varying(analysis)
    if (series["scaling"] == STRONG).any():
        points = analysis.configurations.loc[series["configuration"]]
        names = [*(name for name in names if points[name].nunique(dropna=False) == 1), "global_batch"]
    return configuration_label(analysis.headline_row, names, study_ranks(analysis))


def _varying(analysis: Analysis) -> list[str]:
    """Return the fields that vary, without numbers of ranks and with the batch per rank."""
    row = analysis.headline_row
    excluded = ("world_size", "nodes", *analysis.fields.timing, *(["interconnect"] if _is_real(row) else []))
    names = [name for name in analysis.axes if name not in excluded]
    return [*names, *({"batch_per_gpu"} - set(names))]


def _is_real(row: pd.Series) -> bool:
    return row.get("interconnect") in (None, "auto")


def work_rows(analysis: ReportInputs) -> pd.DataFrame:
    """Return what `work` draws: kind, world_size, work with interval; the measured sizes, then predicted ones.

    is_open: the interval is too wide, so the value is not shown.
    """
    columns = ["kind", "world_size", "work", "work_low", "work_high", "is_open"]
    series = _own_series(analysis)
    if series.empty:
        return pd.DataFrame(columns=columns)
    series = series.assign(kind="measured")
    model = next((m for m in analysis.models if analysis.headline in set(m.series.points["configuration"])), None)
    parts = [series, *([] if model is None or not is_predicted(analysis, model) else [_predicted(analysis, model)])]
    rows = pd.concat(parts, ignore_index=True)
    is_wide = rows["is_open"] = rows["efficiency_more"].fillna(0.0) > 0
    for end in ("", "_low", "_high"):
        value = rows[f"efficiency{end}"].astype(float) * rows["world_size"].astype(float)
        rows[f"work{end}"] = value.mask(is_wide) if end else value
    return rows[columns]


def _own_series(analysis: Analysis) -> pd.DataFrame:
    """Return the scaling rows of the headline's series, one per number of ranks; empty if it is in none."""
    scaling = analysis.scaling[analysis.scaling["ideal"].notna()]
    own = scaling[scaling["configuration"] == analysis.headline]
    if own.empty:
        return own
    series = scaling[scaling["series"] == own["series"].iloc[0]].sort_values("world_size")
    series = series[
        (series["world_size"] != own["world_size"].iloc[0]) | (series["configuration"] == analysis.headline)
    ]
    return series.drop_duplicates("world_size")


def _predicted(analysis: ReportInputs, model: ScalingModel) -> pd.DataFrame:
    sizes = [model.series.sizes[-1] * factor for factor in FORECAST_FACTORS]
    per_node = ranks_per_node(analysis)
    nodes = [model.series.nodes_of(size, per_node) for size in sizes]
    knows_network = model.knows_network(sizes[-1], nodes[-1])
    rows = predict(model, sizes, nodes=nodes if knows_network else None)
    if not knows_network:
        beyond = np.array(nodes) > 1
        rows["efficiency_low"], rows["efficiency_high"] = (
            rows[f"efficiency_{end}"].astype(float).mask(beyond) for end in ("low", "high")
        )
    return rows.assign(kind="predicted", efficiency_more=0.0)


def lost_ranks(analysis: Analysis) -> Figure | None:
    """Ranks lost to each cause on the fastest configuration with most ranks; the causes add up to the total."""
    rows = lost_rows(analysis)
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    size = int(analysis.headline_row["world_size"])
    values = rows["lost"].to_numpy(dtype=float)
    decimals = lost_decimals(float(values[-1]))
    starts = np.concatenate([[0.0], np.cumsum(values[:-2]), [0.0]])
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axis = _single_panel(0.95 + _BAR_INCHES * len(rows))
        is_total = [False] * (len(rows) - 1) + [True]
        colours = [INK if total else COLOURS[1] if value >= 0 else COLOURS[2] for total, value in
                   zip(is_total, values, strict=True)]  # fmt: skip
        axis.barh(range(len(rows)), values, left=starts, height=0.68, color=colours, linewidth=0)
        for i in range(len(rows) - 2):  # the end of each cause is the start of the next
            end = starts[i] + values[i]
            axis.plot([end, end], [i, i + 1], color=INK, linewidth=0.6)
        low = min(0.0, *(starts + values))
        high = max(0.0, *(starts + values), *starts)
        span = (high - low) or 1.0
        for i, (start, value) in enumerate(zip(starts, values, strict=True)):
            axis.annotate(
                f"{value:+.{decimals}f}", (max(start, start + value), i), xytext=(4, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axis.set_xlim(low - 0.03 * span, high + 0.16 * span)
        axis.set_yticks(range(len(rows)), list(rows["cause"]))
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel(f"{ranks[1]} lost")
        row = analysis.headlines[0].scaling
        work = size - float(values[-1]) if row is None else size * float(row["efficiency"])
        title = f"{value_label('world_size', size, ranks)} do the work of {number(work, 2)}"
        axis.set_title(filled(f"{title} ({headline_label(analysis)})", 34 if is_narrow() else 60), loc="left")
    return figure


def lost_rows(analysis: Analysis) -> pd.DataFrame:
    """Return the ranks lost by the headline configuration: cause and lost, the total last.

    Causes too small to see are part of the remainder.
    """
    causes = visible_causes(analysis.lost_ranks)
    if not causes:
        return pd.DataFrame(columns=["cause", "lost"])
    rows = [{"cause": cause_label(name, value), "lost": value} for name, value in causes.items()]
    return pd.DataFrame([*rows, {"cause": "total", "lost": sum(causes.values())}])


def gains(analysis: Analysis) -> Figure | None:
    """Gain in throughput by one change: measured (with 95 % interval), or at most (light)."""
    rows = analysis.gains.dropna(subset="gain").head(_MOST_BARS)
    if len(rows) < 2:
        return None
    percent = 100 * (rows["gain"].astype(float) - 1)
    low, high = (100 * (rows[f"gain_{end}"].astype(float) - 1) for end in ("low", "high"))
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axis = _single_panel(0.95 + _BAR_INCHES * len(rows))
        colours = [COLOURS[2] if is_measured else GRID for is_measured in rows["is_measured"]]
        axis.barh(range(len(rows)), percent, height=0.68, color=colours, linewidth=0)
        known = np.flatnonzero(low.notna())
        axis.hlines(known, low.iloc[known], high.iloc[known], color=INK, linewidth=1.2)
        for i, (value, top) in enumerate(zip(percent, high.fillna(percent), strict=True)):
            bound = "" if rows["is_measured"].iloc[i] else "≤ "
            axis.annotate(
                f"{bound}{value:+.{0 if abs(value) >= 10 else 1}f} %", (max(value, top, 0.0), i), xytext=(5, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axis.axvline(0, color=INK, linewidth=0.8)
        ends = pd.concat([percent, low, high, pd.Series([0.0])])
        span = float(ends.max() - ends.min()) or 1.0
        axis.set_xlim(float(ends.min()) - 0.03 * span, float(ends.max()) + 0.2 * span)
        axis.set_yticks(range(len(rows)), [wrapped(text, 4 if is_narrow() else 2) for text in rows["change"]])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("gain in throughput (%)")
        handles: list[Any] = [
            Line2D([], [], color=COLOURS[2], linewidth=6, label="measured"),
            Line2D([], [], color=GRID, linewidth=6, label="upper bound"),
        ]
        present = [rows["is_measured"].any(), not rows["is_measured"].all()]
        legend(figure, [handle for handle, there in zip(handles, present, strict=True) if there])
    return figure


def _single_panel(height_inches: float) -> tuple[Figure, Any]:
    return plt.subplots(figsize=(NARROW_INCHES if is_narrow() else 7.2, height_inches), layout="constrained")
