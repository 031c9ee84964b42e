"""Stacked bars, one per configuration, and their labels."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.figures.style import (
    COLOURS,
    INK,
    LINE_INCHES,
    NARROW_INCHES,
    STYLE,
    TEXT,
    column_count,
    filled,
    is_narrow,
    legend,
    most_panels,
    note_hidden_panels,
)
from analysis.text import brief_label, configuration_label, telling_fields, value_label

MOST_LABEL_LINES = 4
"""Maximum lines of the label of a bar; longer ones are cut."""

_VISIBLE_SHARE = 0.01
"""Share of the longest bar of its panel below which a part is too small to recognise, and is not in the legend."""


def _bar_labels(
    configurations: pd.DataFrame,
    panels: Sequence[pd.DataFrame],
    varying: Sequence[str],
    ranks: tuple[str, str],
    columns: int,
) -> dict[Any, str]:
    """Return the wrapped labels of all bars, brief ones if one of them had to be cut otherwise."""
    width = 22 if is_narrow() else 64 if columns == 1 else 40
    rows = {index: row for panel in panels for index, row in panel.iterrows()}
    fields = {index: telling_fields(configurations, row, varying) for index, row in rows.items()}

    def lines_of(label: Callable[[pd.Series, list[str]], str]) -> dict[Any, list[str]]:
        return {index: filled(label(row, fields[index]), width).splitlines() for index, row in rows.items()}

    labels = lines_of(lambda row, names: configuration_label(row, names, ranks))
    if any(len(lines) > MOST_LABEL_LINES for lines in labels.values()):
        labels = lines_of(lambda row, names: brief_label(configurations, row, names, ranks))
    return {
        index: "\n".join(lines if len(lines) <= MOST_LABEL_LINES else [*lines[: MOST_LABEL_LINES - 1], "…"])
        for index, lines in labels.items()
    }


def stacked_bars(
    configurations: pd.DataFrame,
    values: pd.DataFrame,
    labels: Mapping[str, str],
    names: Sequence[str],
    ranks: tuple[str, str],
    x_label: str,
    totals: pd.Series | None = None,
) -> Figure:
    """Draw a stacked bar per configuration, labelled by the varying fields of `names`; one panel per batch.

    values: the parts in the unit of the axis, one row per configuration; negative ones are stacked to the left. labels:
    of all possible parts, at most as many as `COLOURS`; their order defines the colours. totals: marked across the bar.
    """
    colours = dict(zip(labels, COLOURS, strict=False))
    varying = [name for name in names if configurations[name].nunique(dropna=False) > 1] or list(names[-1:])
    all_panels = list(configurations.groupby("batch_per_gpu"))
    panels = all_panels[: most_panels()]
    columns = column_count(len(panels), 2)
    rows = -(-len(panels) // columns)
    bars = _bar_labels(configurations, [panel for _, panel in panels], varying, ranks, columns)
    lines = max(label.count("\n") + 1 for label in bars.values())
    most = max(len(panel) for _, panel in panels)
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(NARROW_INCHES if is_narrow() else 9.6, 0.9 + rows * (0.75 + (0.08 + LINE_INCHES * lines) * most)),
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid.flat)
        for axis, (batch, panel) in zip(axes, panels, strict=False):
            panel = panel.sort_values(varying, kind="stable")
            right, left = np.zeros(len(panel)), np.zeros(len(panel))
            for name in values.columns:
                width = values.loc[panel.index, name].to_numpy()
                start = np.where(width >= 0, right, left)
                axis.barh(range(len(panel)), width, left=start, height=0.72, color=colours[name], linewidth=0)
                right, left = right + np.maximum(width, 0), left + np.minimum(width, 0)
            if totals is not None:
                axis.use_sticky_edges = False  # leave room after bars that end at the edge
                axis.scatter(totals.loc[panel.index], range(len(panel)), marker="|", s=110, color=INK, zorder=3)
            axis.set_yticks(range(len(panel)), [bars[index] for index in panel.index])
            axis.set_ylim(len(panel) - 0.5, -0.5)  # from top to bottom, without margins
            axis.grid(visible=False, axis="y")
            axis.set_title(value_label("batch_per_gpu", batch, ranks))
            axis.set_xlabel(x_label)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        note_hidden_panels(figure, len(panels), len(all_panels))
        shares = []  # of each part in the longest bar of a panel, as each panel has its own scale
        for _, panel in panels:
            widths = values.loc[panel.index].abs()
            shares.append(widths.max() / widths.sum(axis=1).max())
        largest = pd.DataFrame(shares).max()
        handles: list[Any] = [
            Rectangle((0, 0), 1, 1, color=colours[name], label=labels[name])
            for name in values.columns
            if largest[name] > _VISIBLE_SHARE
        ]
        if totals is not None:
            handles.append(plt.Line2D([], [], color=INK, marker="|", linestyle="none", markersize=9, label="total"))
        legend(figure, handles)
    return figure
