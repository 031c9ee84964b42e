"""Figures of steps: one step over its ranks, from the account of the all-reduces; and losses over the steps of a trial."""

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

from analysis.figures.style import INK, LINE_INCHES, STYLE, TEXT, grid_of_axes, legend, outer_labels, wrapped
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label, number, value_label

_SPAN_LABELS = {
    "compute": "load wait, forward, backward",
    "optimizer": "optimizer and the rest",
    "hidden": "all-reduce, hidden",
    "exposed": "all-reduce, exposed",
    "wait": "wait for a later rank",
}

MOST_RANKS = 16
"""Ranks of the timeline; of more, the first are drawn."""

_MOST_CUTS = 3
"""Times without an all-reduce that the timeline leaves out; with more, its panels become too narrow."""

_EDGED_POINTS = 5.0
"""Width, of a point in 72 to an inch, from which a bar of the timeline has an edge."""


def communication_spans(rows: pd.DataFrame) -> list[tuple[float, float]]:
    """What of the step the timeline shows, in seconds and in order: its all-reduces, and a little on both sides.

    rows: with `TIMELINE_COLUMNS`, at least one of the lane "all-reduce". What lies between two all-reduces is left out
    where it is longer than all of them together; at most `_MOST_CUTS` of these, the longest.
    """
    busy: list[list[float]] = []
    for begin, end in sorted(rows.loc[rows["lane"] == "all-reduce", ["begin_s", "end_s"]].itertuples(index=False)):
        if busy and begin <= busy[-1][1]:
            busy[-1][1] = max(end, busy[-1][1])
        else:
            busy.append([begin, end])
    reduced_s = sum(end - begin for begin, end in busy)
    gaps = sorted((after[0] - before[1], i) for i, (before, after) in enumerate(pairwise(busy)))
    cuts = sorted(i for gap_s, i in gaps[-_MOST_CUTS:] if gap_s > reduced_s)
    firsts, lasts = [0, *(i + 1 for i in cuts)], [*cuts, len(busy) - 1]
    spans = [(busy[first][0], busy[last][1]) for first, last in zip(firsts, lasts, strict=True)]
    beside_s = 0.1 * sum(end - begin for begin, end in spans)
    middles = [(before[1] + after[0]) / 2 for before, after in pairwise(spans)]
    lower, upper = [0.0, *middles], [*middles, float(rows["end_s"].max())]
    return [
        (max(begin - beside_s, low), min(end + beside_s, high))
        for (begin, end), low, high in zip(spans, lower, upper, strict=True)
    ]


def timeline(analysis: Analysis) -> Figure | None:
    """One step over its ranks, the part of it in which gradients are reduced: computing above, the all-reduces of the gradient buckets below, each rank from the begin of its own step, for clocks of ranks are never compared. Long times without an all-reduce are left out between the panels, which share one scale."""
    rows = analysis.timeline
    if not (rows["lane"] == "all-reduce").any():
        return None
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    rows = rows[rows["rank"].isin(ranks)]
    palette = sns.color_palette("colorblind")
    colours = dict(zip(_SPAN_LABELS, (palette[0], palette[4], palette[2], palette[3], palette[1]), strict=True))
    trial = analysis.measured.set_index("trial_id").loc[rows["trial_id"].iloc[0]]
    label = configuration_label(
        trial, ["batch_per_gpu", *(name for name in analysis.axes if name != "batch_per_gpu")], study_ranks(analysis)
    )
    spans = [(1e3 * begin, 1e3 * end) for begin, end in communication_spans(rows)]
    lengths = [end - begin for begin, end in spans]
    shown, step = (number(ms, 3 if ms < 1 else 1) for ms in (sum(lengths), 1e3 * rows["end_s"].max()))
    title = textwrap.fill(f"{label}: {shown} ms around the all-reduces of a step of {step} ms", 100)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            1,
            len(spans),
            figsize=(9.6, 1.2 + LINE_INCHES * (1 + title.count("\n")) + 0.5 * len(ranks)),
            sharey=True,
            squeeze=False,
            width_ratios=lengths,
            layout="constrained",
        )
        axes = list(grid.flat)
        points_per_ms = 72 * 0.85 * figure.get_figwidth() / sum(lengths)
        for axis, (low, high) in zip(axes, spans, strict=True):
            for row in rows[(1e3 * rows["end_s"] > low) & (1e3 * rows["begin_s"] < high)].to_dict("records"):
                place = ranks.index(row["rank"])
                length = 1e3 * (row["end_s"] - row["begin_s"])
                # Buckets that follow each other stay apart; an edge would hide one that is hardly wider.
                edged = row["lane"] == "all-reduce" and length * points_per_ms > _EDGED_POINTS
                axis.barh(
                    place - 0.19 if row["lane"] == "compute" else place + 0.19,
                    length,
                    left=1e3 * row["begin_s"],
                    height=0.34,
                    color=colours[str(row["kind"])],
                    linewidth=0.4 if edged else 0.0,
                    edgecolor=INK,
                )
            axis.set_xlim(low, high)
            axis.xaxis.set_major_locator(MaxNLocator(max(1, int(9 * (high - low) / sum(lengths)))))
            axis.ticklabel_format(axis="x", useOffset=False)
            axis.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes[0].set_ylim(len(ranks) - 0.5, -0.5)
        axes[0].set_title(title, loc="left")
        figure.supxlabel(
            f"time since the rank's own step began (ms){', cut where nothing is reduced' if len(spans) > 1 else ''}",
            fontsize=TEXT["font.size"],
        )
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
"""Fields that a line of the loss figure may stand for: the first that varies, else the batch."""

_LEARNING = (
    "model", "dataset", "world_size", "batch_per_gpu", "accumulation_steps", "sync_batch_norm", "broadcast_buffers", "augment",
    "order", "set_epoch", "learning_rate", "momentum", "weight_decay", "seed", *_LINES,
)  # fmt: skip
"""Fields that change what is learnt, and so the panel; configurations that differ in others lie over each other."""


def loss(analysis: Analysis) -> Figure | None:
    """Training loss over the steps of a trial (warm-up, plain and phases windows), mean over ranks and median over repeats; a line has a gap where the loss is not finite."""
    rows = analysis.loss_curves
    if rows["loss"].isna().all():
        return None
    ranks = study_ranks(analysis)
    found = analysis.configurations
    line = next((name for name in _LINES if name in analysis.axes), "batch_per_gpu")
    rest = [name for name in analysis.axes if name != line and name in _LEARNING]
    panels = list(found.groupby(rest, dropna=False)) if rest else [((), found)]
    kinds = sorted(found[line].unique()) if line in found else []
    colours = dict(zip(kinds, sns.color_palette("colorblind", len(kinds)), strict=True))
    styles = dict(zip(kinds, ["-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1))] * len(kinds), strict=False))
    curves: dict[Any, pd.Series] = {
        index: curve.set_index("step")["loss"] for index, curve in rows.groupby("configuration")
    }
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(panels), sharey=True)
        for axis, (key, panel) in zip(axes, panels, strict=False):
            for index, row in panel.iterrows():
                if index in curves:
                    axis.plot(
                        curves[index].index,
                        curves[index],
                        color=colours[row[line]],
                        linestyle=styles[row[line]],
                        linewidth=1.3,
                    )
            axis.set_title(
                wrapped(configuration_label(dict(zip(rest, key, strict=True)), rest, ranks), min(4, len(panels)))
            )
        outer_labels(axes, "step", "loss")
        legend(
            figure,
            [Line2D([], [], color=colours[k], linestyle=styles[k], label=value_label(line, k, ranks)) for k in kinds],
        )
    return figure
