"""Figures of steps: the timeline of one step on all ranks, and the loss over the steps of a trial."""

import textwrap
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis.figures.bars import identifying_label
from analysis.figures.style import (
    INK,
    LINE_INCHES,
    NARROW_INCHES,
    STYLE,
    TEXT,
    column_count,
    filled,
    grid_of_axes,
    is_narrow,
    legend,
    outer_labels,
    wrapped,
)
from analysis.study import Analysis, study_ranks
from analysis.text import number, telling_label, value_label

_SPAN_LABELS = {
    "compute": "load wait, forward, backward",
    "optimizer": "optimizer and other",
    "hidden": "all-reduce, hidden",
    "exposed": "all-reduce, exposed",
    "wait": "wait for a later rank",
}

MOST_RANKS = 16
"""Maximum ranks in the timeline; only the first ones are drawn."""

_MOST_CUTS = 3
"""Maximum gaps that the timeline cuts out; more would make its panels too narrow."""

_EDGED_POINTS = 5.0
"""Minimum width of a timeline bar with an edge, in points of 1/72 inch."""


def communication_spans(rows: pd.DataFrame) -> list[tuple[float, float]]:
    """Return the (start, end) parts of a step that the timeline shows, in seconds and in order.

    rows: columns `TIMELINE_COLUMNS`, with at least one row of the lane "all-reduce". The parts are the all-reduces with
    a margin on both sides. Gaps longer than all all-reduces together are cut out, at most the `_MOST_CUTS` longest.
    """
    busy: list[list[float]] = []
    for start, end in sorted(rows.loc[rows["lane"] == "all-reduce", ["begin_s", "end_s"]].itertuples(index=False)):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(end, busy[-1][1])
        else:
            busy.append([start, end])
    reduced_s = sum(end - start for start, end in busy)
    gaps = sorted((after[0] - before[1], i) for i, (before, after) in enumerate(pairwise(busy)))
    cuts = sorted(i for gap_s, i in gaps[-_MOST_CUTS:] if gap_s > reduced_s)
    firsts, lasts = [0, *(i + 1 for i in cuts)], [*cuts, len(busy) - 1]
    spans = [(busy[first][0], busy[last][1]) for first, last in zip(firsts, lasts, strict=True)]
    margin_s = 0.1 * sum(end - start for start, end in spans)
    middles = [(before[1] + after[0]) / 2 for before, after in pairwise(spans)]
    lower, upper = [0.0, *middles], [*middles, float(rows["end_s"].max())]
    return [
        (max(start - margin_s, low), min(end + margin_s, high))
        for (start, end), low, high in zip(spans, lower, upper, strict=True)
    ]


def timeline(analysis: Analysis) -> Figure | None:
    """The part of one step with all-reduces, per rank: compute above, all-reduces of the gradient buckets below.

    Times are relative to the start of the rank's own step, since clocks of different ranks are not compared. Long gaps
    between all-reduces are cut out; all panels share one scale.
    """
    rows = analysis.timeline
    if not (rows["lane"] == "all-reduce").any():
        return None
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    rows = rows[rows["rank"].isin(ranks)]
    palette = sns.color_palette("colorblind")
    colours = dict(zip(_SPAN_LABELS, (palette[0], palette[4], palette[2], palette[3], palette[1]), strict=True))
    trial = analysis.measured.set_index("trial_id").loc[rows["trial_id"].iloc[0]]
    names = ["batch_per_gpu", *(name for name in analysis.axes if name != "batch_per_gpu")]
    label = telling_label(analysis.measured, trial, names, study_ranks(analysis))
    spans = [(1e3 * start, 1e3 * end) for start, end in communication_spans(rows)]
    lengths = [end - start for start, end in spans]
    shown, step = (number(ms, 3 if ms < 1 else 1) for ms in (sum(lengths), 1e3 * rows["end_s"].max()))
    title = f"{label}: {shown} ms around the all-reduces of a step of {step} ms"
    title = textwrap.fill(title, 44 if is_narrow() else 100)
    legend_inches = 1.2 + (0.16 * len(_SPAN_LABELS) if is_narrow() else 0)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            1,
            len(spans),
            figsize=(
                NARROW_INCHES if is_narrow() else 9.6,
                legend_inches + LINE_INCHES * (1 + title.count("\n")) + 0.5 * len(ranks),
            ),
            sharey=True,
            squeeze=False,
            width_ratios=lengths,
            layout="constrained",
        )
        axes = list(grid.flat)
        points_per_ms = 72 * 0.85 * figure.get_figwidth() / sum(lengths)
        for axis, (low, high) in zip(axes, spans, strict=True):
            for row in rows[(1e3 * rows["end_s"] > low) & (1e3 * rows["begin_s"] < high)].to_dict("records"):
                position = ranks.index(row["rank"])
                length = 1e3 * (row["end_s"] - row["begin_s"])
                # Edges separate adjacent buckets, but would hide very narrow ones.
                edged = row["lane"] == "all-reduce" and length * points_per_ms > _EDGED_POINTS
                axis.barh(
                    position - 0.19 if row["lane"] == "compute" else position + 0.19,
                    length,
                    left=1e3 * row["begin_s"],
                    height=0.34,
                    color=colours[str(row["kind"])],
                    linewidth=0.4 if edged else 0.0,
                    edgecolor=INK,
                )
            axis.set_xlim(low, high)
            axis.xaxis.set_major_locator(
                MaxNLocator(max(1, int((4 if is_narrow() else 9) * (high - low) / sum(lengths))))
            )
            axis.ticklabel_format(axis="x", useOffset=False)
            axis.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes[0].set_ylim(len(ranks) - 0.5, -0.5)
        axes[0].set_title(title, loc="left")
        cut = "; gaps without all-reduces are cut" if len(spans) > 1 else ""
        below = filled(f"time since the start of the rank's step (ms){cut}", 48 if is_narrow() else 100)
        figure.supxlabel(below, fontsize=TEXT["font.size"])
        legend(
            figure,
            [
                Patch(color=colours[kind], label=text)
                for kind, text in _SPAN_LABELS.items()
                if (rows["kind"] == kind).any()
            ],
        )
    return figure


_LINES = ("precision", "parallel", "execution")
"""Candidate fields for the lines of the loss figure; the first that varies is used, else the batch."""

_LEARNING = (
    "model", "dataset", "world_size", "batch_per_gpu", "accumulation_steps", "sync_batch_norm", "broadcast_buffers",
    "augment", "order", "set_epoch", "learning_rate", "momentum", "weight_decay", "seed", *_LINES,
)  # fmt: skip
"""Fields that affect learning and therefore get panels; configurations that differ in others share a line."""


def loss(analysis: Analysis) -> Figure | None:
    """Training loss by step (warm-up, plain and phases windows), mean over ranks and median over repeats.

    A line is the mean of configurations that learn the same. It has gaps at non-finite losses.
    """
    rows = analysis.loss_curves
    if rows["loss"].isna().all():
        return None
    ranks = study_ranks(analysis)
    configurations = analysis.configurations
    line = next((name for name in _LINES if name in analysis.axes), "batch_per_gpu")
    rest = [name for name in analysis.axes if name != line and name in _LEARNING]
    known = configurations.loc[configurations.index.isin(rows.dropna(subset="loss")["configuration"])]
    panels = list(known.groupby(rest, dropna=False)) if rest else [((), known)]
    varying = [name for i, name in enumerate(rest) if len({str(key[i]) for key, _ in panels}) > 1]
    kinds = sorted(configurations[line].dropna().unique()) if line in configurations else []
    colours = dict(zip(kinds, sns.color_palette("colorblind", len(kinds)), strict=True))
    styles = dict(zip(kinds, ["-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1))] * len(kinds), strict=False))
    curves: dict[Any, pd.Series] = {
        index: curve.set_index("step")["loss"] for index, curve in rows.groupby("configuration")
    }
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        for axis, (_, panel) in zip(axes, panels, strict=False):
            for kind, rows_of_kind in panel.groupby(line, dropna=False) if line in panel else [(None, panel)]:
                if same := [curves[index] for index in rows_of_kind.index if index in curves]:
                    curve = pd.concat(same, axis="columns").mean(axis="columns", skipna=False)
                    axis.plot(
                        curve.index,
                        curve,
                        color=colours.get(kind, INK),  # a user's own code may lack the field
                        linestyle=styles.get(kind, "-"),
                        linewidth=1.3,
                    )
            title = identifying_label(known, panel.iloc[0], varying, ranks, only=varying)
            axis.set_title(wrapped(title, column_count(len(panels))))
        # Otherwise the layout would change the ticks, and thereby the room that it left for their labels.
        axes[0].yaxis.set_major_locator(MaxNLocator(5))
        outer_labels(axes, "step", "loss")
        legend(
            figure,
            [Line2D([], [], color=colours[k], linestyle=styles[k], label=value_label(line, k, ranks)) for k in kinds],
        )
    return figure
