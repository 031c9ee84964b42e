"""Figures of docs/evidence.md: coverage of the intervals, and causes recovered from known laws."""

import re
from functools import partial

from scripts.claims.sources import (
    Cell,
    Entries,
    Stated,
    Table,
    Value,
    cell,
    claim,
    count,
    figure,
    figures,
    goal,
    summary,
    unit_number,
    yes_no,
)

PAGE = "docs/evidence.md"
says, stated, shows = partial(claim, PAGE), partial(Stated, PAGE), partial(Table, PAGE)


# ------------------------------------------------------------------------------------------------------------ coverage

CASES = (
    "equal groups",
    "groups differ by 1 sigma",
    "groups differ by 3 sigma",
    "1 sigma, spreads differ",
    "3 sigma, spreads differ, groups too",
    "shared by 1 sigma",
    "shared by 3 sigma",
    "5 % outliers",
)
COVERED = figures("coverage", "coverage of .*")


def _coverage(layout: str, case: str, rule: str = "") -> tuple[Value, Value]:
    """Return the coverage of throughput and speed-up in percent."""
    names = (f"{rule}coverage of {what}, {layout} repeats, {case}" for what in ("throughput", "speed-up"))
    throughput, speed_up = (100 * figure("coverage", name) for name in names)
    return throughput, speed_up


def _coverage_row(case: str) -> tuple[str | Cell, ...]:
    now = [_coverage(layout, case) for layout in ("1+1+1", "1x5")]
    width = figure("coverage", f"width of speed-up / that of the former rule, 1x5 repeats, {case}")
    return (
        case,
        cell("{:1v}, {:1v}", *_coverage("2+1", case, "former rule: ")),
        *(cell("{:1v}, {:1v}", *pair) for pair in now),
        cell("{:2}", width),
        yes_no(*(value for pair in now for value in pair)),
    )


def _missed_rows(folder: str, pattern: str) -> list[tuple[str | Cell, ...]]:
    """Return every figure that misses its goal, in percent if it is a share."""
    rows: list[tuple[str | Cell, ...]] = []
    for name, row in summary(folder).items():
        value = figure(folder, name)
        if value.holds is False and re.fullmatch(pattern, name):
            form, factor = ("{:2}", 1) if row["unit"] == "ratio" else ("{:1} %", 100)
            rows.append((name, cell(form, factor * value), row["goal"], yes_no(value)))
    return rows


COVERAGE: Entries = [
    says(
        "within {} to {} % in {} of {} cells; the others missed it",
        *(100 * goal("coverage", "coverage of speed-up, 1x5 repeats, equal groups", end) for end in (0, 1)),
        count([value for value in COVERED if value.holds]),
        count([value for value in COVERED if value.holds is not None]),
    ),
    shows(
        "coverage",
        ("case", "former rule, 2+1 repeats", "1+1+1 repeats", "1x5 repeats", "width, 1x5", "goals met"),
        [_coverage_row(case) for case in CASES],
    ),
    shows("coverage-missed", ("missed", "measured", "goal", "goal met"), _missed_rows("coverage", ".*")),
]


# ---------------------------------------------------------------------------------------------------------- known laws

NO_NOISE, NOISY, NAMED = (
    ", no noise: largest error",
    ", noisy: largest error of a cause, median of studies",
    ": late rank named",
)
LAWS = [name.removesuffix(NO_NOISE) for name in summary("known-laws") if name.endswith(NO_NOISE)]
SERIES = "committed series that grow by more than 5 %{}: remainder at most 10 % of the growth"
HOST_BOUND = ", host-bound (no remainder by definition)"


def _law_row(law: str) -> tuple[str | Cell, ...]:
    values = [figure("known-laws", f"{law}{ending}") for ending in (NO_NOISE, NOISY, NAMED)]
    return law, *(cell("{:1} %", 100 * value) for value in values), yes_no(*values)


def _share_of_series(kind: str) -> tuple[Value, Value]:
    """Return how many series meet the goal, and of how many."""
    share, series = figure("known-laws", SERIES.format(kind)), unit_number("known-laws", SERIES.format(kind))
    return series.value * share, series


KNOWN_LAWS: Entries = [
    shows(
        "known-laws",
        ("cause", "largest error without noise", "with noise, of the growth", "late rank named", "goals met"),
        [_law_row(law) for law in LAWS],
    ),
    says(
        "at most 10 % of the growth in {} of {} committed series that are not host-bound; the others missed it",
        *_share_of_series(""),
    ),
    shows("remainders", ("missed", "of the growth", "goal", "goal met"), _missed_rows("known-laws", "remainder .*")),
    stated("grows by more than 5 %, the remainder is at most 10 % of the growth in", "goal"),
    stated("with a spread of 3 % per step", "setting"),
    says(
        "within {} % of it without noise, and within {} % of the growth",
        100 * goal("known-laws", f"{LAWS[0]}{NO_NOISE}"),
        100 * goal("known-laws", f"{LAWS[0]}{NOISY}"),
    ),
    says("is named in {} % of the studies", 100 * goal("known-laws", f"{LAWS[0]}{NAMED}")),
]

ENTRIES: Entries = [*COVERAGE, *KNOWN_LAWS]
