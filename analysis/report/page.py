"""The parts of the page that are the same for every study: glossary, security policy, and embedded data."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

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


def glossary(ranks: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the terms of the report with their meaning; `ranks` are singular and plural of what ranks are called."""
    one, several = ranks
    return [
        ("rank", f"one process of the training, on one {one}."),
        ("weak scaling", f"the batch per {one} stays constant as {several} are added, so the global batch grows."),
        ("strong scaling", f"the global batch stays constant as {several} are added, so each {one} gets less work."),
        ("efficiency", f"throughput / (number of {several} × throughput of one). 100 % is ideal."),
        ("work", f"number of {several} × efficiency: how many ideal {several} would do the same."),
        ("configuration", "all trials that differ only in the repeat."),
        ("worker group", "the processes that run trials one after another; each repeat has its own."),
        ("plain step", "a step without any measurement inside. All throughputs are of plain steps."),
        ("exposed communication", "the part of the all-reduces that the backward pass does not hide."),
        ("transfer", "time in which gradients move between ranks."),
        ("wait for slowest rank", "time in which the other ranks wait for the one that is last."),
        ("host-bound", "the CPU cannot launch work as fast as the device computes it."),
        ("95 % interval", "[low, high]: covers the true value in 95 of 100 studies like this one."),
        ("not resolved", "the interval is wider than a factor of 2, so the value is not shown."),
    ]
