"""Caveats about repeats and separate starts, and about the width of the intervals that follow from them."""

import math
from typing import NamedTuple

import pandas as pd

from analysis.statistics import WIDEST
from analysis.study import Analysis, study_ranks
from analysis.text import further_repeats, named, part_of, percent, telling_label
from analysis.two_way import OUTLYING_P

WIDE_INTERVAL = 0.05
"""Relative half-width of a throughput interval above which repeats do not suffice for a close comparison."""


class Intervals(NamedTuple):
    """How precise the throughputs of a study's configurations are.

    of: configurations. single: those that ran once. unresolved: those whose interval is too wide to show; they need up
    to `more` further repeats. wide: those with an interval wider than `WIDE_INTERVAL`. half_width: relative, of the
    median configuration; NaN without intervals.
    """

    of: int
    single: int
    unresolved: int
    more: float
    wide: int
    half_width: float


def intervals(configurations: pd.DataFrame) -> Intervals:
    """Return how precise the throughputs of these configurations are."""
    more = configurations["throughput_samples_per_s_more"].astype(float)
    low, high = (configurations[f"throughput_samples_per_s_{end}"].astype(float) for end in ("low", "high"))
    half_width = ((high / low) ** 0.5 - 1)[~(more > 0)]
    return Intervals(
        len(configurations),
        int((configurations["n"] == 1).sum()),
        int((more > 0).sum()),
        float(more.max()),
        int((half_width > WIDE_INTERVAL).sum()),
        float(half_width.median()),
    )


def repeats(configurations: pd.DataFrame, is_search: bool) -> list[str]:
    """Return caveats about the number of repeats and worker groups, and the width of intervals.

    is_search: the trials are those of `improve`.
    """
    lines = []
    known = intervals(configurations)
    of = " per configuration" + (", those of the search included" if is_search else "")
    if (configurations["groups"] < configurations["n"]).any():
        of += f" in {_counted(configurations['groups'], 'separate start')}"
    if known.single:
        lines.append(
            f"{known.single} of {known.of} configurations ran once, which gives no interval: "
            "run the study with more repeats."
        )
    if known.unresolved:
        lines.append(
            f"{part_of(known.unresolved, known.of, 'throughputs')} not resolved, with a 95 % interval "
            f"wider than a factor of {WIDEST:g}: add up to {further_repeats(known.more)}."
        )
    if math.isfinite(known.half_width):
        advice = (
            f"{part_of(known.wide, known.of, 'intervals')} wider than ±{percent(WIDE_INTERVAL)}: "
            "compare with care, or add repeats."
            if known.wide
            else f"None is wider than ±{percent(WIDE_INTERVAL)}."
        )
        lines.append(
            f"{_counted(configurations['n'], 'repeat')}{of}; the median 95 % interval of throughput is "
            f"±{percent(known.half_width, 1)}. {advice}"
        )
    repeated = configurations["n"] > 1
    if repeated.any() and (configurations.loc[repeated, "throughput_group_names"].map(len) == 0).all():
        lines.append(
            "Each configuration ran in one worker group only, so its interval does not contain differences between "
            "groups: add repeats, each of which starts a group."
        )
    return lines


def _counted(counts: pd.Series, noun: str) -> str:
    """Return a range of counts with their noun: "1 repeat", "3 to 5 repeats"."""
    fewest, most = int(counts.min()), int(counts.max())
    shown = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{shown} {noun}{'' if most == 1 else 's'}"


def outlying(analysis: Analysis) -> str | None:
    """Name the configurations whose repeats vary more than those of the others."""
    configurations = analysis.configurations
    rows = configurations[configurations["throughput_outlying"].eq(True)]
    if rows.empty:
        return None
    ranks = study_ranks(analysis)
    labels = [telling_label(configurations, row, analysis.axes, ranks) for _, row in rows.iterrows()]
    return (
        f"In {len(rows)} of {len(configurations)} configurations repeats vary more than in the others, beyond the "
        f"{percent(OUTLYING_P)} point, so their intervals are based on their own repeats only: {named(labels)}."
    )
