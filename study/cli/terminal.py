"""Print tables and lists to stdout, fitted to the terminal."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from analysis.duration import duration
from study.cli.status import failure_lines
from study.errors import counted

if TYPE_CHECKING:
    from analysis.verdict.card import Card
    from study.cli.doctor import HealthCheck
    from study.cli.predict import Outlook, ShownTable
    from study.cli.prepared import PreparedStudy
    from study.plan.needs import Needs
    from trainables.scratch import Leftover

_GAP = 2
"""character columns between the columns of a table"""

_TRAILING_BLANKS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")
"""Blanks at the end of a line, which may be within a style."""

NO_GPU = "no GPU found: measuring CPU ranks"


def terminal() -> Console:
    """Return a console without markup, since ids and reasons may contain brackets. A pipe has 80 columns."""
    return Console(markup=False, emoji=False, highlight=False)


def print_table(table: Table) -> None:
    """Print a table without blanks at the ends of its lines."""
    console = terminal()
    with console.capture() as captured:
        console.print(table)
    print(*(_TRAILING_BLANKS.sub(r"\1", line) for line in captured.get().splitlines()), sep="\n")


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


CARD_WIDTH = 80
"""Maximum character columns of the summary card."""

_TRUST_STYLES = {"good": "green", "fair": "yellow", "poor": "red"}


def print_card(card: "Card") -> None:
    """Print the summary card, at most as wide as the terminal."""
    from rich.text import Text

    from analysis.report.card import as_text

    console = terminal()
    heading, *lines = as_text(card, min(CARD_WIDTH, console.width)).splitlines()
    text = Text("\n".join([heading, *lines]))
    text.stylize("bold", 0, len(heading))
    text.highlight_regex(rf"(?m)(?<=^  trust ) *{card.trust.level}", _TRUST_STYLES[card.trust.level])
    console.print(text, soft_wrap=True)


def print_plan(prepared: "PreparedStudy") -> None:
    """Print the trials with their status, one row per reason for those that cannot run, then counts, time and cost.

    Other reasons are numbered and printed below the table, since they would split the ids.
    """
    console = terminal()
    impossible: dict[tuple[str, str], int] = {}
    reasons: dict[str, int] = {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("trial", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in prepared.rows:
        if row.status in ("infeasible", "skipped"):
            impossible[row.status, row.reason] = impossible.get((row.status, row.reason), 0) + 1
        elif row.trial:
            note = f"[{reasons.setdefault(row.reason, len(reasons) + 1)}]" if row.reason else ""
            table.add_row(row.trial.trial_id, row.status.replace("_", " "), note)
    print_wrapped(f"{prepared.study.name}: {prepared.study.question}\n")
    if table.row_count:
        print_table(table)
    for reason, i in reasons.items():
        print_wrapped(f"[{i}] {reason}")
    for (status, reason), count in impossible.items():
        print_wrapped(f"{counted(count, 'trial')} {status}: {reason}")
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in prepared.counts.items())
    print_wrapped(f"\n{counted(len(prepared.rows), 'trial')}: {counts}")
    if not prepared.gpus:
        print_wrapped(NO_GPU)
    console.print(f"results folder: {prepared.configuration.out}", soft_wrap=True)
    print_wrapped(_estimate(prepared))


def print_wrapped(text: str) -> None:
    """Print a text, with its lines wrapped between words and the second and later ones indented."""
    for line in text.split("\n"):
        print(textwrap.fill(line, terminal().width, subsequent_indent="  ", break_on_hyphens=False))


def _estimate(prepared: "PreparedStudy") -> str:
    estimate = prepared.estimate
    parts = [f"estimated time: about {duration(estimate.duration_s)}"]
    if estimate.gpu_hours:
        parts.append(f"{estimate.gpu_hours:.2f} GPU-hours")
    if estimate.cost is not None:
        parts.append(f"cost {estimate.cost:.2f}, in the currency of the price")
    elif prepared.configuration.price_per_gpu_hour is not None:
        parts.append("no cost, since no GPU is used")
    return f"{', '.join(parts)} ({estimate.basis})"


def print_status(status: dict[str, Any], card: "Card | None" = None) -> None:
    """Print the result of `study.cli.status.status_of`, which is from a folder that may be somebody else's.

    A command and a path stay on one line, however long: a terminal then copies them without line ends.
    """
    from analysis.read.validate.json_file import plain_json

    status = plain_json(status)
    console = terminal()
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in status["counts"].items())
    failed = f", {len(status['failures'])} to run again" if status["failures"] else ""
    console.print(f"study {status['study']}: {counts or 'no trial has run'}; {len(status['left'])} left{failed}")
    if card is not None:
        print()
        print_card(card)
        print()
    if status["report"]:
        console.print(f"report: {status['report']}", soft_wrap=True)
    for line in failure_lines(status["failures"], length=1000):
        console.print(line, soft_wrap=True)
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
    console = terminal()
    cells = list(zip(columns, *rows, strict=True))
    widths = [max(map(len, _units(" ".join(of_column)))) for of_column in cells]
    free = console.width - sum(widths) - _GAP * (len(columns) - 1)
    if free < 0:
        for line in _as_lines(columns, rows, console.width):
            console.print(line, soft_wrap=True)
        return
    wanted = [max(map(len, of_column)) for of_column in cells]
    for _ in range(free):  # to the column that lacks most
        widest = max(range(len(widths)), key=lambda i: wanted[i] - widths[i])
        widths[widest] += wanted[widest] > widths[widest]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold", width=width)
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
    """Print the best prediction, the predictions and what to do next; on request all columns, and the laws."""

    def print_part(tables: "Sequence[ShownTable]", lines: Sequence[str] = ()) -> None:
        for title, columns, rows in tables:
            print_wrapped(f"{title}\n")
            print_summary(columns, rows)
            print()
        for line in lines:
            print_wrapped(line)

    for line in outlook.answer:
        print_wrapped(line)
    print()
    print_part(outlook.tables, outlook.lines)
    if details:
        print()
        print_part(outlook.details, outlook.detail_lines)
    if laws:
        print()
        print_part(outlook.laws)
    if not (details or laws):
        print_wrapped("More: --details (every column), --laws (the laws, their weights and errors)")


_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def print_removed(removed: "Sequence[Leftover]", kept: "Sequence[Leftover]") -> None:
    """Print the temporary files that were removed, those that were not with the reason, and the total size."""
    from analysis.text import size

    for leftover in removed:
        print(f"removed {leftover.path}, {size(leftover.size_bytes)}")
    for leftover in kept:
        print(f"kept {leftover.path}, {size(leftover.size_bytes)}: {leftover.needed_by}")
    print(f"{size(sum(leftover.size_bytes for leftover in removed))} removed")


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
