"""Figures on communication: why a step takes longer, and the bus bandwidth of the ceiling and of training."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from analysis.compare.communication import SLOWDOWN_PARTS
from analysis.figures.style import (
    INK,
    MARKERS,
    STYLE,
    TEXT,
    facet_fields,
    grid_of_axes,
    legend,
    outer_labels,
    stacked_bars,
    wrapped,
)
from analysis.measure.allreduce import KEYS
from analysis.study import Analysis, study_ranks
from analysis.text import GB, SLOWDOWN_LABELS, configuration_label, size

VISIBLE_SPAN = 10_000
"""Largest bus bandwidth / smallest that the figure shows."""


def slowdown(analysis: Analysis) -> Figure | None:
    """What makes a step longer on more ranks with the batch per rank held, in milliseconds; parts below zero are stacked to the left."""
    rows = analysis.communication.slowdown.set_index("configuration")
    if rows.empty:
        return None
    values = rows[list(SLOWDOWN_PARTS)].astype(float).fillna(0.0) * 1e3
    drawn = [name for name in SLOWDOWN_PARTS if (values[name] != 0).any()]
    return stacked_bars(
        analysis.configurations.loc[rows.index],
        values[drawn],
        SLOWDOWN_LABELS,
        [*facet_fields(analysis), "world_size"],
        study_ranks(analysis),
        "longer than on the fewest (ms)",
        rows["slower_s"] * 1e3,
    )


def bus_bandwidth(analysis: Analysis) -> Figure | None:
    """Bus bandwidth of an all-reduce over its size: measured alone (lines), fitted as latency and bandwidth (dashed), and the gradient buckets in training (crosses)."""
    sweep, fits = analysis.communication.sweep, analysis.communication.fits
    if sweep.empty:
        return None
    # Small messages only show the latency, and would press the rest together.
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
                place = title | dict(zip(curve_keys, key, strict=True))
                for _, fitted in _of(fits, place).iterrows():
                    x = np.geomspace(curve["bytes"].min(), curve["bytes"].max(), 100)
                    factor = fitted["bus_bytes_per_s"] / fitted["algorithm_bytes_per_s"]
                    y = factor * x / (fitted["latency_s"] + x / fitted["algorithm_bytes_per_s"])
                    axis.plot(x, y / GB, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
                points = _of(buckets, place)
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
        outer_labels(axes, "size of the message", "bus bandwidth (GB/s)")
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
    return figure  # fmt: skip


def _label(names: list[str], key: Any, ranks: tuple[str, str]) -> str:
    return configuration_label(dict(zip(names, key, strict=True)), names, ranks)


def _of(frame: pd.DataFrame, place: dict[str, object]) -> pd.DataFrame:
    """The rows of `frame` with these values, as far as it has the columns."""
    keep = pd.Series(True, index=frame.index)
    for name, value in place.items():
        if name in frame:
            keep &= frame[name] == value
    return frame[keep]


def _buckets(analysis: Analysis) -> pd.DataFrame:
    """Buckets of every configuration and place with what their ceiling is told apart by."""
    keys = [name for name in KEYS if name in analysis.configurations]
    return analysis.communication.placed_buckets.join(analysis.configurations[keys], on="configuration")
