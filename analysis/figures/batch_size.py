"""Figures of throughput by batch size, and of the acceleration ladder as a waterfall."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from analysis.compare.batch_size import OUT_OF_MEMORY
from analysis.compare.ladder import OURS
from analysis.figures.style import (
    GRID,
    INK,
    MARKERS,
    MOST_DIRECT_LABELS,
    NARROW_INCHES,
    STYLE,
    TEXT,
    LineEnd,
    column_count,
    facet_fields,
    filled,
    grid_of_axes,
    hollow,
    hollow_handle,
    is_narrow,
    label_ends,
    legend,
    limits,
    outer_labels,
    wrapped,
)
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, field_label, value_label

_LINES = ("precision", "execution", "parallel", "storage", "memory_format")
"""Candidate fields for the lines of the batch figure; the first that varies is used."""


def batch_size(analysis: Analysis) -> Figure | None:
    """Throughput of one rank by batch size, with 95 % intervals as bands; crosses: out of memory."""
    curve = analysis.batch_curve
    if curve.empty or curve["throughput_samples_per_s"].isna().all():
        return None
    ranks = study_ranks(analysis)
    varied = facet_fields(analysis)
    line = next((name for name in _LINES if name in varied), None)
    rest = [name for name in varied if name != line]
    panels = list(curve.groupby(rest, dropna=False)) if rest else [((), curve)]
    kinds = list(dict.fromkeys(curve[line])) if line else [None]
    colours = dict(zip(kinds, sns.color_palette("colorblind", len(kinds)), strict=True))
    tried = curve[curve["throughput_samples_per_s"].notna() | (curve["outcome"] == OUT_OF_MEMORY)]
    batches = sorted(tried["batch_per_gpu"].unique())
    is_wide = curve["throughput_samples_per_s_more"] > 0
    value, low, high = (curve[f"throughput_samples_per_s{end}"] for end in ("", "_low", "_high"))
    highest = max(1.06 * float(value.max()), limits(value.dropna(), low.mask(is_wide), high.mask(is_wide))[1])
    has_lost = bool((curve["outcome"] == OUT_OF_MEMORY).any())
    with_legend = len(kinds) > MOST_DIRECT_LABELS
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        for axis, (key, panel) in zip(axes, panels, strict=False):
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
            axis.minorticks_off()
            axis.set_xlim(min(batches) / 1.3, max(batches) * 1.3)
            axis.set_ylim(0, highest)
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            ends = []
            for i, kind in enumerate(kinds):
                points = panel if line is None else panel[panel[line] == kind]
                end = _curve(axis, points, colours[kind], MARKERS[i % len(MARKERS)])
                if end is not None and line:
                    ends.append(LineEnd(*end, value_label(line, kind, ranks)))
                lost = points[points["outcome"] == OUT_OF_MEMORY]
                axis.scatter(
                    lost["batch_per_gpu"] * 2 ** (0.08 * (i - (len(kinds) - 1) / 2)),
                    [0.03 * highest] * len(lost),
                    marker="x",
                    s=42,
                    color=colours[kind],
                    linewidths=2,
                    zorder=4,
                )
            if not with_legend:
                label_ends(axis, ends)
            title = dict(zip(rest, key, strict=True))
            axis.set_title(wrapped(configuration_label(title, rest, ranks), column_count(len(panels))))
        outer_labels(axes, field_label("batch_per_gpu", ranks), "samples/s")
        handles = [
            Line2D(
                [],
                [],
                color=colours[kind],
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                label=value_label(line, kind, ranks),
            )
            for i, kind in enumerate(kinds)
            if line and with_legend
        ]
        if has_lost:
            handles.append(Line2D([], [], color=INK, marker="x", linestyle="none", markersize=6, label="out of memory"))
        handles += [hollow_handle()] * bool(is_wide.any())
        if handles:
            legend(figure, handles)
    return figure


def _curve(axis: Any, points: pd.DataFrame, colour: Any, marker: str) -> tuple[float, float] | None:
    """Draw the measured batches with a band of intervals, and return the last point; None if none is measured."""
    known = points.dropna(subset="throughput_samples_per_s")
    if known.empty:
        return None
    x, y = known["batch_per_gpu"], known["throughput_samples_per_s"]
    wide = known["throughput_samples_per_s_more"] > 0
    low, high = (known[f"throughput_samples_per_s_{end}"].mask(wide).fillna(y) for end in ("low", "high"))
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.plot(x, y, color=colour, linewidth=1.5)
    axis.plot(x[~wide], y[~wide], linestyle="none", marker=marker, markersize=5, color=colour)
    hollow(axis, x[wide], y[wide], colour, marker)
    return float(x.iloc[-1]), float(y.iloc[-1])


def ladder(analysis: Analysis) -> Figure | None:
    """Acceleration ladder as a waterfall: time per sample (dark) and time saved (light) at each step, and speed-up.

    Speed-ups are relative to the first step. Steps of this study come first, then published ones of other machines.
    """
    rows = analysis.ladder
    if rows.empty:
        return None
    machines = list(rows.groupby("machine", sort=False))
    heights = [0.75 + (0.42 if is_narrow() else 0.27) * len(steps) for _, steps in machines]
    colours = [sns.color_palette("colorblind")[machine != OURS] for machine, _ in machines]
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            len(machines),
            1,
            figsize=(NARROW_INCHES if is_narrow() else 7.2, 0.5 + sum(heights)),
            squeeze=False,
            layout="constrained",
            gridspec_kw={"height_ratios": heights},
        )
        for axis, (machine, steps), colour in zip(grid.flat, machines, colours, strict=True):
            _waterfall(axis, steps, colour)
            axis.set_title(filled(str(machine), 30) if is_narrow() else str(machine))
        grid.flat[-1].set_xlabel("time per sample (µs)")
        legend(figure, [Patch(color=colours[0], label="time"), Patch(facecolor=GRID, label="saved by this step")])
    return figure


def _waterfall(axis: Any, steps: Any, colour: Any) -> None:
    """Draw a bar per step: its time, and in grey the time saved over the step that it is compared with."""
    times = 1e6 / steps["throughput_samples_per_s"].to_numpy(dtype=float)
    before = times * steps["step_ratio"].astype(float).fillna(1.0).to_numpy()
    positions = range(len(times))
    axis.barh(positions, times, height=0.72, color=colour, linewidth=0)
    axis.barh(positions, np.maximum(before - times, 0), left=times, height=0.72, color=GRID, linewidth=0)
    ratios = zip(steps["cumulative_ratio"], steps["cumulative_ratio_more"], np.maximum(before, times), strict=True)
    for position, (ratio, more, end) in zip(positions, ratios, strict=True):
        shown = "not resolved" if more > 0 else f"{ratio:.2f}×"
        axis.annotate(shown, (end, position), xytext=(4, 0), textcoords="offset points", va="center")
    axis.set_xlim(0, 1.12 * max(before.max(), times.max()))
    axis.set_yticks(list(positions), [filled(str(name), 22) if is_narrow() else str(name) for name in steps["step"]])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
