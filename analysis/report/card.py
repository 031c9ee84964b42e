"""Render the summary card as text for a terminal, Markdown, JSON and an HTML fragment."""

import json
import math
import os
import textwrap
from typing import Any

from markupsafe import Markup

from analysis.predict.inputs import report_inputs
from analysis.read.results import load_reduced
from analysis.tables.table import markdown_escaped
from analysis.text import as_html as prose
from analysis.verdict.card import Card, Quantity, card_of

SCHEMA_VERSION = 1
"""Of `as_json`; a change that removes or renames an entry increases it."""

WIDTH = 80
"""Characters per line of the text."""

_INDENT = 2


def card_at(directory: str | os.PathLike[str]) -> Card:
    """Return the card of a results folder. Raises ResultsError if it cannot be read."""
    first, *others = report_inputs(load_reduced(directory))
    return card_of(first, others)


def rows(card: Card) -> list[tuple[str, str]]:
    """Return label and text of each line, trust last."""
    return [*((line.label, line.text) for line in card.lines), ("trust", f"{card.trust.level}: {card.trust.reason}")]


def as_text(card: Card, width: int = WIDTH) -> str:
    """Return the card as lines of at most `width` characters; long ones continue with a hanging indent."""
    shown = rows(card)
    column = _INDENT + max(len(label) for label, _ in shown) + 2
    lines = [_filled(card.heading, width, "", " " * _INDENT)]
    lines += [_filled(text, width, f"{'':{_INDENT}}{label}".ljust(column), " " * column) for label, text in shown]
    return "\n".join(lines)


def _filled(text: str, width: int, start: str, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


def as_markdown(card: Card) -> str:
    """Return the card as a table with the title as its heading row."""
    head = ["", f"**{markdown_escaped(card.heading)}**"]
    body = [[f"**{label}**", markdown_escaped(text)] for label, text in rows(card)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---", "---"], *body))


def as_json(card: Card) -> dict[str, Any]:
    """Return the card as JSON values with stable names; unknown numbers are null."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": card.study,
        "question": card.question,
        "form": card.form,
        "title": card.title,
        "partial": card.is_partial,
        "missing_trials": card.missing_trials,
        "planned_trials": card.planned_trials,
        "resume_command": card.resume_command or None,
        "facts": dict(card.facts),
        "trust": {
            "level": card.trust.level,
            "reason": card.trust.reason,
            "groups": card.trust.groups,
            "half_width": _finite(card.trust.half_width),
        },
        "lines": [
            {
                "key": line.key,
                "label": line.label,
                "text": line.text,
                "quantities": [_quantity(quantity) for quantity in line.quantities],
            }
            for line in card.lines
        ],
    }


def _quantity(quantity: Quantity) -> dict[str, Any]:
    """Return a quantity; further_repeats is null if it is resolved, or if no number of repeats is known to suffice."""
    more = quantity.further_repeats
    return {
        "name": quantity.name,
        "part": quantity.part or None,
        "value": _finite(quantity.value),
        "low": _finite(quantity.low),
        "high": _finite(quantity.high),
        "unit": quantity.unit,
        "resolved": more is None,
        "further_repeats": None if more is None or math.isinf(more) else int(more),
    }


def _finite(value: float | None) -> float | None:
    """Return null for what JSON has no number for: the end of an interval without a limit."""
    return value if value is not None and math.isfinite(value) else None


def as_json_text(card: Card) -> str:
    """Return `as_json` as the text of card.json."""
    return json.dumps(as_json(card), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_html(card: Card) -> Markup:
    """Return the card as an HTML section without styles; all text is escaped.

    Its elements have the classes card, card-title, card-lines and card-trust, the latter also the level of trust.
    """
    lines = Markup("").join(
        Markup('<dt data-key="{}">{}</dt><dd>{}</dd>').format(line.key, line.label, prose(line.text))
        for line in card.lines
    )
    trust = Markup('<dt>trust</dt><dd class="card-trust {0}"><b>{0}:</b> {1}</dd>').format(
        card.trust.level, prose(card.trust.reason)
    )
    return Markup(
        '<section class="card {form}" aria-label="Summary"><p class="card-title">{title}</p>'
        '<dl class="card-lines">{lines}{trust}</dl></section>'
    ).format(form=card.form.replace("_", "-"), title=card.heading, lines=lines, trust=trust)
