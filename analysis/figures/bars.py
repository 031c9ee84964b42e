"""Stacked bars, one per configuration, and their labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import to_hex, to_rgb
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
    headline_shown,
    is_narrow,
    legend,
    most_panels,
    note_hidden_panels,
)
from analysis.text import (
    brief_label,
    configuration_label,
    join,
    telling_fields,
    text,
    value_label,
    with_short_arguments,
)

MOST_LABEL_LINES = 4
"""Maximum lines of the label of a bar; longer ones are cut."""

MOST_COMMON = "most common settings"
"""Label of the configuration that has the most common value of every field."""

VISIBLE_SHARE = 0.005
"""Share of the longest bar of its panel below which a part is too small to recognise, and is not in the legend."""

_MOST_NAMED = 2
"""Maximum models in the title of a panel."""

_MOST_UNEVEN = 20
"""Longest bar of a panel / that of its fastest model, above which slower models have a panel of their own."""


def identifying_label(
    configurations: pd.DataFrame,
    row: pd.Series,
    fields: Sequence[str],
    ranks: tuple[str, str],
    *,
    is_brief: bool = False,
    only: Sequence[str],
) -> str:
    """Return the label of a configuration that tells it from the other ones of `configurations`.

    Of many fields, only those that differ from the most common value are named; see `telling_fields`. only: the fields
    to name, unless none of them is telling.
    """
    telling = telling_fields(configurations, row, fields)
    row = with_short_arguments(configurations, row)
    named = [name for name in telling if name in only] or telling
    label = brief_label(configurations, row, named, ranks) if is_brief else configuration_label(row, named, ranks)
    if set(telling) <= {"world_size"} and len(telling) < len(fields):
        return f"{label}, {MOST_COMMON}" if label else MOST_COMMON
    return label


def needed_fields(panel: pd.DataFrame, fields: Sequence[str]) -> list[str]:
    """Return the fields that identify the rows of a panel: no constant ones, and none that another one implies."""
    needed: list[str] = []
    for name in fields:
        values = panel[name].map(text)
        if values.nunique() > 1 and not any(
            (values.groupby(panel[other].map(text)).nunique() == 1).all() for other in needed
        ):
            needed.append(name)
    return needed or list(fields)


def _bar_labels(
    configurations: pd.DataFrame,
    panels: Sequence[pd.DataFrame],
    varying: Sequence[str],
    ranks: tuple[str, str],
    columns: int,
) -> dict[Any, str]:
    """Return the wrapped labels of all bars.

    If one is too long, all are brief; if one still is, they leave out what other fields of the panel imply.
    """
    width = 22 if is_narrow() else 64 if columns == 1 else 40
    for is_brief, is_shortest in ((False, False), (True, False), (True, True)):
        labels = {
            index: identifying_label(
                configurations,
                row,
                varying,
                ranks,
                is_brief=is_brief,
                only=needed_fields(panel, varying) if is_shortest else varying,
            )
            for panel in panels
            for index, row in panel.iterrows()
        }
        complete = {index: filled(label, width) for index, label in labels.items()}
        if all(label.count("\n") < MOST_LABEL_LINES for label in complete.values()):
            return complete
    cut = {index: filled(label, width, MOST_LABEL_LINES) for index, label in labels.items()}
    is_distinct = len(set(cut.values())) == len(set(labels.values()))
    return cut if is_distinct else complete


def _panels(
    configurations: pd.DataFrame, lengths: pd.Series, ranks: tuple[str, str], *, by_model: bool
) -> list[tuple[str, pd.DataFrame]]:
    """Return title and configurations of each panel: one per batch, several if models differ too much in speed."""
    panels = []
    for batch, rows in configurations.groupby("batch_per_gpu"):
        title = value_label("batch_per_gpu", batch, ranks)
        has_models = by_model and "model" in rows
        models = rows["model"].fillna("") if has_models else pd.Series("", index=rows.index)  # code of users has none
        longest = lengths[rows.index].groupby(models).max().sort_values()
        groups: list[list[str]] = []
        for model, length in longest.items():
            if not groups or length > _MOST_UNEVEN * longest[groups[-1][0]]:
                groups.append([])
            groups[-1].append(str(model))
        for group in groups:
            names = f", {join(group) if len(group) <= _MOST_NAMED else f'{len(group)} models'}" * (len(groups) > 1)
            panels.append((title + names, rows[models.isin(group)]))
    return panels


def stacked_bars(
    configurations: pd.DataFrame,
    values: pd.DataFrame,
    labels: Mapping[str, str],
    names: Sequence[str],
    ranks: tuple[str, str],
    x_label: str,
    totals: pd.Series | None = None,
    headline: int | None = None,
    shades: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Draw a stacked bar per configuration, labelled by the varying fields of `names`; see `_panels`.

    values: the parts in the unit of the axis, one row per configuration; negative ones are stacked to the left. labels:
    of all possible parts, at most as many as `COLOURS`; their order defines the colours. totals: marked across the bar.
    headline: the configuration whose panel is shown in any case. shades: further parts, with the part whose colour they
    have, but darker, and their label.
    """
    colours = dict(zip(labels, COLOURS, strict=False))
    for name, (part, label) in (shades or {}).items():
        red, green, blue = (0.5 * value for value in to_rgb(colours[part]))
        colours[name] = to_hex((red, green, blue))
        labels = {**labels, name: label}
    varying = [name for name in names if configurations[name].nunique(dropna=False) > 1] or list(names[-1:])
    # A difference between steps may be small because a model is not slowed.
    found = _panels(configurations, values.abs().sum(axis=1), ranks, by_model=totals is None)
    all_panels = headline_shown(found, lambda panel: headline in panel[1].index)
    panels = all_panels[: most_panels()]
    columns = column_count(len(panels), 2)
    rows = -(-len(panels) // columns)
    bars = _bar_labels(configurations, [panel for _, panel in panels], varying, ranks, columns)
    lines = max(label.count("\n") + 1 for label in bars.values())
    most = [max(len(panel) for _, panel in panels[i * columns : (i + 1) * columns]) for i in range(rows)]
    bar_inches = 0.08 + LINE_INCHES * lines
    legend_inches = 0.9 + (0.1 * len(values.columns) if is_narrow() else 0)  # a phone has room for two columns
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(NARROW_INCHES if is_narrow() else 9.6, legend_inches + rows * 0.75 + bar_inches * sum(most)),
            height_ratios=most,
            squeeze=False,
            layout="constrained",
        )
        axes = list(grid.flat)
        for number, (axis, (title, panel)) in enumerate(zip(axes, panels, strict=False)):
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
            axis.set_ylim(most[number // columns] - 0.5, -0.5)  # from top to bottom, bars of equal height everywhere
            axis.grid(visible=False, axis="y")
            axis.set_title(filled(title, 40))
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
            if largest[name] > VISIBLE_SHARE
        ]
        if totals is not None:
            handles.append(plt.Line2D([], [], color=INK, marker="|", linestyle="none", markersize=9, label="total"))
        legend(figure, handles)
    return figure
