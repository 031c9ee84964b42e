"""Figures of efficiency with speed-up, and of phases.

All text has one colour, so that a page can recolour it for light and dark themes.
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.compare.one_field import like_headline
from analysis.compare.scaling import STRONG, WEAK
from analysis.figures.bars import VISIBLE_SHARE, stacked_bars
from analysis.figures.style import (
    INK,
    MARKERS,
    MOST_BRIEF_BARS,
    MOST_DIRECT_LABELS,
    STYLE,
    TEXT,
    LineEnd,
    column_count,
    facet_fields,
    filled,
    grid_of_axes,
    headline_shown,
    hollow,
    hollow_handle,
    is_brief,
    is_narrow,
    label_ends,
    legend,
    limits,
    mark_brief,
    outer_labels,
    wrapped,
)
from analysis.measure.configurations import LAYOUT
from analysis.read.reduce import OPTIONAL_PHASES
from analysis.read.schema import PHASES
from analysis.study import Analysis, study_ranks
from analysis.text import PHASE_LABELS, configuration_label, field_label, value_label


def scaling_weak(analysis: Analysis) -> Figure | None:
    """Efficiency by number of ranks at a constant batch per rank (bands: 95 % intervals), and final speed-ups."""
    return _scaling_figure(analysis, WEAK)


def scaling_strong(analysis: Analysis) -> Figure | None:
    """Efficiency by number of ranks at a constant global batch (bands: 95 % intervals), and final speed-ups."""
    return _scaling_figure(analysis, STRONG)


def _scaling_figure(analysis: Analysis, label: str) -> Figure | None:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    batch = "batch_per_gpu" if label == WEAK else "global_batch"
    rows = rows.join(analysis.configurations.drop(columns=["n", "world_size"]), on="configuration")
    is_wide = rows["efficiency_more"] > 0
    for end in ("", "_low", "_high"):
        rows[f"percent{end}"] = 100 * rows[f"efficiency{end}"].astype(float).mask(is_wide & (end != ""))
    # A fixed global batch may vary fields with the number of ranks, such as the accumulation steps.
    of_series = rows.groupby("series")
    rest = [name for name in facet_fields(analysis) if (of_series[name].nunique(dropna=False) == 1).all()]
    facets = list(rows.groupby(rest, sort=True, dropna=False)) if rest else [((), rows)]
    facets = headline_shown(facets, lambda facet: analysis.headline in set(facet[1]["configuration"]))
    batches = sorted(rows[batch].unique())
    colours = dict(zip(batches, sns.color_palette("colorblind", len(batches)), strict=True))
    markers = {samples: MARKERS[i % len(MARKERS)] for i, samples in enumerate(batches)}
    sizes = sorted(rows["world_size"].unique())
    low, high = limits(rows["percent"], rows["percent_low"], rows["percent_high"])
    with_legend = max(facet["series"].nunique() for _, facet in facets) > MOST_DIRECT_LABELS
    with sns.axes_style("whitegrid", rc=STYLE), plt.rc_context(TEXT):
        figure, axes = grid_of_axes(len(facets), sharey=True)
        for axis, (key, facet) in zip(axes, facets, strict=False):
            last = facet["world_size"].max()  # so that the line does not cross labels of smaller sizes
            axis.plot([min(sizes), last], [100, 100], color=INK, linestyle=(0, (4, 3)), linewidth=1.0)
            axis.set_xscale("log", base=2)
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            axis.set_xlim(min(sizes) / 1.12, max(sizes) * 1.12)
            axis.set_ylim(max(0.0, low), max(102.0, high))
            ends = []
            for _, series in facet.groupby("series", sort=False):
                samples = series[batch].iloc[0]
                ends.append(_line(axis, series, colours[samples], markers[samples], value_label(batch, samples, ranks)))
            if with_legend:
                ends = []
            else:
                ends += [LineEnd(last, 100.0, "ideal")] * (axis is axes[0])
            label_ends(axis, ends)
            title = configuration_label(dict(zip(rest, key, strict=True)), rest, ranks)
            axis.set_title(wrapped(title, column_count(len(facets)), ends))
        outer_labels(axes, field_label("world_size", ranks), "efficiency (%)")
        handles: list[Any] = []
        if with_legend:
            handles = [
                Line2D([], [], color=colours[b], marker=markers[b], markersize=5, label=value_label(batch, b, ranks))
                for b in batches
            ]
            handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1, label="ideal"))
        handles += [hollow_handle()] * bool(is_wide.any())
        if handles:
            legend(figure, handles)
    return figure


def _line(axis: Any, series: pd.DataFrame, colour: Any, marker: str, label: str) -> LineEnd:
    """Draw a series with its band of intervals and return its end. No line joins layouts on more nodes.

    A point whose interval is too wide is hollow and has none.
    """
    line = series.sort_values(list(LAYOUT)).drop_duplicates("world_size")
    known = line[line["percent_low"].notna() | (line["ideal"] == 1)]
    ends = [known[f"percent_{end}"].fillna(known["percent"]) for end in ("low", "high")]
    axis.fill_between(known["world_size"], *ends, color=colour, alpha=0.18, linewidth=0)
    axis.plot(line["world_size"], line["percent"], color=colour, linewidth=1.5)
    wide = series["efficiency_more"] > 0
    shown, hidden = series[~wide], series[wide]
    axis.plot(shown["world_size"], shown["percent"], linestyle="none", marker=marker, markersize=5, color=colour)
    hollow(axis, hidden["world_size"], hidden["percent"], colour, marker)
    last = line.iloc[-1]
    gain = "" if last["efficiency_more"] > 0 else f": {last['speed_up']:.2f}×"
    return LineEnd(float(last["world_size"]), float(last["percent"]), f"{label.partition(' per ')[0]}{gain}")


def phases(analysis: Analysis) -> Figure | None:
    """Phases of a step with instruments (mean over ranks), one bar per configuration.

    The backward pass hides a part of the all-reduces; the part that it does not hide (exposed) is dark. One panel per
    batch, or per batch and models of similar speed, each with its own scale.
    """
    configurations = analysis.configurations
    if configurations.empty:
        return None
    values = configurations[list(PHASES)].astype(float) * 1e3
    configurations = configurations[values.notna().any(axis=1)]
    if configurations.empty:
        return None
    count = len(configurations)
    if is_brief() and count > MOST_BRIEF_BARS:
        configurations = configurations.loc[like_headline(configurations, facet_fields(analysis), analysis.headline)]
    values = values.loc[configurations.index].fillna(0.0)
    values = _with_exposed(values, analysis.communication.exposed)
    shares = values.div(values.sum(axis=1), axis=0).max()
    drawn = [name for name, share in shares.items() if share >= VISIBLE_SHARE]
    if len(drawn) < 2:
        return None
    ranks = study_ranks(analysis)
    names = [*facet_fields(analysis), "world_size"]
    # Colours follow this order, so that phases common to most strategies come first.
    labels = {name: PHASE_LABELS[name] for name in sorted(PHASES, key=lambda name: name in OPTIONAL_PHASES)}
    figure = stacked_bars(
        configurations,
        values[drawn],
        labels,
        names,
        ranks,
        "time per step (ms)",
        headline=analysis.headline,
        shades={_EXPOSED: ("backward_s", "exposed all-reduces")},
    )
    if len(configurations) < count:
        note = f"{len(configurations)} of {count} configurations: those most like the card's"
        mark_brief(figure)
        figure.supxlabel(filled(note, 48 if is_narrow() else 100), fontsize=TEXT["font.size"], color=INK)
    return figure


_EXPOSED = "exposed_s"


def _with_exposed(values_ms: pd.DataFrame, exposed: pd.DataFrame) -> pd.DataFrame:
    """Return the phases with the exposed all-reduces apart from the backward pass, whose phase contains them.

    They were measured in another window, so they are at most as long as that phase. What is hidden takes no time of its
    own. Of strategies that are traced, some are in the forward pass. exposed: the communication breakdown.
    """
    parts = list(values_ms)
    exposed = exposed[~exposed["traced"].eq(True)]
    apart_ms = 1e3 * exposed[_EXPOSED].reindex(values_ms.index).astype(float).fillna(0.0)
    apart_ms = apart_ms.clip(lower=0.0, upper=values_ms["backward_s"])
    values_ms = values_ms.assign(backward_s=values_ms["backward_s"] - apart_ms, **{_EXPOSED: apart_ms})
    place = parts.index("backward_s") + 1
    return values_ms[[*parts[:place], _EXPOSED, *parts[place:]]]
