"""Print tables and lists to stdout, fitted to the terminal."""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from study.cli.progress import duration
from study.cli.status import failure_line
from study.errors import counted

if TYPE_CHECKING:
    from study.cli.doctor import HealthCheck
    from study.cli.predict import Outlook, ShownTable
    from study.cli.prepared import PreparedStudy
    from study.plan.needs import Needs

_GAP = 2
"""character columns between the columns of a table"""

_STATUS_AND_REASON_WIDTH = 60
"""character columns for status and reason next to a trial's id"""


def terminal() -> Console:
    """Return a console without markup, since ids and reasons may contain brackets. A pipe has 80 columns."""
    return Console(markup=False, emoji=False, highlight=False)


def print_table(table: Table) -> None:
    """Print a table without blanks at the ends of its lines."""
    console = terminal()
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_studies(studies: "Mapping[str, tuple[str, Needs]]") -> None:
    """Print each study with its question, and what it needs and how long it takes on this machine."""
    width = terminal().width
    indent = max(map(len, studies)) + 2
    for name, (question, needs) in studies.items():
        print(textwrap.fill(f"{name:{indent}}{question}", width, subsequent_indent=" " * indent))
        line = f"{' ' * indent}Here: {_needs_line(needs)}"
        print(textwrap.fill(line, width, subsequent_indent=" " * indent))


def _needs_line(needs: "Needs") -> str:
    ranks = counted(needs.ranks, "GPU" if needs.device == "cuda" else "CPU rank")
    nodes = f" of {counted(needs.nodes, 'node')}" if needs.nodes > 1 else ""
    parts = [f"{counted(needs.trials, 'trial')} on up to {ranks}{nodes}, about {duration(needs.duration_s)}"]
    if needs.infeasible:
        parts.append(f"{needs.infeasible} of them not feasible here")
    if needs.data_dir:
        parts.append("needs --data-dir DIR")
    if needs.made_for_gpus:
        parts.append("a small form, since the study is made for GPUs")
    return f"{'; '.join(parts)}."


def print_plan(prepared: "PreparedStudy") -> None:
    """Print every trial with its status and reason, then counts, time and cost.

    If reasons next to the ids would split the ids, they are numbered and printed below the table.
    """
    console = terminal()
    labelled_rows = [
        (row.trial.trial_id if row.trial else f"{prepared.label(row)}, repeat {row.fields['repeat']}", row)
        for row in prepared.rows
    ]
    longest_id = max((len(row.trial.trial_id) for row in prepared.rows if row.trial), default=0)
    reasons = {
        reason: i for i, reason in enumerate(dict.fromkeys(row.reason for row in prepared.rows if row.reason), 1)
    }
    reasons_in_table = console.width >= longest_id + _STATUS_AND_REASON_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", overflow="fold")
    table.add_column("status", no_wrap=True)
    if reasons:
        table.add_column("reason", overflow="fold", no_wrap=not reasons_in_table)
    for label, row in labelled_rows:
        reason = row.reason if reasons_in_table or not row.reason else f"[{reasons[row.reason]}]"
        table.add_row(label, row.status.replace("_", " "), *([reason] if reasons else []))
    console.print(f"{prepared.study.name}: {prepared.study.question}\n")
    print_table(table)
    if not reasons_in_table:
        for reason, i in reasons.items():
            console.print(f"[{i}] {reason}", soft_wrap=True)
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in prepared.counts.items())
    console.print(f"\n{len(prepared.rows)} trials: {counts}")
    console.print(f"results folder: {prepared.configuration.out}", soft_wrap=True)
    console.print(_estimate(prepared))


def _estimate(prepared: "PreparedStudy") -> str:
    estimate = prepared.estimate
    parts = [f"estimated time: about {duration(estimate.duration_s)}"]
    if estimate.gpu_hours:
        parts.append(f"{estimate.gpu_hours:.2f} GPU-hours")
    if estimate.cost is not None:
        parts.append(f"cost {estimate.cost:.2f}")
    return f"{', '.join(parts)} ({estimate.basis})"


def print_status(status: dict[str, Any]) -> None:
    """Print the result of `study.cli.status.status_of`."""
    console = terminal()
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in status["counts"].items())
    failed = f", {len(status['failures'])} to run again" if status["failures"] else ""
    console.print(f"study {status['study']}: {counts or 'no trial has run'}; {len(status['left'])} left{failed}")
    for failure in status["failures"]:
        console.print(failure_line(failure), soft_wrap=True)
    for trial_id in status["damaged"]:
        console.print(f"damaged, will run again: {trial_id}", soft_wrap=True)
    for trial_id in status["left"]:
        console.print(f"left: {trial_id}", soft_wrap=True)
    if status["command"] and (status["left"] or status["failures"] or status["damaged"]):
        console.print(f"run the remaining trials with: {status['command']}", soft_wrap=True)


def print_summary(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table, or a few lines per row if it is too wide without splitting words or intervals."""
    if not rows:
        return
    width = terminal().width
    widths = [max(map(len, _units(" ".join(cells)))) for cells in zip(columns, *rows, strict=True)]
    if sum(widths) + _GAP * (len(columns) - 1) > width:
        for line in _as_lines(columns, rows, width):
            terminal().print(line, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, min_width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold", min_width=min_width)
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _units(text: str) -> list[str]:
    """Return the parts of a text that stay on one line: words, and values with their intervals."""
    return re.findall(r"\S+ \[[^\]]*\]|\S+", text)


def _as_lines(columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> Iterator[str]:
    """Yield the cells that all rows share once, then the other cells of each row. Unknown values are left out."""
    is_shared = [len(rows) > 1 and len(set(cells)) == 1 for cells in zip(*rows, strict=True)]
    shared = _pairs(name for name in zip(columns, rows[0], is_shared, strict=True) if name[2])
    if shared:
        yield textwrap.fill(f"all rows: {shared}", width, break_long_words=False, break_on_hyphens=False)
    for row in rows:
        text = _pairs(cell for cell in zip(columns, row, is_shared, strict=True) if not cell[2])
        yield textwrap.fill(
            text, width, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )


def _pairs(cells: Iterable[tuple[str, str, bool]]) -> str:
    return "; ".join(f"{column}: {' '.join(cell.split())}" for column, cell, _ in cells if cell.strip(" –"))


def print_outlook(outlook: "Outlook", details: bool, laws: bool) -> None:
    """Print the predictions and what to do next; on request the complete table, and the laws behind it."""
    console = terminal()

    def print_part(tables: "Sequence[ShownTable]", lines: Sequence[str] = ()) -> None:
        for title, columns, rows in tables:
            console.print(f"{title}\n")
            print_summary(columns, rows)
            console.print()
        for line in lines:
            console.print(line, soft_wrap=True)

    print_part(outlook.tables, outlook.lines)
    if details:
        console.print()
        print_part(outlook.details, outlook.detail_lines)
    if laws:
        console.print()
        print_part(outlook.laws)
    if not (details or laws):
        console.print("More: --details (every column), --laws (the laws, their weights and errors)")


_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def print_checks(checks: "Sequence[HealthCheck]", only_problems: bool) -> None:
    """Print the doctor's checks, with a fix for each problem."""
    from rich.text import Text

    console = terminal()
    for check in checks:
        if only_problems and check.status == "ok":
            continue
        console.print(
            Text(f"{_MARKS[check.status][0]:4} ", style=_MARKS[check.status][1])
            + Text(f"{check.name}: {check.message}"),
            soft_wrap=True,
        )
        if check.fix:
            console.print(f"     fix: {check.fix}", soft_wrap=True)
