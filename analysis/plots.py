"""Figures: speed-up with its ideal, efficiency, and where a step's time goes.

To add a figure: a function from `Analysis` to a matplotlib figure (None where there is nothing to draw), and a line in
`PLOTS`. Colours are seaborn's colour-blind palette; text is one ink, so that a page can show it on light and dark.
"""

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator, StrMethodFormatter

from analysis.formatting import configuration_label, field_label, percent, value_label
from analysis.measures import PHASES
from analysis.scaling import STRONG, WEAK, Analysis
from analysis.tables import PHASE_LABELS, study_ranks

INK, GRID = "#2a2f36", "#c9ced6"
"""Colours of text and of grid lines; the report puts its own, light or dark, in their place."""

MAX_FACETS = 24
"""Panels of one figure; a grid with more shows its first ones, and says so."""

_STYLE: dict[str, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
_TEXT: Any = {
    "font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "scaling-study", "savefig.facecolor": "none",
}  # fmt: skip

_MARKERS = "oDs^vPX*"
_LAYOUT = ["world_size", "nodes"]


def speed_up_weak(analysis: Analysis) -> Figure | None:
    """Speed-up over the number of ranks with the batch per rank held, with the ideal line and 95 % intervals, cut off at the frame."""
    return _scaling_figure(analysis, WEAK, "speed_up")


def speed_up_strong(analysis: Analysis) -> Figure | None:
    """Speed-up over the number of ranks with the global batch held, with the ideal line and 95 % intervals, cut off at the frame."""
    return _scaling_figure(analysis, STRONG, "speed_up")


def efficiency_weak(analysis: Analysis) -> Figure | None:
    """Efficiency over the number of ranks with the batch per rank held, with 95 % intervals, cut off at the frame."""
    return _scaling_figure(analysis, WEAK, "efficiency")


def efficiency_strong(analysis: Analysis) -> Figure | None:
    """Efficiency over the number of ranks with the global batch held, with 95 % intervals, cut off at the frame."""
    return _scaling_figure(analysis, STRONG, "efficiency")


def _scaling_figure(analysis: Analysis, label: str, value: str) -> Figure | None:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    batch = "batch_per_gpu" if label == WEAK else "global_batch"
    rows = rows.join(analysis.configurations.drop(columns=["n", "world_size"]), on="configuration")
    rest = _facet_fields(analysis)
    facets = list(rows.groupby(rest, sort=True, dropna=False)) if rest else [((), rows)]
    batches = sorted(rows[batch].unique())
    colours = dict(zip(batches, sns.color_palette("colorblind", len(batches)), strict=True))
    markers = {samples: _MARKERS[i % len(_MARKERS)] for i, samples in enumerate(batches)}
    sizes = sorted(rows["world_size"].unique())
    scale = 100.0 if value == "efficiency" else 1.0
    with sns.axes_style("whitegrid", rc=_STYLE), plt.rc_context(_TEXT):
        figure, axes = _grid_of_axes(len(facets), sharey=True)
        for axis, (key, facet) in zip(axes, facets, strict=False):
            _ideal(axis, facet, value)
            present = sorted(facet[batch].unique())
            # Points that overlap stay visible beside each other: each batch is nudged along the logarithmic axis.
            nudge = {samples: 2 ** (0.06 * (i - (len(present) - 1) / 2)) for i, samples in enumerate(present)}
            shown = facet.assign(x=facet["world_size"] * facet[batch].map(nudge), y=scale * facet[value])
            _errors(axis, shown, value, scale, shown[batch].map(colours))
            sns.lineplot(
                shown.sort_values(["series", *_LAYOUT]).drop_duplicates(["series", "world_size"]),
                x="x", y="y", hue=batch, palette=colours, style=batch, markers=markers, dashes=False, units="series",
                estimator=None, linewidth=1.3, markersize=5.5, markeredgewidth=0, legend=False, ax=axis,
            )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
            axis.set_title(configuration_label(dict(zip(rest, key, strict=True)), rest, ranks))
            if value == "efficiency":
                axis.set_ylim(0, 1.1 * max(100.0, *(100 * rows["efficiency"])))
            else:  # both axes logarithmic: the ideal is a straight line
                axis.set_yscale("log", base=2)
                axis.set_ylim(rows["speed_up"].min() / 1.15, 1.15 * max(rows["ideal"].max(), rows["speed_up"].max()))
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.yaxis.set_minor_locator(NullLocator())
        _outer_labels(axes, field_label("world_size", ranks), "efficiency (%)" if scale > 1 else "speed-up")
        handles = [
            Line2D([], [], color=colours[b], marker=markers[b], markersize=5, label=value_label(batch, b, ranks))
            for b in batches
        ]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="ideal"))
        _legend(figure, handles)
    return figure


def _errors(axis: Any, points: pd.DataFrame, value: str, scale: float, colours: pd.Series) -> None:
    """The 95 % intervals, and a small mark for each point: also for layouts on more nodes, which no line joins."""
    for (_, point), colour in zip(points.iterrows(), colours, strict=True):
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
    """Phases of a step in milliseconds, stacked, a bar for each configuration; a panel for each batch, on its own scale."""
    found = analysis.configurations
    if found.empty:
        return None
    values = found[list(PHASES)].astype(float) * 1e3
    found = found[values.notna().any(axis=1)]
    if found.empty:
        return None
    values = values.loc[found.index].fillna(0.0)
    drawn = [name for name in PHASES if (values[name] > 0).any()]
    ranks = study_ranks(analysis)
    names = [*(name for name in _facet_fields(analysis)), "world_size"]
    colours = dict(zip(PHASES, sns.color_palette("colorblind", len(PHASES)), strict=True))
    panels = list(found.groupby("batch_per_gpu"))[:MAX_FACETS]
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    most = max(len(panel) for _, panel in panels)
    with sns.axes_style("whitegrid", rc=_STYLE), plt.rc_context(_TEXT):
        figure, grid = plt.subplots(
            rows, columns, figsize=(9.6, 0.9 + rows * (0.75 + 0.2 * most)), squeeze=False, layout="constrained"
        )
        axes = list(grid.flat)
        for axis, (batch, panel) in zip(axes, panels, strict=False):
            panel = panel.sort_values(names, kind="stable")
            left = np.zeros(len(panel))
            labels = [configuration_label(row, names, ranks) for _, row in panel.iterrows()]
            for name in drawn:
                width = values.loc[panel.index, name].to_numpy()
                axis.barh(range(len(panel)), width, left=left, height=0.72, color=colours[name], linewidth=0)
                left += width
            axis.set_yticks(range(len(panel)), labels)
            axis.invert_yaxis()
            axis.grid(visible=False, axis="y")
            axis.set_title(value_label("batch_per_gpu", batch, ranks))
            axis.set_xlabel("time of a step (ms)")
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        _legend(figure, [Rectangle((0, 0), 1, 1, color=colours[name], label=PHASE_LABELS[name]) for name in drawn])
    return figure


PLOTS: Mapping[str, Callable[[Analysis], Figure | None]] = {
    "speed_up_weak": speed_up_weak,
    "efficiency_weak": efficiency_weak,
    "speed_up_strong": speed_up_strong,
    "efficiency_strong": efficiency_strong,
    "phases": phases,
}


def caption(name: str) -> str:
    """What a figure shows, in one sentence."""
    return (PLOTS[name].__doc__ or "").strip()


def render(figure: Figure) -> tuple[str, bytes]:
    """The figure as SVG (the same text for the same figure) and as PNG on white, 160 dots an inch; closes it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, for both
    svg, png = io.StringIO(), io.BytesIO()
    with plt.rc_context(_TEXT):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    plt.close(figure)
    return svg.getvalue(), png.getvalue()


def _facet_fields(analysis: Analysis) -> list[str]:
    """Fields that vary and are neither on the axis nor a colour."""
    axes = [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]
    return [*(["device_name"] if "device" in analysis.unlike else []), *axes]


def _grid_of_axes(count: int, *, sharey: bool) -> tuple[Figure, list[Any]]:
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
    if count > shown:
        figure.suptitle(f"the first {shown} of {count} panels ({percent(shown / count)})")
    return figure, axes[:shown]


def _outer_labels(axes: list[Any], x_label: str, y_label: str) -> None:
    for axis in axes:
        place = axis.get_subplotspec()
        below = place.rowspan.stop * place.get_gridspec().ncols + place.colspan.start
        if below >= len(axes):  # nothing under it: the last of its column
            axis.set_xlabel(x_label)
            axis.tick_params(labelbottom=True)
        if place.is_first_col():
            axis.set_ylabel(y_label)


def _legend(figure: Figure, handles: list[Any]) -> None:
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 5))
