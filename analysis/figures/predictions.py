"""The figure of predictions: measured efficiency, and its extrapolation by the fitted laws."""

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
    label_ends,
    legend,
    limits,
    outer_labels,
    wrapped,
)
from analysis.predict.forecast import FORECAST_FACTORS, held_batch, ranks_per_node
from analysis.predict.inputs import ReportInputs
from analysis.predict.model import ScalingModel, predict
from analysis.predict.series import alike_but_for_timing
from analysis.study import study_ranks
from analysis.text import configuration_label, field_label

MOST_TICKS = 7
"""Most numbers of ranks that fit under a panel; of more, every second one is labelled."""


def prediction_fan(analysis: ReportInputs) -> Figure | None:
    """Efficiency: measured (95 % intervals), and predicted for more ranks (dashed; shaded: 95 % of new runs).

    Host-bound series have no prediction. Beyond one node without a measured network there is no interval.
    """
    models = analysis.models
    if not models:
        return None
    ranks = study_ranks(analysis)
    excluded = (
        *alike_but_for_timing([model.series for model in models], analysis.fields.timing),
        "world_size",
        "nodes",
        "batch_per_gpu",
    )
    rest = [name for name in analysis.axes if name not in excluded and name in models[0].series.fields]
    panels: dict[tuple[Any, ...], list[ScalingModel]] = {}
    for model in models:
        panels.setdefault(tuple(model.series.fields.get(name) for name in rest), []).append(model)
    labels = list(
        dict.fromkeys(held_batch(model, ranks) for model in sorted(models, key=lambda m: m.series.base_batch))
    )
    colours = dict(zip(labels, sns.color_palette("colorblind", len(labels)), strict=True))
    markers = {label: MARKERS[i % len(MARKERS)] for i, label in enumerate(labels)}
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        smallest = min(model.series.sizes[0] for model in models)
        largest = _largest(analysis, models)
        has_interval = False
        low, high = _limits(analysis, models)
        with_legend = max(map(len, panels.values())) > MOST_DIRECT_LABELS
        for axis, (key, members) in zip(axes, panels.items(), strict=False):
            axis.axhline(100, color=INK, linestyle=(0, (1, 2)), linewidth=0.8)
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
                is_shaded, (x, y) = _fan(axis, analysis, model, largest, colours[label], markers[label])
                has_interval |= is_shaded
                # Other lines continue after the last point of a host-bound series, so its label is below them.
                y -= 0.04 * (high - low) if model.series.host_bound else 0.0
                ends.append(LineEnd(x, y, label.partition(" per ")[0]))
            if not with_legend:
                label_ends(axis, ends)
            fields = {name: value for name, value in zip(rest, key, strict=True) if value not in (None, "")}
            title = configuration_label(fields, fields, ranks)
            axis.set_title(wrapped(title, column_count(len(panels))))
        outer_labels(axes, field_label("world_size", ranks), "efficiency (%)")
        handles: list[Any] = [
            Line2D([], [], color=colours[label], marker=markers[label], markersize=5, label=label)
            for label in labels
            if with_legend
        ]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1.2, label="predicted, not measured"))
        if has_interval:
            handles.append(Patch(facecolor=GRID, linewidth=0, label="95 % interval of new runs"))
        legend(figure, handles)
    return figure


def _largest(analysis: ReportInputs, models: list[ScalingModel]) -> int:
    """Return the largest number of ranks that is drawn."""
    return max(max(FORECAST_FACTORS) * max(model.series.sizes[-1] for model in models), analysis.record.predict_to or 0)


def _limits(analysis: ReportInputs, models: list[ScalingModel]) -> tuple[float, float]:
    """Return limits of the efficiency in percent that show all measured points and predicted ends."""
    members = {index for model in models for index in model.series.points["configuration"]}
    rows = analysis.scaling[analysis.scaling["configuration"].isin(members) & analysis.scaling["ideal"].notna()]
    ends = [
        100 * float(predict(model, [size])["efficiency"].iloc[0])
        for model in models
        for size in (
            *(factor * model.series.sizes[-1] for factor in (1, *FORECAST_FACTORS)),
            _largest(analysis, models),
        )
        if not model.series.host_bound
    ]
    points = pd.concat([100 * rows["efficiency"].astype(float), pd.Series(ends, dtype=float)])
    known = rows[~(rows["efficiency_more"] > 0)]
    low, high = limits(points, *(100 * known[f"efficiency_{end}"].astype(float) for end in ("low", "high")))
    return max(0.0, low), max(102.0, high)


def _fan(
    axis: Any, analysis: ReportInputs, model: ScalingModel, largest: int, colour: Any, marker: str
) -> tuple[bool, tuple[float, float]]:
    """Draw a series; return True if its prediction has an interval somewhere, and the end of its line."""
    sizes = model.series.sizes
    rows = analysis.scaling[analysis.scaling["configuration"].isin(model.series.points["configuration"])]
    rows = rows[rows["scaling"] == model.series.scaling].drop_duplicates("world_size").sort_values("world_size")
    first = model.series.points.iloc[0]
    measured = model.series.points["throughput_samples_per_s"] / first["throughput_samples_per_s"]
    percent = 100 * measured * first["world_size"] / model.series.points["world_size"]
    axis.plot(sizes, percent, linestyle="none", marker=marker, color=colour, markersize=5, markeredgewidth=0)
    for _, row in rows[~(rows["efficiency_more"] > 0)].dropna(subset="efficiency_low").iterrows():
        axis.vlines(
            row["world_size"], 100 * row["efficiency_low"], 100 * row["efficiency_high"], color=colour, linewidth=1
        )
    if model.series.host_bound:
        return False, (float(sizes[-1]), float(percent.iloc[-1]))
    per_node = ranks_per_node(analysis)
    for ends, style in (((sizes[0], sizes[-1]), "-"), ((sizes[-1], largest), (0, (4, 3)))):
        x = np.unique(np.geomspace(*ends, 25).round().astype(int))  # numbers of ranks are integers
        nodes = [model.series.nodes_of(int(size), per_node) for size in x]
        knows_network = model.knows_network(int(x[-1]), nodes[-1])
        curve = predict(model, x.tolist(), nodes=nodes if knows_network else None)
        axis.plot(x, 100 * curve["efficiency"], color=colour, linestyle=style, linewidth=1.3)
    shaded = curve[curve["efficiency_low"].notna() & (knows_network | (np.array(nodes) == 1))]
    low, high = 100 * shaded["efficiency_low"], 100 * shaded["efficiency_high"]
    axis.fill_between(shaded["world_size"], low, high, color=colour, alpha=0.15, linewidth=0)
    return len(shaded) > 1, (float(x[-1]), 100 * float(curve["efficiency"].iloc[-1]))
