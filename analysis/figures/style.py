"""What figures share: style, panels, legends, stacked bars, and how a figure becomes a file."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.study import Analysis
from analysis.text import configuration_label, percent, value_label

INK, GRID = "#2a2f36", "#c9ced6"
"""Colours of text and of grid lines; the report puts its own, light or dark, in their place."""

MAX_FACETS = 24
"""Panels of one figure; a grid with more shows its first ones, and says so."""

STYLE: dict[str, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
TEXT: Any = {
    "font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "scaling-study", "savefig.facecolor": "none",
    "axes.titley": 1.0,  # else each drawing looks for ticks above the axes, a fifth of its time
}  # fmt: skip

LINE_INCHES = 0.155
"""Height of a line of `TEXT`, with what is between two of them."""

MARKERS = "oDs^vPX*"

COLOURS = (*sns.color_palette("colorblind").as_hex(), "#7800d8")
"""Seaborn's ten colour-blind safe ones and a violet, which no kind of dichromacy (Machado, Oliveira and Fernandes, IEEE
TVCG 15, 2009) brings nearer to one of them than they lie to each other."""


def render(figure: Figure) -> tuple[str, bytes]:
    """The figure as SVG (the same text for the same figure) and as PNG on white, 160 dots an inch; closes it."""
    svg, png = io.StringIO(), io.BytesIO()
    engine = figure.get_layout_engine()
    with plt.rc_context(TEXT):
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)  # with one, each format would be drawn twice: once to lay it out again
        figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    plt.close(figure)
    return svg.getvalue(), png.getvalue()


def facet_fields(analysis: Analysis) -> list[str]:
    """Fields that vary and are neither on the axis nor a colour."""
    return [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]


def grid_of_axes(count: int, *, sharey: bool) -> tuple[Figure, list[Any]]:
    shown = min(count, MAX_FACETS)
    columns = min(shown, 4)
    rows = -(-shown // columns)
    width = 9.6 if columns > 2 else 4.8 if columns == 1 else 7.2
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(width, 0.7 + 2.5 * rows),
        sharex=True,
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    axes = list(grid.flat)
    for axis in axes[shown:]:
        axis.set_visible(False)
    _say_shown(figure, shown, count)
    return figure, axes[:shown]


def _say_shown(figure: Figure, shown: int, count: int) -> None:
    """Says below the panels that there are more; above them is the legend, which is laid out over a title."""
    if count > shown:
        figure.supxlabel(f"the first {shown} of {count} panels ({percent(shown / count)})", fontsize=TEXT["font.size"])


def wrapped(label: str, columns: int) -> str:
    """A label in lines that fit over one of so many panels side by side."""
    return textwrap.fill(label, {1: 60, 2: 44}.get(columns, 28), break_long_words=False, break_on_hyphens=False)


def outer_labels(axes: list[Any], x_label: str, y_label: str) -> None:
    for axis in axes:
        place = axis.get_subplotspec()
        below = place.rowspan.stop * place.get_gridspec().ncols + place.colspan.start
        if below >= len(axes):  # nothing under it: the last of its column
            axis.set_xlabel(x_label)
            axis.tick_params(labelbottom=True)
        if place.is_first_col():
            axis.set_ylabel(y_label)


def legend(figure: Figure, handles: list[Any]) -> None:
    """Above the panels, in as many columns as its longest label leaves room for."""
    widest_inches = 0.65 + 0.075 * max(len(str(handle.get_label())) for handle in handles)
    ncols = min(len(handles), max(1, int(figure.get_figwidth() // widest_inches)), 6)
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols)


def stacked_bars(
    found: pd.DataFrame,
    values: pd.DataFrame,
    labels: Mapping[str, str],
    names: Sequence[str],
    ranks: tuple[str, str],
    x_label: str,
    totals: pd.Series | None = None,
) -> Figure:
    """A bar for each row of `found`, labelled by those of its fields `names` that vary; a panel for each batch, on its own
    scale.

    values: the parts, in the unit of the axis; negative ones are stacked to the left. labels: of all parts that there
    might be, at most as many as `COLOURS`, which fixes their colours. totals: marked with a line across the bar.
    """
    colours = dict(zip(labels, COLOURS, strict=False))
    varying = [name for name in names if found[name].nunique(dropna=False) > 1] or list(names[-1:])
    every = list(found.groupby("batch_per_gpu"))
    panels = every[:MAX_FACETS]
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    bars = {
        index: textwrap.fill(
            configuration_label(row, varying, ranks), 64 if columns == 1 else 40, break_long_words=False
        )
        for _, panel in panels
        for index, row in panel.iterrows()
    }
    lines = max(label.count("\n") + 1 for label in bars.values())
    most = max(len(panel) for _, panel in panels)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(9.6, 0.9 + rows * (0.75 + (0.08 + LINE_INCHES * lines) * most)),
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid.flat)
        for axis, (batch, panel) in zip(axes, panels, strict=False):
            panel = panel.sort_values(varying, kind="stable")
            right, left = np.zeros(len(panel)), np.zeros(len(panel))
            for name in values.columns:
                width = values.loc[panel.index, name].to_numpy()
                begin = np.where(width >= 0, right, left)
                axis.barh(range(len(panel)), width, left=begin, height=0.72, color=colours[name], linewidth=0)
                right, left = right + np.maximum(width, 0), left + np.minimum(width, 0)
            if totals is not None:
                axis.use_sticky_edges = False  # room for bars that end where the panel would
                axis.scatter(totals.loc[panel.index], range(len(panel)), marker="|", s=110, color=INK, zorder=3)
            axis.set_yticks(range(len(panel)), [bars[index] for index in panel.index])
            axis.set_ylim(len(panel) - 0.5, -0.5)  # from the top, and all of it for bars and their labels
            axis.grid(visible=False, axis="y")
            axis.set_title(value_label("batch_per_gpu", batch, ranks))
            axis.set_xlabel(x_label)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        _say_shown(figure, len(panels), len(every))
        handles: list[Any] = [
            Rectangle((0, 0), 1, 1, color=colours[name], label=labels[name]) for name in values.columns
        ]
        if totals is not None:
            handles.append(plt.Line2D([], [], color=INK, marker="|", linestyle="none", markersize=9, label="whole"))
        legend(figure, handles)
    return figure
