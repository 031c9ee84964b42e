"""Tables for a terminal, on stdout."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from study.progress import duration

if TYPE_CHECKING:
    from study.doctor import Check
    from study.outlook import Outlook
    from study.session import Prepared


def terminal() -> Console:
    """Plain text, never markup: trial ids and reasons may hold brackets. A pipe gets long lines whole."""
    return Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 200)


def print_plan(prepared: "Prepared") -> None:
    """Every trial with its status and reason, then counts, time and cost."""
    console = terminal()
    with_reasons = any(row.reason for row in prepared.rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", overflow="fold")
    table.add_column("status", no_wrap=True)
    if with_reasons:
        table.add_column("reason", overflow="fold")
    for row in prepared.rows:
        what = row.trial.trial_id if row.trial else f"{prepared.label(row)}, repeat {row.fields['repeat']}"
        table.add_row(what, row.status.replace("_", " "), *([row.reason] if with_reasons else []))
    console.print(f"{prepared.study.name}: {prepared.study.question}\n")
    console.print(table)
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in prepared.counts.items())
    console.print(f"\n{len(prepared.rows)} trials: {counts}; results folder: {prepared.configuration.out}")
    console.print(_estimate(prepared))


def _estimate(prepared: "Prepared") -> str:
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
    """What `study.status.status_of` found."""
    console = terminal()
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in found["counts"].items())
    console.print(f"study {found['study']}: {counts or 'no trial has been run'}; {len(found['left'])} left")
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
    """The study's summary table."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    terminal().print(table)


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
