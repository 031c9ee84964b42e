"""Tables for a terminal, on stdout."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from study.cli.progress import duration

if TYPE_CHECKING:
    from study.cli.doctor import Check
    from study.cli.predict import Outlook
    from study.cli.prepared import PreparedStudy

_GAP = 2
"""columns between those of a table"""

_BESIDE_AN_ID = 60
"""columns that status and reason need beside a trial's id"""


def terminal() -> Console:
    """Plain text, never markup: trial ids and reasons may hold brackets. A pipe gets long lines whole."""
    return Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 200)


def print_plan(prepared: "PreparedStudy") -> None:
    """Every trial with its status and reason, then counts, time and cost.

    Where a reason beside each trial would cut the trials' ids in two, the reasons are numbered and stand below.
    """
    console = terminal()
    named = [
        (row.trial.trial_id if row.trial else f"{prepared.label(row)}, repeat {row.fields['repeat']}", row)
        for row in prepared.rows
    ]
    longest_id = max((len(row.trial.trial_id) for row in prepared.rows if row.trial), default=0)
    reasons = {
        reason: i for i, reason in enumerate(dict.fromkeys(row.reason for row in prepared.rows if row.reason), 1)
    }
    beside = console.width >= longest_id + _BESIDE_AN_ID
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", overflow="fold")
    table.add_column("status", no_wrap=True)
    if reasons:
        table.add_column("reason", overflow="fold", no_wrap=not beside)
    for what, row in named:
        reason = row.reason if beside or not row.reason else f"[{reasons[row.reason]}]"
        table.add_row(what, row.status.replace("_", " "), *([reason] if reasons else []))
    console.print(f"{prepared.study.name}: {prepared.study.question}\n")
    console.print(table)
    if not beside:
        for reason, i in reasons.items():
            console.print(f"[{i}] {reason}", soft_wrap=True)
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in prepared.counts.items())
    console.print(f"\n{len(prepared.rows)} trials: {counts}")
    console.print(f"results folder: {prepared.configuration.out}", soft_wrap=True)
    console.print(_estimate(prepared))


def _estimate(prepared: "PreparedStudy") -> str:
    found = prepared.estimate
    if found.duration_s is None:
        return f"estimated time: unknown ({found.basis})"
    parts = [f"estimated time: {duration(found.duration_s)}"]
    if found.gpu_hours:
        parts.append(f"{found.gpu_hours:.2f} GPU-hours")
    if found.cost is not None:
        parts.append(f"cost {found.cost:.2f}")
    return f"{', '.join(parts)} ({found.basis})"


def print_status(found: dict[str, Any]) -> None:
    """What `study.cli.status.status_of` found."""
    console = terminal()
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in found["counts"].items())
    again = f", {len(found['failures'])} to run again" if found["failures"] else ""
    console.print(f"study {found['study']}: {counts or 'no trial has been run'}; {len(found['left'])} left{again}")
    for failure in found["failures"]:
        console.print(
            f"{failure['status']}: {failure['trial_id']}: {failure['reason']}; log: {failure['log'] or 'none'}",
            soft_wrap=True,
        )
    for trial_id in found["damaged"]:
        console.print(f"damaged, runs again: {trial_id}", soft_wrap=True)
    for trial_id in found["left"]:
        console.print(f"left: {trial_id}", soft_wrap=True)
    if found["command"] and (found["left"] or found["failures"] or found["damaged"]):
        console.print(f"run what is left with: {found['command']}", soft_wrap=True)


def print_summary(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """A table; where the terminal is too narrow for it without cutting words, a few lines for each row."""
    if not rows:
        return
    console = terminal()
    longest_words = [max(map(len, " ".join(cells).split())) for cells in zip(columns, *rows, strict=True)]
    if sum(longest_words) + _GAP * (len(columns) - 1) > console.width:
        for line in _as_lines(columns, rows, console.width):
            console.print(line, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _as_lines(columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> Iterator[str]:
    """What is the same in every row once, then each row; what is not known is left out."""
    same = [len(rows) > 1 and len(set(cells)) == 1 for cells in zip(*rows, strict=True)]
    shared = _pairs(name for name in zip(columns, rows[0], same, strict=True) if name[2])
    if shared:
        yield textwrap.fill(f"in every row: {shared}", width, break_long_words=False, break_on_hyphens=False)
    for row in rows:
        text = _pairs(cell for cell in zip(columns, row, same, strict=True) if not cell[2])
        yield textwrap.fill(
            text, width, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _pairs(cells: Iterable[tuple[str, str, bool]]) -> str:
    return "; ".join(f"{column}: {' '.join(cell.split())}" for column, cell, _ in cells if cell.strip(" –"))


def print_outlook(found: "Outlook") -> None:
    """Predictions, the laws behind them, and what to do next."""
    console = terminal()
    for title, columns, rows in found.tables:
        console.print(f"{title}\n")
        print_summary(columns, rows)
        console.print()
    for line in found.lines:
        console.print(line, soft_wrap=True)


_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def print_checks(checks: "Sequence[Check]", only_troubles: bool) -> None:
    """What the doctor found, and the mend of each trouble."""
    from rich.text import Text

    console = terminal()
    for check in checks:
        if only_troubles and check.status == "ok":
            continue
        console.print(
            Text(f"{_MARKS[check.status][0]:4} ", style=_MARKS[check.status][1]) + Text(f"{check.name}: {check.found}"),
            soft_wrap=True,
        )
        if check.mend:
            console.print(f"     mend: {check.mend}", soft_wrap=True)
