"""Figures of communication: parts of the slowdown, and all-reduce bandwidth alone and in training."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from analysis.compare.causes import SLOWDOWN_PARTS
from analysis.figures.bars import stacked_bars
from analysis.figures.style import (
    INK,
    MARKERS,
    STYLE,
    TEXT,
    facet_fields,
    grid_of_axes,
    legend,
    outer_labels,
    wrapped,
)
from analysis.measure.allreduce import KEYS
from analysis.study import Analysis, study_ranks
from analysis.text import GB, SLOWDOWN_LABELS, configuration_label, size

VISIBLE_SPAN = 10_000
"""Ratio of the largest to the smallest bus bandwidth shown."""


def slowdown(analysis: Analysis) -> Figure | None:
    """Causes of the slowdown with more ranks at a constant batch per rank; negative ones are stacked to the left."""
    rows = analysis.communication.slowdown.set_index("configuration")
    if rows.empty:
        return None
    values = rows[list(SLOWDOWN_PARTS)].astype(float).fillna(0.0) * 1e3
    drawn = [name for name in SLOWDOWN_PARTS if (values[name] != 0).any()]
    if len(drawn) < 2:
        return None
    return stacked_bars(
        analysis.configurations.loc[rows.index],
        values[drawn],
        SLOWDOWN_LABELS,
        [*facet_fields(analysis), "world_size"],
        study_ranks(analysis),
        "longer than on the fewest (ms)",
        rows["growth_s"] * 1e3,
        analysis.headline,
    )


def bus_bandwidth(analysis: Analysis) -> Figure | None:
    """Bus bandwidth of all-reduces by message size.

    Lines: measured on otherwise idle ranks. Dashed: fit of latency and bandwidth. Crosses: gradient buckets in
    training. Panels numbered by place: equal ranks on other devices or hosts.
    """
    sweep, fits = analysis.communication.sweep, analysis.communication.fits
    if sweep.empty:
        return None
    # Small messages only show latency and would compress the rest of the axis.
    shown = sweep[sweep["bus_bytes_per_s"] >= sweep["bus_bytes_per_s"].max() / VISIBLE_SPAN]
    ranks = study_ranks(analysis)
    panel_keys = [
        name for name in KEYS if name not in ("world_size", "nodes") and sweep[name].nunique(dropna=False) > 1
    ]
    if (sweep["interconnect"] != "auto").any() and "interconnect" not in panel_keys:
        panel_keys.insert(0, "interconnect")
    curve_keys = ["world_size", *(["nodes"] if sweep["nodes"].nunique() > 1 else [])]
    curves = [key for key, _ in sweep.groupby(curve_keys)]
    colours = dict(zip(curves, sns.color_palette("colorblind", len(curves)), strict=True))
    panels = list(sweep.groupby(panel_keys, dropna=False)) if panel_keys else [((), sweep)]
    buckets = _buckets(analysis)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        for axis, (panel_key, panel) in zip(axes, panels, strict=False):
            title = dict(zip(panel_keys, panel_key, strict=True))
            for key, curve in panel.groupby(curve_keys):
                colour = colours[key]
                style = {"marker": MARKERS[curves.index(key) % len(MARKERS)], "markersize": 3.5, "markeredgewidth": 0}
                axis.plot(curve["bytes"], curve["bus_bytes_per_s"] / GB, color=colour, linewidth=1.3, **style)
                group = title | dict(zip(curve_keys, key, strict=True))
                for _, fitted in _rows_with(fits, group).iterrows():
                    x = np.geomspace(curve["bytes"].min(), curve["bytes"].max(), 100)
                    factor = fitted["bus_bytes_per_s"] / fitted["algorithm_bytes_per_s"]
                    y = factor * x / (fitted["latency_s"] + x / fitted["algorithm_bytes_per_s"])
                    axis.plot(x, y / GB, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
                points = _rows_with(buckets, group)
                axis.plot(points["bytes"], points["bus_bytes_per_s"] / GB, "x", color=colour, markersize=5)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(0, 45, 5)]))
            axis.minorticks_off()
            axis.set_xlim(shown["bytes"].min() / 1.5, shown["bytes"].max() * 1.5)
            axis.set_ylim(bottom=shown["bus_bytes_per_s"].min() / GB / 1.5)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_title(wrapped(configuration_label(title, panel_keys, ranks), 4))
        outer_labels(axes, "message size", "bus bandwidth (GB/s)")
        handles = [
            Line2D(
                [],
                [],
                color=colours[key],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                label=_label(curve_keys, key, ranks),
            )
            for i, key in enumerate(curves)
        ]
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="fit"))
        if len(buckets):
            handles.append(
                Line2D([], [], color=INK, linestyle="none", marker="x", markersize=5, label="buckets in training")
            )
        legend(figure, handles)
    return figure


def _label(names: list[str], key: Any, ranks: tuple[str, str]) -> str:
    return configuration_label(dict(zip(names, key, strict=True)), names, ranks)


def _rows_with(frame: pd.DataFrame, values: dict[str, object]) -> pd.DataFrame:
    """Return the rows of `frame` with these values; columns that it lacks are ignored."""
    mask = pd.Series(True, index=frame.index)
    for name, value in values.items():
        if name in frame:
            mask &= frame[name] == value
    return frame[mask]


def _buckets(analysis: Analysis) -> pd.DataFrame:
    """Return the buckets of every configuration and rank group, with the fields that identify their sweep."""
    keys = [name for name in KEYS if name in analysis.configurations]
    return analysis.communication.placed_buckets.join(analysis.configurations[keys], on="configuration")
