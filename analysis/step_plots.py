"""Figures of steps: one step over its ranks, from the account of the all-reduces; and losses over the steps of a trial."""

from functools import lru_cache
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from analysis.columns import study_ranks
from analysis.communication import WINDOW, bucket_rows
from analysis.drawing import INK, STYLE, TEXT, grid_of_axes, legend, outer_labels, wrapped
from analysis.formatting import configuration_label, value_label
from analysis.measures import configuration_of
from analysis.scaling import Analysis

_SPAN_LABELS = {
    "compute": "load wait, forward, backward",
    "optimizer": "optimizer and the rest",
    "hidden": "all-reduce, hidden",
    "exposed": "all-reduce, exposed",
    "wait": "wait for a later rank",
}

TIMELINE_COLUMNS = ["trial_id", "step", "rank", "lane", "bucket", "kind", "begin_s", "end_s"]

MOST_RANKS = 16
"""Ranks of the timeline; of more, the first are drawn."""


@lru_cache(maxsize=8)
def timeline_rows(analysis: Analysis) -> pd.DataFrame:
    """What one step of each rank is made of: `TIMELINE_COLUMNS`, seconds from the begin of the rank's own step.

    The step is the one of median length of rank 0 in the communication window of the first trial of the fastest
    configuration with the most ranks. lane: "compute" (to the last local gradient, then from the last all-reduce to the
    end of the step) or "all-reduce", whose kinds are those of `_SPAN_LABELS`: a bucket waits first and transfers last.
    """
    empty = pd.DataFrame(columns=TIMELINE_COLUMNS)
    exposed = analysis.communication.exposed
    if exposed.empty:
        return empty
    found = analysis.configurations.loc[exposed.index]
    best = found.sort_values(["world_size", "throughput_samples_per_s"]).iloc[-1]
    results = analysis.results
    trial = results.trials[results.trials["trial_id"] == best["trial_ids"][0]]
    own = results.steps[(results.steps["trial_id"] == best["trial_ids"][0]) & (results.steps["window"] == WINDOW)]
    buckets = bucket_rows(results.buckets, own, trial)
    of_first = own[own["rank"] == own["rank"].min()].sort_values("step_s")
    if buckets.empty or of_first.empty or own["last_gradient_s"].isna().all():
        return empty
    step = of_first.iloc[(len(of_first) - 1) // 2]["step"]
    rows: list[dict[str, object]] = []
    buckets = buckets[buckets["step"] == step]
    for row in own[own["step"] == step].sort_values("rank").itertuples():
        mine = buckets[buckets["rank"] == row.rank]
        common = {"trial_id": row.trial_id, "step": step, "rank": row.rank}
        end_s = max([row.last_gradient_s, *mine["end_s"]])
        rows.append(common | {"lane": "compute", "kind": "compute", "begin_s": 0.0, "end_s": row.last_gradient_s})
        rows.append(common | {"lane": "compute", "kind": "optimizer", "begin_s": end_s, "end_s": row.step_s})
        for bucket in mine.itertuples():
            wire_from_s = bucket.end_s - bucket.wire_s
            cut_s = min(max(wire_from_s, row.last_gradient_s), bucket.end_s)
            parts = (
                ("wait", bucket.start_s, wire_from_s),
                ("hidden", wire_from_s, cut_s),
                ("exposed", cut_s, bucket.end_s),
            )
            rows += [
                common | {"lane": "all-reduce", "bucket": bucket.bucket, "kind": kind, "begin_s": begin, "end_s": end}
                for kind, begin, end in parts
                if end > begin
            ]
    return pd.DataFrame(rows, columns=TIMELINE_COLUMNS)


def timeline(analysis: Analysis) -> Figure | None:
    """One step over its ranks: computing above, the all-reduces of the gradient buckets below, each rank from the begin of its own step, for clocks of ranks are never compared."""
    rows = timeline_rows(analysis)
    if rows.empty:
        return None
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    palette = sns.color_palette("colorblind")
    colours = dict(zip(_SPAN_LABELS, (palette[0], palette[4], palette[2], palette[3], palette[1]), strict=True))
    trial = analysis.measured.set_index("trial_id").loc[rows["trial_id"].iloc[0]]
    label = configuration_label(
        trial, ["batch_per_gpu", *(name for name in analysis.axes if name != "batch_per_gpu")], study_ranks(analysis)
    )
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axis = plt.subplots(figsize=(9.6, 1.2 + 0.5 * len(ranks)), layout="constrained")
        for place, rank in enumerate(ranks):
            for row in rows[rows["rank"] == rank].itertuples():
                y = place - 0.19 if row.lane == "compute" else place + 0.19
                edge = 0.4 if row.lane == "all-reduce" else 0.0  # buckets that follow each other stay apart
                length = 1e3 * (row.end_s - row.begin_s)
                axis.barh(
                    y,
                    length,
                    left=1e3 * row.begin_s,
                    height=0.34,
                    color=colours[str(row.kind)],
                    linewidth=edge,
                    edgecolor=INK,
                )
        axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("time since the rank's own step began (ms)")
        axis.set_title(label)
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


@lru_cache(maxsize=8)
def loss_rows(analysis: Analysis) -> pd.DataFrame:
    """Loss over the steps of the warm-up, plain and phases windows: columns configuration, step and loss.

    Mean over ranks, null where one's is not finite; median over repeats.
    """
    configuration = configuration_of(analysis.configurations)
    mean = analysis.results.losses
    mean = mean.loc[mean["trial_id"].isin(configuration.index), ["trial_id", "step", "loss"]]
    if mean["loss"].isna().all():
        return pd.DataFrame(columns=["configuration", "step", "loss"])
    each = mean.groupby(mean["trial_id"].map(configuration).astype(int))  # by both at once needs more memory
    curves = {index: part.groupby("step")["loss"].median() for index, part in each}
    return pd.concat(curves, names=["configuration"]).reset_index()


def loss(analysis: Analysis) -> Figure | None:
    """Training loss over the steps of a trial (warm-up, plain and phases windows), mean over ranks and median over repeats; a line has a gap where the loss is not finite."""
    rows = loss_rows(analysis)
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
