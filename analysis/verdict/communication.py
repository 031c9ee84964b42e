"""What the study says about communication, in words. Each sentence is None where there is nothing to say."""

from collections.abc import Hashable

from analysis.compare.communication import SLOWDOWN_PARTS, breakdown_step_s
from analysis.compare.communication_cost import AUDIT_BUDGET, flagged_trials
from analysis.study import Analysis, study_ranks
from analysis.text import SLOWDOWN_LABELS, configuration_label, join, number, percent, value_label

_WORTH_A_WORD = 0.02
"""Share of a step below which nothing is said of it, and of a slowdown below which a part goes unnamed."""


def sentences(analysis: Analysis) -> list[str]:
    """Why steps take longer on more ranks, who waits for whom, what is exposed, and how near the ceiling is."""
    found = (slowdown(analysis), late_ranks(analysis), exposed(analysis), utilisation(analysis))
    return [sentence for sentence in found if sentence]


def slowdown(analysis: Analysis) -> str | None:
    """What the largest slowdown of weak scaling is made of."""
    rows = analysis.communication.slowdown
    if rows.empty:
        return None
    step_s = rows["reference"].map(analysis.configurations["step_s"])
    row = rows.assign(share=rows["slower_s"] / step_s).sort_values("share").iloc[-1]
    if row["share"] <= _WORTH_A_WORD:
        return None
    ranks = study_ranks(analysis)
    parts = row[list(SLOWDOWN_PARTS[:-1])].dropna().astype(float)
    parts = parts[parts.abs() >= _WORTH_A_WORD * row["slower_s"]].sort_values(ascending=False)
    listed = join([f"{_ms(value)} {SLOWDOWN_LABELS[str(name)]}" for name, value in parts.items()])
    remainder = row["remainder_s"]
    rest = (
        f"{_ms(remainder)} remain unexplained"
        if remainder >= 0
        else f"the parts were measured {_ms(-remainder)} longer than that"
    )
    where = _label(analysis, row["configuration"], without=("world_size", "nodes"))
    return (
        f"The largest slowdown{f' ({where})' if where else ''}: a step takes {_ms(row['slower_s'])} longer on "
        f"{value_label('world_size', int(row['world_size']), ranks)} than on "
        f"{value_label('world_size', int(row['reference_world_size']), ranks)}, of which {listed or 'no part is known'}; {rest}."
    )  # fmt: skip


def late_ranks(analysis: Analysis) -> str | None:
    """The rank that the others wait for, and how long, where that is longest."""
    rows = analysis.communication.exposed
    rows = rows[rows["waited_for_rank"].notna()]
    if rows.empty:
        return None
    row = rows.sort_values("caused_wait_s").iloc[-1]
    where = _label(analysis, row.name)
    text = (
        f"Rank {int(row['waited_for_rank'])} arrived last{f' ({where})' if where else ''}: "
        f"the {'other' if _world_size(analysis, row.name) == 2 else 'others'} waited for it {_ms(row['lateness_s'])} at one bucket, "
        f"and {_ms(row['caused_wait_s'])} a step after the last gradient"
    )
    if row["late_by_load_s"] >= 0.5 * row["caused_wait_s"]:
        text += f"; it waits {_ms(row['late_by_load_s'])} longer for its batch"
    measured = len(analysis.communication.exposed)
    return f"{text}." if measured == 1 else f"{text}. One rank is late in {len(rows)} of {measured} configurations."


def exposed(analysis: Analysis) -> str | None:
    """How much of the all-reduces the backward pass hides, where most is exposed."""
    rows = analysis.communication.exposed.dropna(subset=["exposed_s"])
    if rows.empty:
        return None
    step_s = breakdown_step_s(rows, analysis.configurations["step_s"].reindex(rows.index))
    row = rows.assign(share=rows["exposed_s"] / step_s).sort_values("share").iloc[-1]
    where = _label(analysis, row.name)
    most = " at most" if len(rows) > 1 else ""
    return (
        f"In the mean of the ranks, all-reduces that the backward pass does not hide take {percent(row['share'])} of a step{most}, "
        f"{_ms(row['exposed_s'])}{f' ({where})' if where else ''}; {percent(row['hidden_s'] / row['communication_s'])} "
        "of their time is hidden there."
    )


def utilisation(analysis: Analysis) -> str | None:
    """How near the gradient buckets come to what the same ranks reach with nothing else to do."""
    rows = analysis.communication.buckets.dropna(subset=["utilisation"])
    if rows.empty:
        return None
    total = rows.groupby("configuration")[["ceiling_s", "wire_s"]].sum()
    reached = total["ceiling_s"] / total["wire_s"]
    low, high = percent(reached.min()), percent(reached.max())
    span = low if low == high else f"{low} to {high}"
    return f"While they transfer, gradient buckets run at {span} of the speed that the same ranks reach alone."


def audit(analysis: Analysis) -> str | None:
    """How many trials' instruments cost more than the budget."""
    flagged = flagged_trials(analysis.measured)
    if flagged.empty:
        return None
    worst = flagged[["instruments_ratio", "communication_ratio"]].max().max() - 1
    budget = percent(AUDIT_BUDGET)
    return (
        f"In {len(flagged)} of {len(analysis.measured)} trials the instruments cost more than {budget} of a step (at most "
        f"{percent(worst, 1)}, the machine's noise included): their phases or their account are not quite those of the plain "
        "step. They are listed below. Throughput is measured without instruments."
    )


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds, 1)}\u00a0ms"


def _label(analysis: Analysis, configuration: Hashable, without: tuple[str, ...] = ()) -> str:
    row = dict(analysis.configurations.iterrows())[configuration]
    fields = [name for name in analysis.axes if name not in (*without, "world_size")]
    fields += [] if "world_size" in without else ["world_size"]
    return configuration_label(row, fields, study_ranks(analysis))


def _world_size(analysis: Analysis, configuration: Hashable) -> int:
    return int(analysis.configurations["world_size"].to_dict()[configuration])
