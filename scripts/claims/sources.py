"""Figures of committed results, and what a page says with them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

import analysis
from analysis import Frames
from analysis.predict.inputs import ReportInputs, report_inputs
from analysis.read.results import Results, load_reduced
from analysis.report.sections import TABLES

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Source = tuple[str, str]
"""Folder below benchmarks/results, and name of the figure in its summary.json."""


class ClaimError(Exception):
    """A claim refers to results that do not exist. One line."""


@dataclass(frozen=True)
class Value:
    """A figure from results: value, 95 % interval if known, and the figures that it shows which miss their goals."""

    value: float
    interval: tuple[float, float] | None = None
    missed: frozenset[Source] = frozenset()
    holds: bool | None = None

    def __rmul__(self, factor: float) -> "Value":
        low, high = sorted(factor * end for end in self.interval) if self.interval else (0.0, 0.0)
        return replace(self, value=factor * self.value, interval=(low, high) if self.interval else None)

    def __truediv__(self, other: "Value") -> "Value":
        """Return the ratio of two values. It has no interval."""
        return Value(self.value / other.value, None, self.missed | other.missed)

    def __format__(self, decimals: str) -> str:
        """Return the value with this number of decimals, with its interval unless `decimals` ends in `v`.

        `g`: a goal, with as many decimals as it has.
        """
        if decimals == "g":
            return f"{self.value:g}"
        places = int(decimals.removesuffix("v") or 0)
        numbers = (self.value, *(self.interval or ())) if not decimals.endswith("v") else (self.value,)
        value, *ends = (f"{rounded(number, places):,.{places}f}" for number in numbers)
        return f"{value} [{', '.join(ends)}]" if ends else value


def rounded(value: float, decimals: int) -> float:
    """Return the value rounded to so many decimals, without a negative zero."""
    return round(value, decimals) + 0.0


@dataclass(frozen=True)
class Cell:
    """A cell of a table, or a line: a `str.format` template with the values in it."""

    template: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return self.template.format(*self.values)


def cell(template: str, *values: Value) -> Cell:
    """Return a cell. `{:3}` shows three decimals and the interval, `{:3v}` only the value."""
    return Cell(template, values)


def yes_no(*values: Value) -> Cell:
    """Return a cell that says whether the figures meet their goals, without repeating equal answers."""
    answers = dict.fromkeys({True: "yes", False: "no", None: "no goal"}[value.holds] for value in values)
    return Cell(", ".join(answers), values)


@dataclass(frozen=True)
class Claim:
    """Text of a page in which `{}` stands for a number, or for a number and its interval, and the values of these."""

    page: str
    text: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Table:
    """A table that is generated between two markers of a page."""

    page: str
    name: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str | Cell]]


@dataclass(frozen=True)
class Stated:
    """Text of a page whose numbers are not measured, and what they are: a setting, a definition, a source, ..."""

    page: str
    text: str
    what: str


Entries = list[Claim | Table | Stated]


def claim(page: str, text: str, *values: Value) -> Claim:
    """Return a claim. Raises ClaimError if the numbers of placeholders and values differ."""
    if text.count("{}") != len(values):
        raise ClaimError(f"{page}: {text!r} has {text.count('{}')} placeholders and {len(values)} values")
    return Claim(page, text, values)


def on_page(page: str) -> tuple[Callable[..., Claim], Callable[..., Stated], Callable[..., Table]]:
    """Return functions that make the claims, stated texts and tables of a page, without its name."""
    return partial(claim, page), partial(Stated, page), partial(Table, page)


# ------------------------------------------------------------------------------------------------------------- results


@cache
def summary(folder: str) -> dict[str, dict[str, Any]]:
    """Return the figures of a results folder by name. Raises ClaimError if it has no summary."""
    file = RESULTS / folder / "summary.json"
    if not file.exists():
        raise ClaimError(f"no {file.relative_to(ROOT)}")
    return {row["name"]: row for row in json.loads(file.read_text())["figures"]}


def figure(folder: str, name: str) -> Value:
    """Return one figure of a results folder. Raises ClaimError if there is none of this name."""
    if name not in summary(folder):
        raise ClaimError(f"benchmarks/results/{folder}/summary.json has no figure {name!r}")
    row = summary(folder)[name]
    missed = frozenset([(folder, name)] if row["holds"] is False else [])
    interval = (row["interval"][0], row["interval"][1]) if row["interval"] else None
    return Value(float(row["value"]), interval, missed, row["holds"])


def figures(folder: str, pattern: str) -> list[Value]:
    """Return all figures whose complete name matches the regular expression. Raises ClaimError if there are none."""
    names = [name for name in summary(folder) if re.fullmatch(pattern, name)]
    if not names:
        raise ClaimError(f"benchmarks/results/{folder}/summary.json has no figure like {pattern!r}")
    return [figure(folder, name) for name in names]


def goal(folder: str, name: str, position: int = 0) -> Value:
    """Return a number of a figure's goal: the first one, or the one at `position`."""
    figure(folder, name)
    return number(float(re.findall(r"\d+(?:\.\d+)?", summary(folder)[name]["goal"])[position]))


def unit_number(folder: str, name: str) -> Value:
    """Return the first number in the unit of a figure, such as the 6.0 of `of the 6.0 ms that it costs`."""
    figure(folder, name)
    return number(float(re.findall(r"-?\d+(?:\.\d+)?", summary(folder)[name]["unit"])[0]))


def missed(values: Sequence[Value]) -> list[Value]:
    """Return the figures that miss their goals."""
    return [value for value in values if value.holds is False]


def number(value: float, low: float | None = None, high: float | None = None) -> Value:
    """Return a value computed from samples or tables."""
    return Value(float(value), None if low is None or high is None else (float(low), float(high)))


def count(values: Sequence[Value]) -> Value:
    """Return how many figures there are. It mentions those that miss their goals."""
    return Value(len(values), None, frozenset().union(*(value.missed for value in values)))


@cache
def samples(folder: str) -> list[dict[str, Any]]:
    """Return the raw samples of a results folder."""
    return list(json.loads((RESULTS / folder / "summary.json").read_text())["samples"])


@cache
def frames(folder: str) -> Frames:
    """Return trials, steps and buckets of a study below benchmarks/results."""
    return analysis.load(RESULTS / folder)


@cache
def committed_results(folder: str) -> Results:
    """Return the results of a study below benchmarks/results, with reduced steps."""
    return load_reduced(RESULTS / folder)


@cache
def committed_inputs(folder: str) -> list[ReportInputs]:
    """Return what the report of a study below benchmarks/results is made from, which takes a second or two."""
    return report_inputs(committed_results(folder))


@cache
def table(folder: str, name: str) -> pd.DataFrame:
    """Return the rows of a table of a study's report; see `analysis.report.sections.TABLES`."""
    return TABLES[name](committed_inputs(folder)[0]).frame


def one(rows: pd.DataFrame, **fields: Any) -> pd.Series:
    """Return the only row with these fields. Raises ClaimError if there is none, or more than one."""
    for name, value in fields.items():
        rows = rows[rows[name] == value]
    if len(rows) != 1:
        raise ClaimError(f"{len(rows)} rows with {fields}, not one")
    return rows.iloc[0]
