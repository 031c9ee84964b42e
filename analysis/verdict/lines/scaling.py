"""Lines of the card on scaling: the work of many ranks, what is lost by cause, and more ranks than measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.compare.best import MAX_LISTED_WORKLOADS
from analysis.compare.causes import LEAST_LOST, lost_ranks, visible_causes
from analysis.compare.scaling import STRONG
from analysis.predict.forecast import FORECAST_FACTORS, NO_SCALING, forecast, ranks_per_node, reason_against
from analysis.predict.inputs import ReportInputs
from analysis.predict.series import ScalingSeries, series_of
from analysis.study import Analysis, how_to_measure_scaling, study_ranks
from analysis.text import join, lost_decimals, number, percent, value_label
from analysis.verdict.lines.subject import Subject, label_before
from analysis.verdict.lines.value import CardLine, Quantity, share_text

MOST_CAUSES = 4
"""Maximum causes of lost ranks that are listed; the others are added up."""

_LEAST_OPEN = 0.05
"""Ranks that an interval allows to be lost, from which on "nothing" is not the full answer."""

_CAUSE_WORDS = {
    "transfer_s": ("exposed transfer", "less exposed transfer"),
    "queueing_s": ("queueing for transfer", "less queueing"),
    "wait_s": ("slowest rank", "less waiting for it"),
    "host_s": ("host", "less host time"),
    "load_s": ("loading", "less loading"),
    "slower_compute_s": ("slower compute", "faster compute"),
    "remainder_s": ("unexplained", "unexplained"),
    "other": ("smaller causes", "smaller causes"),
}
"""A cause as a loss, and as a gain."""


def scales(analysis: Analysis, chosen: Sequence[Subject]) -> CardLine | None:
    """State of how many ranks the ranks of each subject do the work; None if nothing ran on several numbers of ranks.

    The unit of work is that of one rank in the smallest configuration of the series.
    """
    ranks = study_ranks(analysis)
    works = [_Work.of(subject, subject.scaling, ranks) for subject in chosen if subject.scaling is not None]
    if not works:
        return None
    quantities = tuple(quantity for work in works for quantity in work.quantities)
    resolved = [work for work in works if work.equivalent.value is not None]
    if not resolved:
        needed = max((work.equivalent for work in works), key=lambda quantity: quantity.further_repeats or 0)
        return CardLine("scales", "scales", f"the scaling to {works[0].sizes} is {needed.unresolved}", quantities)
    open_works = [work for work in works if work.equivalent.value is None]
    notes = []
    if open_works:
        names = [work.equivalent.part for work in open_works]
        notes = [f"{join(names) if len(names) <= MAX_LISTED_WORKLOADS else len(names)} not resolved"]
    if len(resolved) > MAX_LISTED_WORKLOADS:
        listed = [f"from {resolved[0].text}", f"to {resolved[-1].text}"]
        return CardLine(
            "scales", "scales", f"{resolved[0].sizes} do the work {'; '.join([*listed, *notes])}", quantities
        )
    text = f"{resolved[0].sizes} do the work of {join([work.text for work in resolved])}{resolved[0].reference}"
    if len(works) == 1:
        note, more = _strong(chosen[0], ranks)
        return CardLine("scales", "scales", text + note, (*quantities, *more))
    return CardLine("scales", "scales", "; ".join([text, *notes]), quantities)


@dataclass(frozen=True)
class _Work:
    """The work of a subject's ranks as a number of ranks at full efficiency, as numbers and as text."""

    equivalent: Quantity
    efficiency: Quantity
    quantities: tuple[Quantity, ...]
    sizes: str
    text: str
    reference: str

    @classmethod
    def of(cls, subject: Subject, row: pd.Series, ranks: tuple[str, str]) -> "_Work":
        ends = [float(row[f"efficiency{end}"]) for end in ("", "_low", "_high", "_more")]
        efficiency = Quantity.of("efficiency", "1", *ends, part=subject.label)
        equivalent = _equivalent(row, "equivalent_ranks", ranks[0], subject.label)
        size, smallest = int(row["world_size"]), int(row["reference_world_size"])
        text = number(equivalent.value, 2 if size < 64 else 1)
        text += f" ({', '.join(filter(None, [share_text(efficiency), subject.label]))})"
        reference = "" if smallest == 1 else f", in units of the rate per {ranks[0]} on {smallest}"
        quantities = (efficiency, equivalent, Quantity("ranks", float(size), ranks[0], part=subject.label))
        return cls(equivalent, efficiency, quantities, value_label("world_size", size, ranks), text, reference)


def _equivalent(row: pd.Series, name: str, unit: str, part: str = "") -> Quantity:
    value, low, high = (float(row["world_size"] * row[f"efficiency{end}"]) for end in ("", "_low", "_high"))
    return Quantity.of(name, unit, value, low, high, float(row["efficiency_more"]), part=part)


def _strong(subject: Subject, ranks: tuple[str, str]) -> tuple[str, tuple[Quantity, ...]]:
    """Return what the ranks do if they share one global batch."""
    assert subject.scaling is not None, "only subjects with a comparison"
    if subject.scaling["scaling"] == STRONG:
        return f", sharing a batch of {number(subject.row['global_batch'], 0)}", ()
    if subject.strong is None:
        return "", ()
    work = _equivalent(subject.strong, "equivalent_ranks_at_constant_global_batch", ranks[0])
    batch = number(subject.strong_batch, 0)
    return f"; {work.text(1)} if they share a batch of {batch}", (work,)


def lost(analysis: Analysis, subject: Subject) -> CardLine | None:
    """Break down the lost work into causes, in ranks; None if no fewer ranks were measured."""
    row = subject.scaling
    if row is None:
        return None
    one, several = study_ranks(analysis)
    if row["efficiency_more"] > 0:
        return None
    total = float(row["world_size"] * (1 - row["efficiency"]))
    total_low, total_high = (float(row["world_size"] * (1 - row[f"efficiency_{end}"])) for end in ("high", "low"))
    quantity = Quantity.of("lost_ranks", one, total, total_low, total_high)
    parts = lost_ranks(row, analysis.communication.exposed, analysis.configurations)
    quantities = (
        quantity,
        *(Quantity("lost_ranks_by_cause", value, one, part=_key(name)) for name, value in parts.items()),
    )
    decimals = lost_decimals(total) if parts else 2  # parts need more than the efficiency they explain
    shown = f"{number(total, decimals)} {one if abs(total) <= 1 else several}"
    if round(total, 2) <= 0:
        nothing = "nothing" if total < 0 else f"nothing measurable (less than 0.01 {one})"
        if total_high >= _LEAST_OPEN:
            high = number(total_high, 2)
            nothing += f"; the interval allows {high} {one if total_high <= 1 else several}"
        return CardLine("lost", "lost", label_before(subject) + nothing, quantities)
    shown += f" of {subject.label}" if subject.label else ""
    if not parts:
        text = f"{shown}; causes not measured{_why_no_causes(subject)}"
        return CardLine("lost", "lost", text, quantities)
    note = ", not significantly different from 0" if total_low <= 0 else ""
    causes = _sum(_named_parts(parts, decimals), decimals, analysis, subject)
    return CardLine("lost", "lost", f"{shown}{note}: {causes}", quantities)


def fewer_and_faster(analysis: Analysis, configuration: int) -> pd.Series | None:
    """Return the fastest configuration on fewer ranks of the same series that is significantly faster, if any."""
    scaling, configurations = analysis.scaling, analysis.configurations
    own = scaling[scaling["configuration"] == configuration]
    if own.empty:
        return None
    row = configurations.loc[[configuration]].iloc[0]
    members = scaling.loc[scaling["series"] == own["series"].iloc[0], "configuration"].astype(int).unique()
    fewer = configurations.loc[members].dropna(subset="throughput_samples_per_s_high")
    fewer = fewer[fewer["world_size"] < row["world_size"]]
    fewer = fewer[fewer["throughput_samples_per_s_low"] > row["throughput_samples_per_s_high"]]
    if fewer.empty:
        return None
    return fewer.sort_values("throughput_samples_per_s").iloc[-1]


def _why_no_causes(subject: Subject) -> str:
    if strategy := without_breakdown(subject.row):
        return f" ({strategy} has no communication breakdown)"
    return " (rerun with --set communication_steps=10)" if subject.row.get("communication_steps") == 0 else ""


def without_breakdown(row: pd.Series) -> str:
    """Return the strategy of a configuration if its causes of lost work cannot be measured, else an empty string."""
    strategy = row.get("parallel")
    has_buckets = isinstance(strategy, str) and strategy.startswith("ddp") and strategy != "ddp_delayed"
    return strategy if isinstance(strategy, str) and not has_buckets else ""


def _key(name: str) -> str:
    return {"remainder_s": "unexplained"}.get(name, name.removesuffix("_s"))


def _named_parts(parts: Mapping[str, float], decimals: int) -> dict[str, float]:
    """Return the largest of `visible_causes`, then the others as one part, and the remainder."""
    causes = visible_causes(parts)
    remainder = causes.pop("remainder_s")
    largest = sorted(causes, key=lambda name: -abs(causes[name]))[: MOST_CAUSES - 1]
    named = {name: causes[name] for name in largest if abs(causes[name]) >= LEAST_LOST}
    other = round(sum(value for name, value in causes.items() if name not in named), decimals)
    return {name: value for name, value in {**named, "other": other, "remainder_s": remainder}.items() if value}


def _sum(parts: Mapping[str, float], decimals: int, analysis: Analysis, subject: Subject) -> str:
    """Return parts as a sum, gains last and with a minus."""
    text = ""
    for name, value in sorted(parts.items(), key=lambda item: item[1] < 0):
        sign = (" − " if value < 0 else " + ") if text else ("−" if value < 0 else "")
        text += f"{sign}{number(abs(value), decimals)} {_CAUSE_WORDS[name][value < 0]}"
        if name == "wait_s" and value > 0:
            text += _late_rank(analysis, subject)
    return text


def _late_rank(analysis: Analysis, subject: Subject) -> str:
    exposed = analysis.communication.exposed
    rank = exposed["waited_for_rank"].get(subject.configuration) if len(exposed) else None
    return "" if pd.isna(rank) else f" (rank {int(rank)})"


def more_ranks(analysis: ReportInputs, subject: Subject) -> CardLine:
    """Predict the work of more ranks than measured, or say why that is impossible.

    Of the numbers of ranks that the report predicts, the largest one with an interval. If they need more nodes and no
    network between nodes was measured: the smallest one, as if within one node, without an interval.
    """
    one, several = study_ranks(analysis)
    label = "more GPUs" if one == "GPU" else "more ranks"
    row = subject.scaling

    def line(text: str, *quantities: Quantity) -> CardLine:
        return CardLine("more_gpus", label, label_before(subject) + text, quantities)

    if row is None:
        size = int(subject.row["world_size"])
        only = value_label("world_size", size, study_ranks(analysis))
        return line(f"unknown: only {only} measured; {how_to_measure_scaling(analysis, size)}")
    series = next(
        (series for series in series_of(analysis) if _is_of(series, subject)),
        None,
    )
    if series is None:
        return line(f"not predicted: {without_series(analysis, row)}")
    if (reason := reason_against(analysis, series)) == NO_SCALING:
        return line("not predicted: the measured scaling is not resolved; add repeats")
    if reason:
        return line(f"not predicted: {reason} on 1 or 2 {several}")
    sizes = [factor * series.sizes[-1] for factor in FORECAST_FACTORS]
    numbers = {model.number for model in analysis.models if _is_of(model.series, subject)}
    rows = forecast(analysis, sizes).rows
    rows = rows[rows["series"].isin(numbers)].sort_values("world_size", ascending=False)
    nodes = series.nodes_of(sizes[0], ranks_per_node(analysis))
    if nodes > 1 and not series.knows_network:
        within_one = rows[(rows["world_size"] == sizes[0]) & rows["efficiency"].notna()]
        if within_one.empty:
            return line(f"not predicted: {sizes[0]} need {nodes} nodes, whose network is not measured")
        value = float(sizes[0] * within_one["efficiency"].iloc[0])
        return line(
            f"{sizes[0]} would do the work of {value:.{_decimals(value)}f} if all were linked as in one node "
            "(predicted without interval: no network between nodes was measured)",
            Quantity("predicted_equivalent_ranks_like_one_node", value, one),
            Quantity("predicted_ranks", float(sizes[0]), one),
        )
    usable = rows[rows["caveat"].isna()]
    if usable.empty:
        return line("not resolved: the interval of a prediction exceeds a factor of 2; add repeats or sizes")
    best = usable.iloc[0]
    size = int(best["world_size"])
    value, low, high = (float(size * best[f"efficiency{end}"]) for end in ("", "_low", "_high"))
    work = Quantity.of("predicted_equivalent_ranks", one, value, low, high)
    error = abs(float(best["held_out_error"]))
    text = f"{size} would do the work of {work.text(_decimals(value))}, predicted; "
    quantities = [work, Quantity("predicted_ranks", float(size), one)]
    if math.isfinite(error):
        quantities.append(Quantity("held_out_error", error, "1"))
        return line(f"{text}held-out error {percent(error, 1)}", *quantities)
    return line(f"{text}not checked (needs a third size)", *quantities)


def without_series(analysis: Analysis, row: pd.Series) -> str:
    """Return why the sizes of a row of `scaling` are no series that a law could predict from."""
    members = analysis.scaling.loc[analysis.scaling["series"] == row["series"], "configuration"]
    steps = analysis.configurations.loc[members].get("accumulation_steps")
    if steps is not None and steps.nunique() > 1:
        return "no law covers steps that accumulate different numbers of batches"
    return "no law fits the measured sizes"


def _is_of(series: ScalingSeries, subject: Subject) -> bool:
    """Return True if this is the series that the subject is compared in."""
    is_alike = subject.scaling is not None and series.scaling == subject.scaling["scaling"]
    return is_alike and subject.configuration in set(series.points["configuration"])


def _decimals(value: float) -> int:
    """Return the decimals that give a number of ranks three significant digits at most."""
    return 0 if value >= 32 else 1 if value >= 3 else 2
