"""The parts of the page that are the same for every study: glossary, security policy, and embedded data."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import escape

from analysis.report.picture import csv_uri
from analysis.tables.table import Table

MOST_EMBEDDED_BYTES = 200_000
"""Maximum size of all tables embedded as CSV; the largest ones are left out first. All are files next to the page."""

TEMPLATES = Path(__file__).parent / "templates"


def static(name: str) -> str:
    """Return a static file of the page, without the newline at its end."""
    return (TEMPLATES / name).read_text().rstrip("\n")


def security_policy(script: str, style: str) -> str:
    """Return a content security policy that allows only this script and this style, by hash.

    Attributes `style` are allowed, since figures set the colour of each part with them.
    """
    script_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def embedded(tables: Mapping[str, Table]) -> dict[str, str]:
    """Return data URIs of the tables' CSV by name: the smallest ones, up to `MOST_EMBEDDED_BYTES` in all."""
    uris = {name: csv_uri(table.to_csv()) for name, table in tables.items() if len(table.frame)}
    total, chosen = 0, {}
    for name, uri in sorted(uris.items(), key=lambda item: len(item[1])):
        total += len(uri)
        if total > MOST_EMBEDDED_BYTES:
            break
        chosen[name] = uri
    return chosen


class Term(NamedTuple):
    """A term of the report. pattern: the words that stand for it on the page, as a regular expression."""

    name: str
    meaning: str
    pattern: str

    @property
    def anchor(self) -> str:
        return "term-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


def glossary(ranks: tuple[str, str]) -> list[Term]:
    """Return the terms of the report; `ranks` are singular and plural of what ranks are called."""
    one, several = ranks
    return [
        Term("rank", f"one process of the training, on one {one}.", r"(?<!slowest )ranks?(?! \d)"),
        Term(
            "weak scaling",
            f"the batch per {one} stays constant as {several} are added, so the global batch grows.",
            r"weak(?: scaling)?",
        ),
        Term(
            "strong scaling",
            f"the global batch stays constant as {several} are added, so each {one} gets less work.",
            r"strong(?: scaling)?",
        ),
        Term(
            "efficiency",
            f"throughput / (number of {several} × throughput of one). 100 % is ideal.",
            "efficienc(?:y|ies)",
        ),
        Term(
            "work", f"number of {several} × efficiency: how many ideal {several} would do the same.", "do the work of"
        ),
        Term("global batch", f"samples per step on all {several} together.", "global batch"),
        Term("configuration", "all trials that differ only in the repeat.", "configurations?"),
        Term(
            "series",
            f"configurations that differ only in the number of {several}, and in the batch that follows from it.",
            "series",
        ),
        Term(
            "worker group",
            "the processes that run trials one after another; each repeat has its own.",
            "worker groups?",
        ),
        Term(
            "separate start",
            "all processes of the training were started anew, so differences between starts are in the interval.",
            "separate starts?",
        ),
        Term(
            "plain step", "a step without any measurement inside. All throughputs are of plain steps.", "plain steps?"
        ),
        Term(
            "exposed communication",
            "the part of the all-reduces that the backward pass does not hide.",
            "exposed (?:communication|transfer)|communication that is not hidden",
        ),
        Term("bucket", "the gradients that one all-reduce averages together.", "buckets?"),
        Term("window", "consecutive steps of a trial that are timed in the same way.", "windows?"),
        Term("transfer", "time in which gradients move between ranks.", "(?<!exposed )transfer"),
        Term(
            "wait for slowest rank",
            "time in which the other ranks wait for the one that is last, and what they then compute more slowly.",
            "(?:wait(?:ing)? for )?(?:the )?slowest rank",
        ),
        Term(
            "slower compute",
            f"kernels take longer on several {several} than on one: shared cores, memory or clocks, or the all-reduce "
            "itself, which occupies a part of the device.",
            "slower compute",
        ),
        Term(
            "compute that communication slows down",
            "how much longer a step is than one without communication, beyond its exposed transfers: the all-reduce "
            "occupies a part of the device.",
            "compute that communication slows down",
        ),
        Term("unexplained", "the part of the slowdown without a measured cause.", "unexplained"),
        Term("compute", "forward, loss, backward and optimizer on the device.", "bound by compute"),
        Term(
            "host-bound",
            "the CPU cannot launch work as fast as the device computes it.",
            "host-bound|bound by the host|host bounds",
        ),
        Term(
            "upper bound",
            "the most that a change could gain: the step without the part that it removes.",
            "upper bound",
        ),
        Term(
            "held-out error",
            "error of the prediction for the largest measured size, made without that size.",
            "held-out error",
        ),
        Term(
            "measurement overhead",
            "how much longer a step takes while its phases are measured. Throughput is measured without.",
            "measurement overhead",
        ),
        Term("throttled", "the driver lowered the clock of a device because of power or temperature.", "throttled"),
        Term(
            "largest lossless batch",
            "the largest global batch whose accuracy is not worse than that of the reference batch.",
            "largest lossless batch",
        ),
        Term("infeasible", "not run, because this machine or combination of fields does not allow it.", "infeasible"),
        Term("pruned", "not run, because a smaller batch already ran out of memory.", "pruned"),
        Term("95 % interval", "[low, high]: covers the true value in 95 of 100 studies like this one.", "intervals?"),
        Term("not resolved", "the interval is wider than a factor of 2, so the value is not shown.", "not resolved"),
    ]


_UNEXPLAINED = ("a", "button", "code", "dt", "h1", "h2", "h3", "pre", "script", "style", "summary", "svg", "th")
"""Elements whose text has no links to the glossary: headings, code, figures, and what is a link itself."""

_TAG = re.compile(r"(<[^>]*>)")


def with_terms(html: str, terms: Sequence[Term]) -> str:
    """Link the first mention of each term in the visible part of the page to the glossary; hovering shows its meaning.

    The visible part ends where the glossary's own part starts.
    """
    visible, separator, rest = html.partition('<details id="everything">')
    open_terms = {f"t{i}": term for i, term in enumerate(terms)}
    parts, inside = _TAG.split(visible), ""
    is_body = False
    for i, part in enumerate(parts):
        if tag := re.match(r"<(/?)([a-z0-9]+)", part):
            is_body |= tag[2] == "main"
            if not inside and not tag[1] and tag[2] in _UNEXPLAINED:
                inside = tag[2]
            elif tag[1] and tag[2] == inside:
                inside = ""
        elif is_body and not inside and open_terms and not part.startswith("<"):
            parts[i] = _linked(part, open_terms)
    return "".join(parts) + separator + rest


def _linked(text: str, open_terms: dict[str, Term]) -> str:
    """Link the first mention of each open term in a text of the page, and remove the term from `open_terms`."""

    def link(match: re.Match[str]) -> str:
        assert match.lastgroup is not None, "every alternative is a group"
        term = open_terms.pop(match.lastgroup, None)
        if term is None:
            return match[0]
        return f'<a class="term" href="#{term.anchor}" title="{escape(term.meaning)}">{match[0]}</a>'

    alternatives = "|".join(rf"(?P<{key}>\b(?:{term.pattern})\b)" for key, term in open_terms.items())
    return re.sub(alternatives, link, text, flags=re.I)
