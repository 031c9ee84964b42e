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
    """Efficiency: measured (95 % intervals), and predicted for more ranks (dashed; shaded: 95 % of new runs).

    Series that are host-bound, or whose scaling is not resolved, have no prediction. Beyond one node without a measured
    network there is no interval.
    """
    models = analysis.models
    if not any(is_predicted(analysis, model) for model in models):
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
        list(by_field.items()),
        lambda panel: any(analysis.headline in set(model.series.points["configuration"]) for model in panel[1]),
    )
    labels = list(
        dict.fromkeys(held_batch(model, ranks) for model in sorted(models, key=lambda m: m.series.base_batch))
    )
    colours = dict(zip(labels, sns.color_palette("colorblind", len(labels)), strict=True))
    markers = {label: MARKERS[i % len(MARKERS)] for i, label in enumerate(labels)}
    smallest = min(model.series.sizes[0] for model in models)
    largest = max(
        max(FORECAST_FACTORS) * max(model.series.sizes[-1] for model in models), analysis.record.predict_to or 0
    )
    curves = {model.number: _curves(analysis, model, largest) for model in models if is_predicted(analysis, model)}
    drawn = [model for _, members in panels[: most_panels()] for model in members]
    measured = {model.number: _measured(analysis, model) for model in drawn}
    low, high = _limits([*measured.values(), *(curves[m.number][-1] for m in drawn if m.number in curves)])
    # Lines that go on would cross the label of one that ends earlier.
    with_legend = max(map(len, by_field.values())) > MOST_DIRECT_LABELS or any(
        len({largest if model.number in curves else model.series.sizes[-1] for model in members}) > 1
        for members in by_field.values()
    )
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
            ends = []
            for model in members:
                label = held_batch(model, ranks)
                colour, marker = colours[label], markers[label]
                parts = [measured[model.number], *curves.get(model.number, ())]
                _draw_measured(axis, parts[0], colour, marker)
                has_interval |= _draw_curves(axis, parts[1:], colour)
                last = parts[-1].iloc[-1]
                ends.append(LineEnd(float(last["world_size"]), float(last["percent"]), label.partition(" per ")[0]))
            # Up to the last point only, so that it does not cross the labels.
            axis.plot(
                [smallest, max(end.x for end in ends)], [100, 100], color=INK, linestyle=(0, (1, 2)), linewidth=0.8
            )
            if with_legend:
                ends = []
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


def _draw_measured(axis: Any, points: pd.DataFrame, colour: Any, marker: str) -> None:
    is_wide = points["is_wide"]
    shown, hidden = points[~is_wide], points[is_wide]
    axis.plot(
        shown["world_size"], shown["percent"], linestyle="none", marker=marker, color=colour, markersize=5,
        markeredgewidth=0,
    )  # fmt: skip
    hollow(axis, hidden["world_size"], hidden["percent"], colour, marker)
    shown = shown.dropna(subset="percent_low")
    axis.vlines(shown["world_size"], shown["percent_low"], shown["percent_high"], color=colour, linewidth=1)


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
