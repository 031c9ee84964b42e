"""Figures of training trials: accuracy by batch, training curves, and learning rates."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from analysis.compare.accuracy import Accuracy
from analysis.figures.style import INK, MARKERS, NARROW_INCHES, STYLE, TEXT, is_narrow, legend, wrapped
from analysis.study import Analysis

_MOST_COLUMNS = 4


def accuracy_batch(analysis: Analysis) -> Figure | None:
    """Held-out accuracy after the last epoch by global batch, one line per recipe (bands: 95 % over seeds).

    Dashed: plain reference, its interval in grey. Dotted: the critical batch with its interval, if noise was measured.
    """
    accuracy = analysis.accuracy
    if accuracy is None or accuracy.lossless_batches.empty:
        return None
    shown = accuracy.cells[accuracy.cells["is_chosen"]]
    names = list(dict.fromkeys(accuracy.cells.sort_values("recipe_number", kind="stable")["recipe"]))
    colours = dict(zip(names, sns.color_palette("colorblind", len(names)), strict=True))
    batches = sorted(shown["global_batch"].unique())
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        size = (NARROW_INCHES, 3.6) if is_narrow() else (7.2, 4.0)
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        plain = shown[shown["is_reference"] & (shown["recipe"] == accuracy.plain)]
        handles: list[Any] = []
        for _, row in plain.iterrows():
            axis.axhline(100 * row["top1"], color=INK, linestyle=(0, (4, 3)), linewidth=1)
            handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="plain reference"))
            if pd.notna(row["top1_low"]):
                axis.axhspan(100 * row["top1_low"], 100 * row["top1_high"], color=INK, alpha=0.10, linewidth=0)
        for i, name in enumerate(names):
            line = shown[shown["recipe"] == name].sort_values("global_batch")
            nudge = 2 ** (0.08 * (i - (len(names) - 1) / 2))
            marker = MARKERS[i % len(MARKERS)]
            style = {"color": colours[name], "marker": marker, "markersize": 5, "linewidth": 1.3}
            x, y = line["global_batch"] * nudge, 100 * line["top1"]
            axis.plot(x, y, **style)
            if line["top1_low"].notna().all():
                axis.fill_between(
                    x, 100 * line["top1_low"], 100 * line["top1_high"], color=colours[name], alpha=0.15, linewidth=0
                )
            handles.append(Line2D([], [], label=name, **style))
        critical = accuracy.lossless_batches.dropna(subset="critical_batch")
        critical = (
            critical[critical["recipe"] == accuracy.plain] if (critical["recipe"] == accuracy.plain).any() else critical
        )
        for _, row in critical.iloc[:1].iterrows():
            axis.axvline(row["critical_batch"], color=INK, linestyle=":", linewidth=1.2)
            label = f"critical batch, {row['recipe']} (estimated)"
            handles.append(Line2D([], [], color=INK, linestyle=":", linewidth=1.2, label=label))
            if pd.notna(row["critical_batch_low"]):
                axis.axvspan(row["critical_batch_low"], row["critical_batch_high"], color=INK, alpha=0.07, linewidth=0)
        percent = 100 * shown[["top1", "top1_low", "top1_high"]].to_numpy(dtype=float)
        low, high = float(np.nanmin(percent)), float(np.nanmax(percent))
        margin = 0.08 * max(high - low, 1.0)
        axis.set_ylim(max(0.0, low - margin), min(100.0, high + margin))
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches], rotation=40 if is_narrow() else 0)
        axis.minorticks_off()
        axis.set_xlim(min(batches) / 1.5, max(batches) * 1.5)
        axis.set_xlabel("global batch")
        axis.set_ylabel("held-out accuracy (%)")
        legend(figure, handles)
    return figure


def training_curves(analysis: Analysis) -> Figure | None:
    """Held-out accuracy (top) and training loss (bottom) by epoch, one panel per recipe and one line per global batch.

    Lines are means over seeds; bands are the range of the seeds.
    """
    accuracy = analysis.accuracy
    if accuracy is None or accuracy.epochs["epoch"].max() < 2:
        return None
    rows = curve_rows(accuracy)
    names = list(dict.fromkeys(rows["recipe"]))[: _MOST_COLUMNS * 2]
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        columns, width = _columns(len(names))
        blocks = -(-len(names) // columns)
        figure, grid = plt.subplots(
            2 * blocks, columns, figsize=(width, 4.6 * blocks), squeeze=False, sharex=True, layout="constrained"
        )
        colours = _batch_colours(rows)
        for axis in grid.flat:
            axis.set_visible(False)
        for number, name in enumerate(names):
            block, column = divmod(number, columns)
            for line, (value, scale, label) in enumerate(
                (("validation_top1", 100.0, "held-out accuracy (%)"), ("train_loss", 1.0, "training loss"))
            ):
                axis = grid[2 * block + line, column]
                axis.set_visible(True)
                _curves(axis, rows[rows["recipe"] == name], value, scale, colours)
                values = scale * rows[[value, f"{value}_min", f"{value}_max"]].stack()
                if value == "validation_top1" and len(values):
                    axis.set_ylim(max(0, values.min() - 3), min(100, values.max() + 3))
                if value == "train_loss" and len(values) and values.min() > 0:
                    axis.set_yscale("log")
                    axis.set_ylim(0.8 * values.min(), 1.25 * values.max())
                    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                    axis.yaxis.set_minor_locator(NullLocator())
                if line == 0 and len(names) > 1:
                    axis.set_title(wrapped(name, columns))
                if line == 1:
                    axis.set_xlabel("epoch")
                    axis.tick_params(labelbottom=True)
                if column == 0:
                    axis.set_ylabel(label)
        legend(figure, _batch_handles(colours))
    return figure


def lr_schedules(analysis: Analysis) -> Figure | None:
    """Learning rate at the end of each epoch, one panel per recipe and one line per global batch."""
    accuracy = analysis.accuracy
    if accuracy is None or accuracy.epochs["epoch"].max() < 2 or accuracy.epochs["learning_rate"].isna().all():
        return None
    rows = curve_rows(accuracy).dropna(subset="learning_rate")
    names = list(dict.fromkeys(rows["recipe"]))[: _MOST_COLUMNS * 2]
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        columns, width = _columns(len(names))
        lines = -(-len(names) // columns)
        figure, grid = plt.subplots(
            lines, columns, figsize=(width, 0.6 + 2.4 * lines), squeeze=False, sharex=True, layout="constrained"
        )
        colours = _batch_colours(rows)
        for axis, name in zip(grid.flat, names, strict=False):
            _curves(axis, rows[rows["recipe"] == name], "learning_rate", 1.0, colours)
            if len(names) > 1:
                axis.set_title(wrapped(name, columns))
            axis.set_xlabel("epoch")
            axis.tick_params(labelbottom=True)
        for axis in list(grid.flat)[len(names) :]:
            axis.set_visible(False)
        for line in grid:
            line[0].set_ylabel("learning rate")
        legend(figure, _batch_handles(colours))
    return figure


def _columns(panels: int) -> tuple[int, float]:
    """Return the columns of a grid of panels, and its width in inches."""
    if is_narrow():
        return min(panels, 2), NARROW_INCHES
    columns = min(panels, _MOST_COLUMNS)
    return columns, max(4.8, 2.4 * columns)


def curve_rows(accuracy: Accuracy) -> pd.DataFrame:
    """Return one row per recipe, batch and epoch, aggregated over seeds.

    Columns: recipe, global_batch, made_of, epoch, and mean, `_min` and `_max` over seeds of validation_top1, train_loss
    and learning_rate. Only the layout chosen for each batch is included.
    """
    chosen = accuracy.cells[accuracy.cells["is_chosen"]].sort_values(["recipe_number", "global_batch"], kind="stable")
    parts = []
    for _, cell in chosen.iterrows():
        epochs = accuracy.epochs[accuracy.epochs["trial_id"].isin(cell["trial_ids"])]
        by_epoch = epochs.groupby("epoch")[["validation_top1", "train_loss", "learning_rate"]]
        part = pd.concat(
            [by_epoch.mean(), by_epoch.min().add_suffix("_min"), by_epoch.max().add_suffix("_max")], axis=1
        ).reset_index()
        parts.append(part.assign(recipe=cell["recipe"], global_batch=cell["global_batch"], made_of=cell["made_of"]))
    frame = pd.concat(parts, ignore_index=True)
    first = ["recipe", "global_batch", "made_of", "epoch"]
    return frame[[*first, *(name for name in frame if name not in first)]]


def _curves(axis: Any, rows: pd.DataFrame, value: str, scale: float, colours: dict[int, Any]) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half epoch
    for batch, line in rows.groupby("global_batch"):
        colour = colours[int(str(batch))]
        axis.plot(line["epoch"], scale * line[value], color=colour, linewidth=1.3)
        axis.fill_between(
            line["epoch"],
            scale * line[f"{value}_min"],
            scale * line[f"{value}_max"],
            color=colour,
            alpha=0.2,
            linewidth=0,
        )


def _batch_colours(rows: pd.DataFrame) -> dict[int, Any]:
    """Return a sequential palette, since batches are ordered; it is readable without colour vision."""
    batches = sorted(rows["global_batch"].unique())
    return dict(zip(map(int, batches), sns.color_palette("viridis", len(batches)), strict=True))


def _batch_handles(colours: dict[int, Any]) -> list[Any]:
    return [Patch(color=colour, label=f"global batch {batch:,}") for batch, colour in colours.items()]
