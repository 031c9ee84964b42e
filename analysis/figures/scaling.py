"""Figures of speed-up, efficiency and phases.

All text has one colour, so that a page can recolour it for light and dark themes.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, StrMethodFormatter

from analysis.compare.scaling import STRONG, WEAK
from analysis.figures.style import (
    INK,
    MARKERS,
    STYLE,
    TEXT,
    facet_fields,
    grid_of_axes,
    hollow,
    hollow_handle,
    legend,
    outer_labels,
    stacked_bars,
    wrapped,
)
from analysis.measure.configurations import LAYOUT
from analysis.read.reduce import OPTIONAL_PHASES
from analysis.read.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import PHASE_LABELS, configuration_label, field_label, value_label


def speed_up_weak(analysis: Analysis) -> Figure | None:
    """Speed-up by number of ranks at a constant batch per rank, with ideal line and 95 % intervals (clipped)."""
    return _scaling_figure(analysis, WEAK, "speed_up")


def speed_up_strong(analysis: Analysis) -> Figure | None:
    """Speed-up by number of ranks at a constant global batch, with ideal line and 95 % intervals (clipped)."""
    return _scaling_figure(analysis, STRONG, "speed_up")


def efficiency_weak(analysis: Analysis) -> Figure | None:
    """Efficiency by number of ranks at a constant batch per rank, with 95 % intervals (clipped)."""
    return _scaling_figure(analysis, WEAK, "efficiency")


def efficiency_strong(analysis: Analysis) -> Figure | None:
    """Efficiency by number of ranks at a constant global batch, with 95 % intervals (clipped)."""
    return _scaling_figure(analysis, STRONG, "efficiency")


def _scaling_figure(analysis: Analysis, label: str, value: str) -> Figure | None:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    batch = "batch_per_gpu" if label == WEAK else "global_batch"
    rows = rows.join(analysis.configurations.drop(columns=["n", "world_size"]), on="configuration")
    rest = facet_fields(analysis)
    facets = list(rows.groupby(rest, sort=True, dropna=False)) if rest else [((), rows)]
    batches = sorted(rows[batch].unique())
    colours = dict(zip(batches, sns.color_palette("colorblind", len(batches)), strict=True))
    markers = {samples: MARKERS[i % len(MARKERS)] for i, samples in enumerate(batches)}
    sizes = sorted(rows["world_size"].unique())
    scale = 100.0 if value == "efficiency" else 1.0
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(facets), sharey=True)
        for axis, (key, facet) in zip(axes, facets, strict=False):
            _ideal(axis, facet, value)
            present = sorted(facet[batch].unique())
            # Shift each batch along the logarithmic axis, so that overlapping points stay visible.
            shift = {samples: 2 ** (0.06 * (i - (len(present) - 1) / 2)) for i, samples in enumerate(present)}
            shown = facet.assign(x=facet["world_size"] * facet[batch].map(shift), y=scale * facet[value])
            _errors(axis, shown, value, scale, shown[batch].map(colours))
            sns.lineplot(
                shown.sort_values(["series", *LAYOUT]).drop_duplicates(["series", "world_size"]),
                x="x", y="y", hue=batch, palette=colours, style=batch, markers=markers, dashes=False, units="series",
                estimator=None, linewidth=1.3, markersize=5.5, markeredgewidth=0, legend=False, ax=axis,
            )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
            axis.set_title(
                wrapped(configuration_label(dict(zip(rest, key, strict=True)), rest, ranks), min(4, len(facets)))
            )
            if value == "efficiency":
                axis.set_ylim(0, 1.1 * max(100.0, *(100 * rows["efficiency"])))
            else:  # with two logarithmic axes the ideal is a straight line
                axis.set_yscale("log", base=2)
                axis.set_ylim(rows["speed_up"].min() / 1.15, 1.15 * max(rows["ideal"].max(), rows["speed_up"].max()))
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.yaxis.set_minor_locator(NullLocator())
        outer_labels(axes, field_label("world_size", ranks), "efficiency (%)" if scale > 1 else "speed-up")
        handles = [
            Line2D([], [], color=colours[b], marker=markers[b], markersize=5, label=value_label(batch, b, ranks))
            for b in batches
        ]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="ideal"))
        handles += [hollow_handle()] * bool((rows[f"{value}_more"] > 0).any())
        legend(figure, handles)
    return figure


def _errors(axis: Any, points: pd.DataFrame, value: str, scale: float, colours: pd.Series) -> None:
    """Draw 95 % intervals and a small mark per point, including layouts on more nodes, which no line joins.

    A point whose interval is too wide is hollow and has none.
    """
    for (_, point), colour in zip(points.iterrows(), colours, strict=True):
        if point[f"{value}_more"] > 0:
            hollow(axis, point["x"], point["y"], colour)
            continue
        low, high = scale * point[f"{value}_low"], scale * point[f"{value}_high"]
        ends = [[max(0.0, point["y"] - low)], [max(0.0, high - point["y"])]] if low <= high else None
        axis.errorbar(point["x"], point["y"], yerr=ends, color=colour, marker=".", capsize=2.5, elinewidth=1)


def _ideal(axis: Any, facet: pd.DataFrame, value: str) -> None:
    style = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.0}
    if value == "efficiency":
        axis.axhline(100, **style)
        return
    for reference in sorted(facet["reference_world_size"].unique()):
        sizes = np.geomspace(reference, facet["world_size"].max(), 50)
        axis.plot(sizes, sizes / reference, **style)


def phases(analysis: Analysis) -> Figure | None:
    """Stacked phases of a step, one bar per configuration; one panel per batch, each with its own scale."""
    configurations = analysis.configurations
    if configurations.empty:
        return None
    values = configurations[list(PHASES)].astype(float) * 1e3
    configurations = configurations[values.notna().any(axis=1)]
    if configurations.empty:
        return None
    values = values.loc[configurations.index].fillna(0.0)
    drawn = [name for name in PHASES if (values[name] > 0).any()]
    ranks = study_ranks(analysis)
    names = [*facet_fields(analysis), "world_size"]
    # Colours follow this order, so that phases common to most strategies come first.
    labels = {name: PHASE_LABELS[name] for name in sorted(PHASES, key=lambda name: name in OPTIONAL_PHASES)}
    return stacked_bars(configurations, values[drawn], labels, names, ranks, "time per step (ms)")
