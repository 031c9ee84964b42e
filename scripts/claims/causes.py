"""Figures of docs/evidence.md: causes of a slowdown, recovered from known laws and in committed series."""

import re

from scripts.claims.sources import (
    Cell,
    Entries,
    Value,
    cell,
    figure,
    goal,
    on_page,
    summary,
    unit_number,
    yes_no,
)

says, stated, shows = on_page("docs/evidence.md")


NO_NOISE, NOISY, NAMED = (
    ", no noise: largest error",
    ", noisy: largest error of a cause, median of studies",
    ": late rank named",
)
LAWS = [name.removesuffix(NO_NOISE) for name in summary("known-laws") if name.endswith(NO_NOISE)]
SERIES = "committed series that grow by more than 5 %{}: remainder at most 10 % of the growth"


def _law_row(law: str) -> tuple[str | Cell, ...]:
    values = [figure("known-laws", f"{law}{ending}") for ending in (NO_NOISE, NOISY, NAMED)]
    return law, *(cell("{:1} %", 100 * value) for value in values), yes_no(*values)


def remainders_met(kind: str = "") -> tuple[Value, Value]:
    """Return how many series meet the goal, and of how many: of those on GPUs that are not host-bound, or of a kind."""
    series = unit_number("known-laws", SERIES.format(kind))
    return series.value * figure("known-laws", SERIES.format(kind)), series


def _missed_remainders() -> list[tuple[str | Cell, ...]]:
    """Return every series that misses the goal."""
    rows: list[tuple[str | Cell, ...]] = []
    for name in summary("known-laws"):
        if name.startswith("remainder of "):
            value = figure("known-laws", name)
            label = re.sub(r"^remainder of |, workload (?=,)| \(\S*\)$", "", name)
            label = re.sub(r"^[^:]+", r"`\g<0>`", label)
            spread = figure("known-laws", name.replace("remainder", "range of steps", 1))
            rows.append((label, cell("{:1} %", 100 * value), cell("{:0} %", 100 * spread), yes_no(value)))
    return rows


ENTRIES: Entries = [
    shows(
        "known-laws",
        ("cause", "largest error without noise", "with noise, of the growth", "late rank named", "goals met"),
        [_law_row(law) for law in LAWS],
    ),
    says(
        "in {} of {} series on GPUs that are not host-bound, in {} of {} that are, and in {} of {} on two CPU ranks; "
        "the others missed it",
        *remainders_met(),
        *remainders_met(", host-bound (no remainder by definition)"),
        *remainders_met(", two CPU ranks"),
    ),
    shows("remainders", ("series", "remainder / growth", "range of steps / growth", "goal met"), _missed_remainders()),
    stated("grows by more than 5 %, the remainder is at most 10 % of the growth in", "goal"),
    stated("with a spread of 3 % per step", "setting"),
    says(
        "within {} % of it without noise, and within {} % of the growth",
        100 * goal("known-laws", f"{LAWS[0]}{NO_NOISE}"),
        100 * goal("known-laws", f"{LAWS[0]}{NOISY}"),
    ),
    says("is named in {} % of the studies", 100 * goal("known-laws", f"{LAWS[0]}{NAMED}")),
]
