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
    missed,
    number,
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
COVERED = figures("coverage", r"coverage of .*, (1\+1\+1|1x5) repeats, .*")
GOALS = [100 * goal("coverage", "coverage of speed-up, 1x5 repeats, equal groups", end) for end in (0, 1)]


def _coverage(layout: str, case: str, rule: str = "") -> tuple[Value, Value]:
    """Return the coverage of throughput and speed-up in percent."""
    names = (f"{rule}coverage of {what}, {layout} repeats, {case}" for what in ("throughput", "speed-up"))
    throughput, speed_up = (100 * figure("coverage", name) for name in names)
    return throughput, speed_up


def _coverage_row(case: str) -> tuple[str | Cell, ...]:
    now = [_coverage(layout, case) for layout in ("1+1+1", "1x5")]
    width = figure("coverage", f"width of speed-up, 1x5 / that of the former rule, 2+1, {case}")
    return (
        case,
        cell("{:1v}, {:1v}", *_coverage("2+1", case, "former rule: ")),
        *(cell("{:1v}, {:1v}", *pair) for pair in now),
        cell("{:2}", width),
        yes_no(*(value for pair in now for value in pair), width),
    )


def _missed_rows(folder: str, pattern: str) -> list[tuple[str | Cell, ...]]:
    """Return every figure that misses its goal, in percent if it is a share."""
    rows: list[tuple[str | Cell, ...]] = []
    for name, row in summary(folder).items():
        value = figure(folder, name)
        if value.holds is False and re.fullmatch(pattern, name):
            form, factor = ("{:2}", 1) if row["unit"] == "ratio" else ("{:1} %", 100)
            label = re.sub(r"^remainder of |, workload (?=,)| \(\S*\)$", "", name)
            rows.append((label, cell(form, factor * value), row["goal"], yes_no(value)))
    return rows


def goal_counts(layouts: str) -> tuple[Value, Value, Value]:
    """Return how many coverages of these layouts meet the goal, of how many, and how many miss it."""
    judged = [
        value for value in figures("coverage", rf"coverage of .*, ({layouts}) repeats, .*") if value.holds is not None
    ]
    return count([value for value in judged if value.holds]), number(len(judged)), count(missed(judged))


COVERAGE: Entries = [
    stated("in 4,000 generated studies per case, 1,000 if trials are missing", "setting"),
    says("Goal: {} to {} %.", *GOALS),
    says("(1+1+1 and 1x5 repeats), {} of {} cells are within it and {} miss it", *goal_counts(r"1\+1\+1|1x5")),
    says("(2+1 and 3+2, as in studies before that), {} of {} are and {} miss it", *goal_counts(r"2\+1|3\+2")),
    shows(
        "coverage",
        ("case", "former rule, 2+1 repeats", "1+1+1 repeats", "1x5 repeats", "width (goal 0.6)", "goals met"),
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


def remainders_met(kind: str = "") -> tuple[Value, Value]:
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
        *remainders_met(),
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
