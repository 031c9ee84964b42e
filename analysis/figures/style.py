"""Style, panels, legends and rendering, shared by all figures."""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.study import Analysis

INK, GRID = "#2a2f36", "#c9ced6"
"""Colours of text and grid lines; the report replaces them with those of its light or dark theme."""

MAX_FACETS = 24
"""Maximum panels per figure; a larger grid shows the first ones, with a note."""

STYLE: dict[str, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip
TEXT: Any = {
    "font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "scaling-study", "savefig.facecolor": "none",
    "text.parse_math": False,  # a name may contain $; the figures use no formulas
    "axes.titley": 1.0,  # avoids a search for ticks above the axes, a fifth of the drawing time
}  # fmt: skip

LINE_INCHES = 0.155
"""Height of a line of `TEXT` including line spacing."""

NARROW_INCHES, MOST_BRIEF_PANELS = 4.4, 4
"""Width of a figure for a phone, and the maximum panels of a figure that answers a question."""

MOST_BRIEF_BARS = 24
"""Maximum bars of a figure that answers a question."""

MOST_DIRECT_LABELS = 5
"""Maximum lines of a panel that are labelled at their end; more get a legend."""

LONGEST_LABEL = 26
"""Maximum characters of a label next to a line; longer ones are cut."""

MOST_LINES = 6
"""Maximum lines of a wrapped label."""

MARKERS = "oDs^vPX*"

MOST_INTERVAL = 0.5
"""Maximum share of an axis that an interval takes, so that its ends are visible, and it does not look like the range
of all values.
"""


@contextmanager
def _switched_on(switch: ContextVar[bool]) -> Iterator[None]:
    token = switch.set(True)
    try:
        yield
    finally:
        switch.reset(token)


_is_narrow: ContextVar[bool] = ContextVar("is_narrow", default=False)


def narrow() -> AbstractContextManager[None]:
    """Draw figures for a phone within this context: one column of panels."""
    return _switched_on(_is_narrow)


def is_narrow() -> bool:
    return _is_narrow.get()


_is_brief: ContextVar[bool] = ContextVar("is_brief", default=False)


def brief() -> AbstractContextManager[None]:
    """Draw figures that answer a question within this context: a few panels and bars."""
    return _switched_on(_is_brief)


def is_brief() -> bool:
    return _is_brief.get()


BRIEF = "brief"


def mark_brief(figure: Figure) -> None:
    """Mark a figure that shows only a part of what it shows outside of `brief`."""
    if is_brief():
        figure.set_label(BRIEF)


def most_panels() -> int:
    """Return the maximum panels of a figure; a figure with more shows the first ones."""
    return MOST_BRIEF_PANELS if is_brief() or is_narrow() else MAX_FACETS


COLOURS = (*sns.color_palette("colorblind").as_hex(), "#7800d8", "#595959", "#14213d")
"""Seaborn's ten colour-blind safe colours, a violet, a dark grey and a navy blue.

Under every kind of dichromacy (Machado, Oliveira and Fernandes, IEEE TVCG 15, 2009) the violet is at least as far from
the others as they are from each other.
"""


def render(figure: Figure) -> tuple[str, bytes]:
    """Return the figure as deterministic SVG and as PNG on white at 160 dpi, and close it."""
    svg, png = io.StringIO(), io.BytesIO()
    engine = figure.get_layout_engine()
    with plt.rc_context(TEXT):
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)  # otherwise each format would repeat the layout
        figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=160, facecolor="white")
    plt.close(figure)
    return svg.getvalue(), png.getvalue()


def render_svg(figure: Figure) -> str:
    """Return the figure as deterministic SVG, and close it."""
    svg = io.StringIO()
    with plt.rc_context(TEXT):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    plt.close(figure)
    return svg.getvalue()


def facet_fields(analysis: Analysis) -> list[str]:
    """Return the varying fields that are neither on the axis nor a colour."""
    return [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]


def grid_of_axes(count: int, *, sharey: bool) -> tuple[Figure, list[Any]]:
    """Return a figure with `count` panels, at most `most_panels`, and their axes."""
    shown = min(count, most_panels())
    columns = column_count(shown)
    rows = -(-shown // columns)
    width = 9.6 if columns > 2 else 7.2
    if is_narrow() or columns == 1:
        width = NARROW_INCHES if is_narrow() else 5.6
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(width, 0.7 + 2.5 * rows),
        sharex=True,
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    axes = list(grid.flat)
    for axis in axes[shown:]:
        axis.set_visible(False)
    note_hidden_panels(figure, shown, count)
    return figure, axes[:shown]


def column_count(count: int, most: int = 4) -> int:
    """Return the number of columns of `count` panels."""
    return 1 if is_narrow() else min(count, most)


Panel = TypeVar("Panel")


def headline_shown(panels: Sequence[Panel], has_headline: Callable[[Panel], bool]) -> list[Panel]:
    """Return the panels in their order; if that would leave out the one with the headline, it is the last one shown."""
    ordered, most = list(panels), most_panels()
    hidden = next((number for number, panel in enumerate(ordered) if number >= most and has_headline(panel)), None)
    if hidden is not None:
        ordered.insert(most - 1, ordered.pop(hidden))
    return ordered


def note_hidden_panels(figure: Figure, shown: int, count: int) -> None:
    """Note below the panels that there are more; the legend above would cover a title."""
    if count > shown:
        mark_brief(figure)
        figure.supxlabel(f"{shown} of {count} panels", fontsize=TEXT["font.size"], color=INK)


def wrapped(label: str, columns: int, ends: Sequence["LineEnd"] = ()) -> str:
    """Wrap a title to the width of one panel of `columns` columns.

    ends: their labels make the panel narrower, and the title above it is in its middle.
    """
    width = 40 if is_narrow() else {1: 60, 2: 44}.get(columns, 28)
    return filled(label, max(18, width - max((len(end.shown) for end in ends), default=0) // 2))


def filled(label: str, width: int, most_lines: int = MOST_LINES) -> str:
    """Wrap a label at spaces, but keep a value and its mark "(emulated)" on one line.

    Words wider than a line are broken, if possible after a colon, slash or underscore. Lines after `most_lines` are
    left out, so that a panel keeps its room.
    """
    joined = re.sub(
        r"\S+ \(emulated\)", lambda match: match[0].replace(" ", "\u00a0" if len(match[0]) <= width else " "), label
    )
    words = " ".join(" ".join(_pieces(word, width)) for word in joined.split(" "))
    lines = textwrap.fill(words, width, break_on_hyphens=False, max_lines=most_lines, placeholder="…")
    return lines.replace("\u00a0(emulated)", " (emulated)")


def _pieces(word: str, width: int, separators: Sequence[str] = (":/", "_.")) -> list[str]:
    """Break a word wider than a line after separators, the more telling ones first, into pieces as wide as possible."""
    if len(word) <= width or not separators:
        return [word]
    first, *others = separators
    pieces: list[str] = []
    for part in re.findall(rf"[^{first}]*[{first}]+|[^{first}]+", word):
        if pieces and len(pieces[-1]) + len(part) <= width:
            pieces[-1] += part
        else:
            pieces += _pieces(part, width, others)
    return pieces


class LineEnd(NamedTuple):
    """The last point of a line in data coordinates, and the text next to it."""

    x: float
    y: float
    label: str

    @property
    def shown(self) -> str:
        return self.label if len(self.label) <= LONGEST_LABEL else f"{self.label[: LONGEST_LABEL - 1]}…"


def label_ends(axis: Any, ends: Sequence[LineEnd]) -> None:
    """Write each label next to the end of its line, moved apart so that none overlap. Call it with final limits."""
    height_inches = axis.get_figure().get_figheight() * axis.get_position().height
    gap = 1.05 * LINE_INCHES / height_inches
    to_axis = axis.transScale + axis.transLimits
    ordered = sorted(ends, key=lambda end: end.y)
    heights = [float(np.clip(to_axis.transform((end.x, end.y))[1], 0.02, 0.98)) for end in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    if heights and (excess := heights[-1] + gap / 2 - 1) > 0:
        heights[-1] -= excess
        for i in reversed(range(len(heights) - 1)):
            heights[i] = min(heights[i], heights[i + 1] - gap)
    back = to_axis.inverted()
    for end, height in zip(ordered, heights, strict=True):
        y = back.transform((to_axis.transform((end.x, end.y))[0], height))[1]
        axis.annotate(
            end.shown, (end.x, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8.5,
            annotation_clip=False,
        )  # fmt: skip


def limits(points: pd.Series, low: pd.Series, high: pd.Series) -> tuple[float, float]:
    """Return limits of an axis that show all points and intervals, with a margin around the widest interval.

    Intervals are resolved, so they are narrower than a factor of 2. The widest one takes at most `MOST_INTERVAL` of the
    axis.
    """
    ends = pd.concat([points, low, high]).astype(float).dropna()
    lower, upper = float(ends.min()), float(ends.max())
    widest = float((high - low).max()) if (high - low).notna().any() else 0.0
    margin = 0.06 * (upper - lower) or 0.06 * abs(upper) or 1.0
    margin = max(margin, (widest / MOST_INTERVAL - (upper - lower)) / 2)
    return lower - margin, upper + margin


def outer_labels(axes: list[Any], x_label: str, y_label: str) -> None:
    """Label the x axis of the last panel per column and the y axis of the first panel per row."""
    for axis in axes:
        cell = axis.get_subplotspec()
        below = cell.rowspan.stop * cell.get_gridspec().ncols + cell.colspan.start
        if below >= len(axes):  # the last panel of its column
            axis.set_xlabel(x_label)
            axis.tick_params(labelbottom=True)
        if cell.is_first_col():
            axis.set_ylabel(y_label)


def hollow(axis: Any, x: Any, y: Any, colour: Any, marker: str = "o") -> None:
    """Mark a value that is not resolved: a hollow point without whiskers."""
    axis.plot(
        x, y, linestyle="none", marker=marker, markersize=5.5, markerfacecolor="white", markeredgecolor=colour, zorder=5
    )


def hollow_handle() -> Line2D:
    """Return the entry of a legend for points of `hollow`."""
    style: dict[str, Any] = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "markeredgecolor": INK}
    return Line2D([], [], linestyle="none", label="not resolved", **style)


def legend(figure: Figure, handles: list[Any]) -> None:
    """Add a legend above the panels, with as many columns as its longest label allows."""
    handle_inches, letter_inches = 0.65, 0.075
    for handle in handles:
        room = int((figure.get_figwidth() - handle_inches) / letter_inches)
        handle.set_label(filled(str(handle.get_label()), room))
    lines = [line for handle in handles for line in handle.get_label().splitlines()]
    widest_inches = handle_inches + letter_inches * max(map(len, lines), default=0)
    ncols = min(len(handles), max(1, int(figure.get_figwidth() // widest_inches)), 6)
    if ncols == 1:
        for handle in handles:
            handle.set_label(textwrap.fill(str(handle.get_label()), int((figure.get_figwidth() - 0.65) / 0.075)))
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols)
