"""Sentences about communication; each function returns None if there is nothing to report."""

from collections.abc import Hashable

import pandas as pd

from analysis.compare.causes import CAUSES
from analysis.compare.communication_cost import AUDIT_BUDGET, flagged_trials
from analysis.measure.communication import catches_up, most_late_s
from analysis.study import Analysis, study_ranks
from analysis.text import (
    cause_label,
    join,
    number,
    percent,
    telling_label,
    value_label,
)

_WORTH_A_WORD = 0.02
"""Share of a step, and part of a slowdown, below which it is not mentioned."""

_LEAST_BYTES = 2**20
"""Gradients of a step below which the latency of an all-reduce decides, which says nothing about bandwidth."""


def sentences(analysis: Analysis) -> list[str]:
    """Return sentences on the slowdown with more ranks, late ranks, exposed communication, and bandwidth reached."""
    candidates = (slowdown(analysis), late_ranks(analysis), exposed(analysis), utilisation(analysis))
    return [sentence for sentence in candidates if sentence]


def slowdown(analysis: Analysis) -> str | None:
    """Break down the largest slowdown under weak scaling, relative to the step; unresolved series do not count."""
    rows = analysis.communication.slowdown
    unresolved = analysis.scaling.loc[analysis.scaling["efficiency_more"] > 0, "configuration"]
    rows = rows[~rows["configuration"].isin(unresolved)]
    if rows.empty:
        return None
    step_s = rows["reference"].map(analysis.configurations["step_s"])
    row = rows.assign(share=rows["growth_s"] / step_s).sort_values("share").iloc[-1]
    if row["share"] <= _WORTH_A_WORD:
        return None
    ranks = study_ranks(analysis)
    parts = row[list(CAUSES)].dropna().astype(float)
    shown = parts[parts.abs() >= _WORTH_A_WORD * row["growth_s"]].sort_values(ascending=False)
    smaller_s = float(parts.sum() - shown.sum())
    smaller = [f"{_ms(smaller_s)} smaller causes"] if abs(smaller_s) >= 5e-5 else []
    losses = [f"{_ms(value)} {cause_label(str(name), value)}" for name, value in shown.items() if value > 0]
    gains = [f"{_ms(-value)} {cause_label(str(name), value)}" for name, value in shown.items() if value < 0]
    listed = join([*losses, *smaller]) + (f", less {join(gains)}" if gains else "")
    remainder = row["remainder_s"]
    rest = (
        f"{_ms(remainder)} remain unexplained"
        if remainder > -5e-5
        else f"{_ms(-remainder)} more than the slowdown itself"
    )
    label = _label(analysis, row["configuration"], without=("world_size", "nodes"))
    return (
        f"Largest relative slowdown{f' ({label})' if label else ''}: a step takes {_ms(row['growth_s'])} "
        f"({percent(row['share'])}) longer on "
        f"{value_label('world_size', int(row['world_size']), ranks)} than on "
        f"{value_label('world_size', int(row['reference_world_size']), ranks)}: {listed or 'no part is known'}; {rest}."
    )


def late_ranks(analysis: Analysis) -> str | None:
    """State which rank is late, see `latest_rank`, and in how many configurations a single rank is."""
    rows = analysis.communication.exposed
    latest, count, late = latest_rank(analysis), len(rows), int(rows["waited_for_rank"].notna().sum())
    if latest is None or count == 1:
        return latest
    part = f"all {count}" if late == count else f"{late} of the {count}"
    return f"{latest} A single rank is late in {part} configurations whose communication was measured."


def latest_rank(analysis: Analysis) -> str | None:
    """State which rank the others wait for, and how long, for the configuration with the longest wait."""
    rows = analysis.communication.exposed
    rows = rows[rows["waited_for_rank"].notna()]
    if rows.empty:
        return None
    latest_s = rows["lateness_s"].add(rows["hidden_lateness_s"], fill_value=0.0)
    row = rows.assign(latest_s=latest_s).sort_values("latest_s").iloc[-1]
    label = _label(analysis, row.name)
    others = "the other rank" if _world_size(analysis, row.name) == 2 else "the others"
    text = (
        f"Rank {int(row['waited_for_rank'])} usually arrives last{f' ({label})' if label else ''}: {others} "
        f"{'waits' if others == 'the other rank' else 'wait'} {_ms(row['lateness_s'])} per step for it after the last "
        "gradient"
    )
    if catches_up(row):
        text += f", and up to {_ms(most_late_s(row))} at earlier buckets, which can slow computation meanwhile"
    if pd.notna(row["late_by_load_s"]) and row["late_by_load_s"] >= 0.5 * row["lateness_s"]:
        text += f"; it waits {_ms(row['late_by_load_s'])} longer for its batch"
    return f"{text}."


def exposed(analysis: Analysis) -> str | None:
    """State the exposed communication time of the configuration with the largest share of it."""
    rows = analysis.communication.exposed.dropna(subset=["exposed_s"])
    if rows.empty:
        return None
    row = rows.assign(share=rows["exposed_s"] / rows["communication_step_s"]).sort_values("share").iloc[-1]
    label = _label(analysis, row.name)
    most = "at most " if len(rows) > 1 else ""
    text = (
        f"Exposed communication takes {most}{percent(row['share'])} of a step of the ranks that wait, "
        f"{_ms(row['exposed_s'])}{f' ({label})' if label else ''}"
    )
    if not row["communication_s"] > 0:  # shorter than a clock can tell, or unknown
        return f"{text}."
    hidden = percent(row["hidden_s"] / row["communication_s"])
    if row["traced"] == 1:
        return f"{text}; computation hides {hidden} of the communication."
    return f"{text}; the backward pass hides {hidden} of the all-reduce time."


def utilisation(analysis: Analysis) -> str | None:
    """State how close gradient buckets come to the measured all-reduce limit."""
    rows = analysis.communication.buckets.dropna(subset=["utilisation"])
    if rows.empty:
        return None
    total = rows.groupby("configuration")[["ceiling_s", "wire_s", "bytes"]].sum()
    total = total[total["bytes"] >= _LEAST_BYTES]
    if total.empty:
        return None
    reached = total["ceiling_s"] / total["wire_s"]
    low, high = percent(reached.min()), percent(reached.max())
    return (
        f"Gradient buckets transfer at {low if low == high else f'{low} to {high}'} of the measured all-reduce limit "
        f"of the same ranks{'; above 100 %, they reach it' if reached.max() > 1.005 else ''}."
    )


def audit(analysis: Analysis) -> str | None:
    """Warn about trials whose measurement overhead exceeds the budget."""
    flagged = flagged_trials(analysis.measured)
    if flagged.empty:
        return None
    worst = flagged[["instruments_ratio", "communication_ratio"]].max().max() - 1
    return (
        f"In {len(flagged)} of {len(analysis.measured)} trials the measurement overhead exceeds "
        f"{percent(AUDIT_BUDGET)} of a step (at most {percent(worst, 1)}, including noise). "
        "Their phases or communication breakdown are those of longer steps. They are listed below. "
        "Throughput is measured without instrumentation."
    )


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds, 1)}\u00a0ms"


def _label(analysis: Analysis, configuration: Hashable, without: tuple[str, ...] = ()) -> str:
    row = pd.Series(dict(analysis.configurations.iterrows())[configuration])
    fields = [name for name in analysis.axes if name not in (*without, "world_size")]
    fields += [] if "world_size" in without else ["world_size"]
    return telling_label(analysis.configurations, row, fields, study_ranks(analysis))


def _world_size(analysis: Analysis, configuration: Hashable) -> int:
    return int(analysis.configurations["world_size"].to_dict()[configuration])
