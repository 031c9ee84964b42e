"""Draw the summary card as a self-contained SVG for a README or a slide, readable on light and dark backgrounds."""

from functools import cache

from markupsafe import Markup
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath

from analysis.report.card import rows
from analysis.verdict.card import Card

WIDTH = 880
"""Width in pixels; the height follows from the text."""

_MARGIN, _LABEL_WIDTH, _LINE, _GAP, _SIZE, _TITLE_SIZE = 28, 104, 22, 9, 16, 19
_BAR = 14
"""Height of the bar that shows how many of the ranks do work."""

_FONT = "'DejaVu Sans', Verdana, 'Segoe UI', system-ui, sans-serif"

_STYLE = """
.paper { fill: #ffffff; stroke: #d0d7de; }
text { fill: #1d2127; }
.label { fill: #59616b; }
.good { fill: #1a7f37; } .fair { fill: #8a5a00; } .poor { fill: #b42318; }
.work { fill: #0b62a8; } .lost { fill: #e08e3c; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171b; stroke: #363d46; }
  text { fill: #e6e9ed; }
  .label { fill: #a3acb8; }
  .good { fill: #57c26f; } .fair { fill: #f0b849; } .poor { fill: #ff8f85; }
  .work { fill: #7cbcf5; } .lost { fill: #c9772b; }
}
"""


def as_svg(card: Card) -> str:
    """Return the card as SVG. The bar, if any, shows the share of the ranks that does work, and the share lost."""
    parts: list[Markup] = []
    y = float(_MARGIN + _TITLE_SIZE)
    for line in wrapped(card.heading, WIDTH - 2 * _MARGIN, _TITLE_SIZE, "bold"):
        parts.append(_text(_MARGIN, y, line, "title", bold=True, size=_TITLE_SIZE))
        y += _LINE + 4
    work = _share_at_work(card)
    if work is not None:
        parts += _bar(y - 8, work)
        y += _BAR + 10
    y += _GAP
    for label, text in rows(card):
        parts.append(_text(_MARGIN, y, label, "label"))
        kind = card.trust.level if label == "trust" else "line"
        for line in wrapped(text, WIDTH - 2 * _MARGIN - _LABEL_WIDTH, _SIZE):
            parts.append(_text(_MARGIN + _LABEL_WIDTH, y, line, kind))
            y += _LINE
        y += _GAP
    height = round(y - _LINE + _MARGIN)
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-label="{title}" font-family="{font}" font-size="{size}"><title>{title}</title>'
        "<style>{style}</style>"
        '<rect class="paper" x="0.5" y="0.5" width="{inner}" height="{inner_height}" rx="10"/>'
    ).format(
        width=WIDTH,
        height=height,
        inner=WIDTH - 1,
        inner_height=height - 1,
        title=card.heading,
        font=_FONT,
        size=_SIZE,
        style=Markup(_STYLE),
    )
    return str(head + Markup("\n").join(parts) + Markup("\n</svg>\n"))


def _text(x: float, y: float, text: str, kind: str, bold: bool = False, size: int = _SIZE) -> Markup:
    weight = Markup(' font-weight="bold"') if bold else Markup("")
    return Markup('<text class="{}" x="{:g}" y="{:g}" font-size="{}"{}>{}</text>').format(
        kind, x, y, size, weight, text
    )


def _share_at_work(card: Card) -> float | None:
    """Return the efficiency of the first subject, at most 1; None if the card has none or it is not resolved."""
    line = card.line("scales")
    efficiency = line.quantities[0].value if line is not None and line.quantities else None
    return None if efficiency is None else min(1.0, efficiency)


def _bar(y: float, share: float) -> list[Markup]:
    inside = WIDTH - 2 * _MARGIN
    rect = Markup('<rect class="{}" x="{:g}" y="{:g}" width="{:.1f}" height="{}"/>')
    parts = [rect.format("work", _MARGIN, y, inside * share, _BAR)]
    if share < 1:
        parts.append(rect.format("lost", _MARGIN + inside * share, y, inside * (1 - share), _BAR))
    return parts


def wrapped(text: str, width: float, size: float, weight: str = "normal") -> list[str]:
    """Return the text as lines of at most `width` pixels, by the widths of DejaVu Sans, which few fonts exceed.

    Words that are wider than a line are cut.
    """
    lines: list[str] = []
    for word in text.split(" "):
        candidate = f"{lines[-1]} {word}" if lines else word
        if lines and _width(candidate, size, weight) <= width:
            lines[-1] = candidate
            continue
        rest = word
        while _width(rest, size, weight) > width:
            count = next(n for n in range(len(rest), 0, -1) if _width(rest[:n], size, weight) <= width or n == 1)
            lines.append(rest[:count])
            rest = rest[count:]
        lines.append(rest)
    return lines


@cache
def _font(size: float, weight: str) -> FontProperties:
    return FontProperties(family="DejaVu Sans", size=size, weight=weight)


def _width(text: str, size: float, weight: str) -> float:
    return float(TextToPath().get_text_width_height_descent(text.replace("$", "S"), _font(size, weight), False)[0])
