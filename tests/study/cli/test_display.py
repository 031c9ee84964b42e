"""Tables printed to a terminal."""

import sys

import pytest
from rich.text import Text

from study.cli.terminal import print_summary

COLUMNS = ["law", "step time (ms)", "residual (%)", "note"]
ROWS = [
    ("parts of the breakdown", "T₁ + c · (host + wait)", "–", "identifiable"),
    ("all-reduce, α and β fitted", "T₁ + 2(N-1)/N · β", "25.77", "identifiable"),
]


def printed(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_summary(COLUMNS, ROWS)
    return [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_fits_is_printed_as_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(100, capsys, monkeypatch)
    assert len(lines) == 3
    assert lines[0].split() == " ".join(COLUMNS).split()


def test_a_table_too_wide_for_the_terminal_becomes_a_few_lines_per_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(40, capsys, monkeypatch) == [
        "all rows: note: identifiable",
        "- law: parts of the breakdown; step time",
        "  (ms): T₁ + c · (host + wait)",
        "- law: all-reduce, α and β fitted; step",
        "  time (ms): T₁ + 2(N-1)/N · β; residual",
        "  (%): 25.77",
    ]


def test_lines_of_a_styled_table_end_without_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_summary(COLUMNS, ROWS)
    output = capsys.readouterr().out
    assert "\x1b[1m" in output, "the headers are bold"
    lines = [Text.from_ansi(line).plain for line in output.splitlines()]
    assert lines == [line.rstrip() for line in lines]


def test_a_narrow_table_splits_headers_but_no_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    intervals = ["2,295.1 [1,024.0, 3,566.2]", "97.9 [90.1, 98.2]"]
    print_summary(["throughput (samples/s)", "n"], [(interval, "3") for interval in intervals])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 40 and line == line.rstrip() for line in lines)
    assert [line.rsplit(maxsplit=1)[0] for line in lines[-2:]] == intervals
