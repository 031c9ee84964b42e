"""The figure of predictions: measured efficiency, and its extrapolation by the fitted laws."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.figures.style import (
    GRID,
    INK,
    MARKERS,
    MOST_DIRECT_LABELS,
    STYLE,
    TEXT,
    LineEnd,
    column_count,
    grid_of_axes,
    headline_shown,
    hollow,
    hollow_handle,
    label_ends,
    legend,
    limits,
    most_panels,
    outer_labels,
    wrapped,
)
from analysis.predict.forecast import FORECAST_FACTORS, held_batch, ranks_per_node, reason_against
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import ScalingModel, predict
from analysis.predict.series import alike_but_for_timing
from analysis.study import study_ranks
from analysis.text import configuration_label, field_label

MOST_TICKS = 7
"""Most numbers of ranks that fit under a panel; of more, every second one is labelled."""


def prediction_fan(analysis: ReportInputs) -> Figure | None:
    """Efficiency: measured (bands: 95 % intervals), and predicted for more ranks (dashed; bands: 95 % of new runs).

    Series that are host-bound, or whose scaling is not resolved, have no prediction. Beyond one node without a measured
    network there is no interval.
    """
    models = analysis.models
    predicted = {model.number for model in models if is_predicted(analysis, model)}
    if not predicted:
        return None
    ranks = study_ranks(analysis)
    excluded = (
        *alike_but_for_timing([model.series for model in models], analysis.fields.timing),
        "world_size",
        "nodes",
        "batch_per_gpu",
    )
    rest = [name for name in analysis.axes if name not in excluded and name in models[0].series.fields]
    by_field: dict[tuple[Any, ...], list[ScalingModel]] = {}
    for model in models:
        by_field.setdefault(tuple(model.series.fields.get(name) for name in rest), []).append(model)
    panels = headline_shown(
        [panel for panel in by_field.items() if any(model.number in predicted for model in panel[1])],
        lambda panel: any(analysis.headline in set(model.series.points["configuration"]) for model in panel[1]),
    )
    models = [model for _, members in panels for model in members]
    labels = list(
        dict.fromkeys(held_batch(model, ranks) for model in sorted(models, key=lambda m: m.series.base_batch))
    )
    colours = dict(zip(labels, sns.color_palette("colorblind", len(labels)), strict=True))
    markers = {label: MARKERS[i % len(MARKERS)] for i, label in enumerate(labels)}
    smallest = min(model.series.sizes[0] for model in models)
    largest = max(
        max(FORECAST_FACTORS) * max(model.series.sizes[-1] for model in models), analysis.record.predict_to or 0
    )
    curves = {model.number: _curves(analysis, model, largest) for model in models if model.number in predicted}
    drawn = [model for _, members in panels[: most_panels()] for model in members]
    measured = {model.number: _measured(analysis, model) for model in drawn}
    low, high = _limits([*measured.values(), *(curves[m.number][-1] for m in drawn if m.number in curves)])
    with_legend = max(len(members) for _, members in panels) > MOST_DIRECT_LABELS
    if not with_legend and any(model.number not in curves for model in drawn):  # labelled above or below its last point
        low, high = max(0.0, low - 0.14 * (high - low)), high + 0.14 * (high - low)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        has_interval = False
        for axis, (key, members) in zip(axes, panels, strict=False):
            axis.set_xscale("log", base=2)
            sizes = [2**k for k in range(int(np.log2(largest)) + 1) if 2**k >= smallest]
            labelled = sizes[:: 1 + (len(sizes) > MOST_TICKS)]
            axis.set_xticks(labelled, [str(size) for size in labelled])
            axis.minorticks_off()
            axis.set_xlim(smallest / 1.2, largest * 1.2)
            axis.set_ylim(low, high)
            lines, ends = [], []
            for model in members:
                label = held_batch(model, ranks)
                colour, marker = colours[label], markers[label]
                parts = [measured[model.number], *curves.get(model.number, ())]
                _draw_measured(axis, parts[0], colour, marker, is_joined=len(parts) == 1)
                has_interval |= _draw_curves(axis, parts[1:], colour)
                lines.append(pd.concat(parts[1:] or parts))
                last = parts[-1].iloc[-1]
                ends.append(LineEnd(float(last["world_size"]), float(last["percent"]), label.partition(" per ")[0]))
            # Up to the last point only, so that it does not cross the labels.
            last_size = max(end.x for end in ends)
            axis.plot([smallest, last_size], [100, 100], color=INK, linestyle=(0, (1, 2)), linewidth=0.8)
            if not with_legend:
                _label_early_ends(axis, ends, lines)
            ends = [] if with_legend else [end for end in ends if end.x == last_size]
            label_ends(axis, ends)
            fields = {name: value for name, value in zip(rest, key, strict=True) if value not in (None, "")}
            title = configuration_label(fields, fields, ranks)
            axis.set_title(wrapped(title, column_count(len(panels)), ends))
        outer_labels(axes, field_label("world_size", ranks), "efficiency (%)")
        handles: list[Any] = [
            Line2D([], [], color=colours[label], marker=markers[label], markersize=5, label=label)
            for label in labels
            if with_legend
        ]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1.2, label="predicted, not measured"))
        if has_interval:
            handles.append(Patch(facecolor=GRID, linewidth=0, label="95 % interval of new runs"))
        handles += [hollow_handle()] * any(points["is_wide"].any() for points in measured.values())
        legend(figure, handles)
    return figure


def is_predicted(analysis: ReportInputs, model: ScalingModel) -> bool:
    """Return False if nothing is predicted for the series, see `analysis.predict.forecast.reason_against`."""
    return reason_against(analysis, model.series) is None


def _curves(analysis: ReportInputs, model: ScalingModel, largest: int) -> list[pd.DataFrame]:
    """Return the laws' efficiency in percent over the measured numbers of ranks, and beyond; without unknown intervals.

    Columns: world_size, percent, percent_low and percent_high.
    """
    sizes, per_node = model.series.sizes, ranks_per_node(analysis)
    curves = []
    for ends in ((sizes[0], sizes[-1]), (sizes[-1], largest)):
        x = np.unique(np.geomspace(*ends, 25).round().astype(int))  # numbers of ranks are integers
        nodes = [model.series.nodes_of(int(size), per_node) for size in x]
        knows_network = model.knows_network(int(x[-1]), nodes[-1])
        curve = predict(model, x.tolist(), nodes=nodes if knows_network else None)
        percent = {f"percent{end}": 100 * curve[f"efficiency{end}"].astype(float) for end in ("", "_low", "_high")}
        is_known = knows_network | (np.array(nodes) == 1)
        percent |= {name: percent[name].where(is_known) for name in ("percent_low", "percent_high")}
        curves.append(pd.DataFrame({"world_size": curve["world_size"], **percent}))
    return curves


def _measured(analysis: ReportInputs, model: ScalingModel) -> pd.DataFrame:
    """Return the measured efficiency in percent, by number of ranks. is_wide: the interval is not resolved, and null.

    Columns: world_size, percent, percent_low, percent_high and is_wide.
    """
    points = model.series.points.set_index("world_size")
    per_rank = points["throughput_samples_per_s"] / points.index
    rows = analysis.scaling[analysis.scaling["configuration"].isin(points["configuration"])]
    rows = rows[rows["scaling"] == model.series.scaling].drop_duplicates("world_size").set_index("world_size")
    rows = rows.reindex(points.index)
    is_wide = rows["efficiency_more"] > 0
    ends = {f"percent_{end}": 100 * rows[f"efficiency_{end}"].astype(float).mask(is_wide) for end in ("low", "high")}
    frame = pd.DataFrame({"percent": 100 * per_rank / per_rank.iloc[0], **ends, "is_wide": is_wide})
    return frame.reset_index()


def _limits(parts: Iterable[pd.DataFrame]) -> tuple[float, float]:
    """Return limits of the efficiency in percent that show all points with their intervals."""
    shown = pd.concat(parts, ignore_index=True)
    low, high = limits(shown["percent"], shown["percent_low"], shown["percent_high"])
    return max(0.0, low), max(102.0, high)


def _draw_measured(axis: Any, points: pd.DataFrame, colour: Any, marker: str, *, is_joined: bool) -> None:
    """Draw the points of a series with their band of intervals. is_joined: a line joins them, for there is no law."""
    is_wide = points["is_wide"]
    shown, hidden = points[~is_wide], points[is_wide]
    if is_joined:
        axis.plot(points["world_size"], points["percent"], color=colour, linewidth=1.3)
    axis.plot(
        shown["world_size"], shown["percent"], linestyle="none", marker=marker, color=colour, markersize=5,
        markeredgewidth=0,
    )  # fmt: skip
    hollow(axis, hidden["world_size"], hidden["percent"], colour, marker)
    if shown["percent_low"].notna().any():
        low, high = (shown[f"percent_{end}"].fillna(shown["percent"]) for end in ("low", "high"))
        axis.fill_between(shown["world_size"], low, high, color=colour, alpha=0.18, linewidth=0)


def _label_early_ends(axis: Any, ends: Sequence[LineEnd], lines: Sequence[pd.DataFrame]) -> None:
    """Label the lines that end before others, above or below their last point: on the side with more room."""
    early = [number for number, end in enumerate(ends) if end.x < max(end.x for end in ends)]
    for number in early:
        end = ends[number]
        if sum(ends[other].x == end.x for other in early) > 1:
            continue
        others = [
            float(np.interp(np.log2(end.x), np.log2(line["world_size"].astype(float)), line["percent"])) - end.y
            for other, line in enumerate(lines)
            if other != number
        ]
        above, below = (min((sign * y for y in others if sign * y >= 0), default=np.inf) for sign in (1, -1))
        axis.annotate(
            end.shown, (end.x, end.y), xytext=(0, 7 if above >= below else -7), textcoords="offset points",
            ha="center", va="bottom" if above >= below else "top", fontsize=8.5, annotation_clip=False,
        )  # fmt: skip
    shared = [ends[number] for number in early if sum(ends[other].x == ends[number].x for other in early) > 1]
    label_ends(axis, shared)


def _draw_curves(axis: Any, curves: Sequence[pd.DataFrame], colour: Any) -> bool:
    """Draw the laws of a series, dashed beyond the measured sizes; return True if the prediction has an interval."""
    if not curves:
        return False
    for curve, style in zip(curves, ("-", (0, (4, 3))), strict=True):
        axis.plot(curve["world_size"], curve["percent"], color=colour, linestyle=style, linewidth=1.3)
    shaded = curves[-1].dropna(subset="percent_low")
    axis.fill_between(
        shaded["world_size"], shaded["percent_low"], shaded["percent_high"], color=colour, alpha=0.15, linewidth=0
    )
    return len(shaded) > 1
