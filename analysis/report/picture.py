"""Draw figures of the report: as files, and as elements of the page in a wide and a narrow form."""

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup, escape

from analysis.figures.style import BRIEF, GRID, INK, NARROW_INCHES, brief, narrow, render, render_svg
from analysis.predict.inputs import ReportInputs
from analysis.report.sections import SECTIONS, Figure
from analysis.tables.table import Table

POINTS_PER_REM = 10.8
"""Points of a figure that make 1 rem of the page, so that text is as large as in the page's tables."""


MOST_VISIBLE_CHARACTERS = 160_000
"""Maximum length of the SVG of a figure that answers a question; a larger one has too many parts to see."""

MOST_NARROW_CHARACTERS = 30_000
"""Maximum length of the form for phones of any other figure, so that a report stays below 1.5 MB."""


@dataclass(frozen=True)
class Picture:
    """A drawn figure. narrow_svg: for a phone; None if the figure is narrow anyway. data: what is drawn, as CSV.

    has_own_data: False if the data are those of the table of its section.
    """

    name: str
    caption: str
    svg: str
    png: bytes
    data: str | None
    has_own_data: bool
    narrow_svg: str | None = None

    @cached_property
    def data_uri(self) -> str | None:
        """Return the drawn data as a data URI, so that the page needs no other file."""
        return self.data and csv_uri(self.data)

    @property
    def inline(self) -> Markup:
        return _element(self.svg, self.name, self.caption)

    @property
    def inline_narrow(self) -> Markup | None:
        return None if self.narrow_svg is None else _element(self.narrow_svg, f"{self.name}-narrow", self.caption)

    @property
    def width_rem(self) -> int:
        return round(_width_points(self.svg) / POINTS_PER_REM)


def csv_uri(text: str) -> str:
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def first_drawn(
    inputs: ReportInputs, figures: Iterable[Figure], tables: Mapping[str, Table], shown: Iterable[str] = ()
) -> Picture | None:
    """Draw the first figure that has something to draw and is not among `shown`, also in its narrow form."""
    known = {name.removesuffix(f"_{BRIEF}") for name in shown}
    for figure in figures:
        if figure.name in known:
            continue
        with brief():
            picture = draw(inputs, figure, tables)
        if picture and len(picture.svg) <= MOST_VISIBLE_CHARACTERS:
            return picture
    return None


def draw(inputs: ReportInputs, figure: Figure, tables: Mapping[str, Table]) -> Picture | None:
    """Draw a figure; return None if there is nothing to draw. tables: those of the report, by section.

    The name of a figure that shows only a part of itself ends in `BRIEF`.
    """
    drawing = figure.draw(inputs)
    if drawing is None:
        return None
    svg, png = render(drawing)
    narrow_svg = None
    if _width_points(svg) > 72 * NARROW_INCHES + 1:
        with narrow():
            small = figure.draw(inputs)
        narrow_svg = None if small is None else render_svg(small)
    name = f"{figure.name}_{BRIEF}" if drawing.get_label() == BRIEF else figure.name
    section = next((section.name for section in SECTIONS for own in section.figures if own.name == figure.name), "")
    data = figure.data_csv(inputs, tables.get(section))
    return Picture(name, figure.caption, svg, png, data, figure.rows is not None, narrow_svg)


def _width_points(svg: str) -> float:
    width = re.search(r'<svg [^>]*?width="([\d.]+)pt"', svg)
    assert width is not None, "matplotlib gives the width in points"
    return float(width[1])


def _element(svg: str, prefix: str, caption: str) -> Markup:
    """Return a figure as an element of the page that follows the page's colours and width."""
    body = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"\n\s*", "\n", body)
    body = re.sub(r'="[^"]*"', lambda value: re.sub(r"\d+\.\d{3,}", _rounded, value[0]), body)
    body = body.replace(INK, "currentColor").replace(GRID, "var(--line)")
    # Ids are unique within one figure only; prefix them so that links do not reach another figure.
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", body)
    return Markup(body.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1))


def _rounded(number: re.Match[str]) -> str:
    """Return a coordinate with two decimals, a fiftieth of a pixel."""
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
