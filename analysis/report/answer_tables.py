"""The tables of the study's answer: at most `MOST_ROWS` rows each, without columns that say nothing.

The complete tables are in `analysis.tables`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from analysis.compare.best import Headline, without_emulated
from analysis.compare.bottleneck import LEAST_SHOWN, REGIONS, WORDS, change_for
from analysis.compare.causes import visible_causes
from analysis.compare.one_field import like_headline
from analysis.compare.scaling import STRONG, WEAK
from analysis.predict.forecast import FORECAST_FACTORS, forecast
from analysis.predict.inputs import ReportInputs
from analysis.study import Analysis, study_ranks, workload_label
from analysis.tables.communication import exposed_cost
from analysis.tables.phases import phases
from analysis.tables.predictions import series_label
from analysis.tables.scaling import throughput
from analysis.tables.table import RATIO_ESTIMATE, Column, Table, axis_columns
from analysis.text import (
    MISSING,
    cause_label,
    configuration_label,
    decimals_for,
    field_label,
    join,
    lost_decimals,
    telling_fields,
    text,
    value_label,
    with_short_arguments,
)

MOST_ROWS = 8

_MOST_SETTINGS = 2
"""Unusual settings in the label of a workload."""

LEAST_SHARE = 0.01
"""Share of a step below which a phase has no column."""

_CAUSE_REGIONS = {
    "transfer_s": "wire", "queueing_s": "wire", "wait_s": "wait", "host_s": "host", "load_s": "load",
}  # fmt: skip
_OTHER_CHANGES = {
    "slower_compute_s": "cores, memory or clocks that ranks share",
    "remainder_s": "more repeats, or a trace (--profile)",
}


def shortened(table: Table, rows: int = MOST_ROWS) -> Table:
    """Return the first rows of a table, without columns that are empty or equal in all of them; say how many follow.

    Of its note, the first sentence is kept.
    """
    note = f"{table.note.partition('. ')[0].rstrip('.')}." if table.note else ""
    if len(table.frame) > rows:
        note = f"The first {rows} of {len(table.frame)} rows."
    return replace(table, frame=table.frame.head(rows), note=note).telling()


def fastest(analysis: Analysis, rows: int = MOST_ROWS) -> Table:
    """Tabulate throughputs. Of many rows, the card's and their references come first, then those on the most ranks.

    Others follow at equal distances. All keep their order.
    """
    table = throughput(analysis)
    ranks, count = table.frame["world_size"], len(table.frame)
    if count <= rows:
        return shortened(table, rows)
    of_card = [headline.configuration for headline in analysis.headlines]
    of_card += [int(own.scaling["reference"]) for own in analysis.headlines if own.scaling is not None]
    chosen: set[int] = set()
    for candidates in (of_card, ranks.index[ranks == ranks.max()], ranks.index):
        left = [index for index in dict.fromkeys(candidates) if index not in chosen]
        room = min(rows - len(chosen), len(left))
        chosen |= {left[round(place * (len(left) - 1) / max(1, room - 1))] for place in range(room)}
    first = "the card's, those on the most ranks" if (ranks < ranks.max()).any() else "the card's"
    note = f"{rows} of {count} rows: {first}, and others evenly spread."
    return shortened(replace(table, frame=table.frame[table.frame.index.isin(chosen)], note=note), rows)


def largest_steps(ladder: Table, rows: pd.DataFrame) -> Table:
    """Return the steps of a ladder, without those that change least if they are many.

    The first and best ones stay, each other step only with the steps that it is compared with.
    """
    size = rows["step_ratio"].astype(float).map(lambda ratio: abs(math.log(ratio)))
    size = size.mask(rows["cumulative_ratio"] == rows["cumulative_ratio"].max(), math.inf)
    size.iloc[:1] = math.inf
    against = dict(zip(rows["step"], rows["against"], strict=True))
    names = set(rows.loc[size == math.inf, "step"])
    for step in rows.loc[size.sort_values(ascending=False, kind="stable").index, "step"]:
        chain = {step}
        while (step := against.get(step)) in against and step not in chain:
            chain.add(step)
        if len(names | chain) <= MOST_ROWS:
            names |= chain
    kept = rows[rows["step"].isin(names)]
    left_out = [f"“{name}”" for name in rows["step"] if name not in names]
    note = f"Without {join(left_out)}: shown are the steps that change most, and what they follow." if left_out else ""
    return replace(ladder, frame=kept.reset_index(drop=True), note=note).telling()


def phases_of_headline(analysis: Analysis) -> Table:
    """Tabulate the phases of the card's configuration and of those that differ from it in one field.

    Phases that take less than `LEAST_SHARE` of every step shown are left out, and what other windows measured.
    """
    table = phases(analysis)
    fields = [name for name in analysis.axes if name not in ("world_size", "nodes", "batch_per_gpu")]
    alike = like_headline(analysis.configurations, fields, analysis.headline)
    frame = table.frame.loc[alike].reset_index(drop=True)
    axes = (*analysis.axes, "world_size", "phases_step_s")
    columns = tuple(
        column
        for column in table.columns
        if column.name in axes or (column.share and (frame[column.share].astype(float) >= LEAST_SHARE).any())
    )
    count = len(table.frame)
    table = shortened(replace(table, frame=frame, columns=columns))
    if len(table.frame) == count:
        return table
    note = f"{len(table.frame)} of {count} configurations: those most like the card's."
    return replace(table, note=note)


def scales(analysis: Analysis) -> Table:
    """Tabulate the work on the most ranks of each series; of many series, those that scale best and worst."""
    ranks = study_ranks(analysis)
    rows = analysis.scaling[analysis.scaling["ideal"] > 1].copy()
    rows = rows[rows["world_size"] == rows.groupby("series")["world_size"].transform("max")]
    configured = analysis.configurations.drop(columns=["n", "world_size"])
    frame = without_emulated(rows.join(configured, on="configuration")).reset_index(drop=True)
    frame["scaling_kind"] = frame["scaling"].map({WEAK: "weak", STRONG: "strong"})
    for end in ("", "_low", "_high", "_more"):
        scale = 1.0 if end == "_more" else 100.0
        frame[f"percent{end}"] = scale * frame[f"efficiency{end}"].astype(float)
        frame[f"work{end}"] = frame[f"efficiency{end}"].astype(float) * (
            1.0 if end == "_more" else frame["world_size"].astype(float)
        )
    frame = frame.assign(is_wide=frame["efficiency_more"] > 0).sort_values(
        ["is_wide", "scaling", "efficiency"], ascending=[True, False, False], kind="stable", ignore_index=True
    )
    note, count = "", len(frame)
    if count > MOST_ROWS:
        frame = frame.loc[_own_and_extremes(frame, analysis.headline)].reset_index(drop=True)
        note = f"The card's configuration, then of {count} series those that scale best and worst."
    axes = axis_columns(analysis)
    return Table(
        f"Work on the largest number of {ranks[1]}",
        (
            Column("scaling_kind", "scaling", "what is held constant as ranks are added."),
            *axes,
            Column("work", f"work (in {ranks[1]})", f"{ranks[1]} x efficiency {RATIO_ESTIMATE}.", 1, 2, True),
            Column("percent", "efficiency (%)", "speed-up / ideal speed-up, over the smallest size.", 1, 1, True),
            Column("throughput_samples_per_s", "samples/s", "of all ranks together."),
        ),
        frame,
        note,
    ).telling()


def _own_and_extremes(rows: pd.DataFrame, own: int | None) -> list[int]:
    """Return the index of a configuration's first row, then of the best and worst rows of each kind of scaling."""
    first = list(rows.index[rows["configuration"] == own])[:1]
    others = rows.drop(index=first)
    known = others[~others["is_wide"]]
    others = (known if len(known) >= MOST_ROWS else others).sort_values("efficiency", ascending=False, kind="stable")
    kinds = [part.index for _, part in others.groupby("scaling", sort=False)]
    chosen = list(dict.fromkeys([*(index[0] for index in kinds), *(index[-1] for index in kinds)]))
    left = [index for index in others.index if index not in chosen]
    for position in range(MOST_ROWS - 1 - len(chosen)):
        chosen.append(left.pop(0 if position % 2 == 0 else -1))
    return [*first, *sorted(chosen, key=list(others.index).index)]


def network_cost(analysis: Analysis) -> Table:
    """Tabulate the step and its exposed communication, without the other methods of `tables.communication`."""
    table = exposed_cost(analysis)
    names = {"step_s": "step (ms)", "exposed_s": "exposed communication (ms)"}
    kept = (*(column.name for column in axis_columns(analysis)), *names)
    columns = tuple(
        replace(column, header=names.get(column.name, column.header)) for column in table.columns if column.name in kept
    )
    return shortened(replace(table, title="Step and exposed communication", columns=columns, note=""))


def workloads(analysis: Analysis) -> Table:
    """Tabulate how fast each configuration is, or of many, the one that stands for each workload."""
    configurations, ranks = analysis.configurations, study_ranks(analysis)
    many = len(configurations) > MOST_ROWS
    if many:
        labels = {each.configuration: _with_settings(analysis, each) for each in analysis.headlines}
    else:
        labels = {int(str(index)): _full_label(analysis, row) for index, row in configurations.iterrows()}
    rows = configurations.loc[list(labels)]
    bounds = analysis.regions["bound"].loc[list(labels)]
    frame = rows.assign(
        label=list(labels.values()), bound=[WORDS[name].label if isinstance(name, str) else "" for name in bounds]
    ).sort_values("throughput_samples_per_s", ascending=False, ignore_index=True)
    return shortened(
        Table(
            f"Throughput of each {'workload' if many else 'configuration'}",
            (
                Column("label", "configuration", is_main=True),
                Column("world_size", field_label("world_size", ranks), decimals=0),
                Column("throughput_samples_per_s", "samples/s", "of all ranks together.", interval=True, is_main=True),
                Column("step_s", "step (ms)", "of the slowest rank.", 1e3),
                Column("bound", "bound by", "what limits the step."),
            ),
            frame,
        )
    )


def _with_settings(analysis: Analysis, headline: Headline) -> str:
    """Return the label of a workload, with the settings of its fastest configuration that are not the usual ones."""
    configurations = analysis.configurations
    row = configurations.loc[[headline.configuration]].iloc[0]
    usual = {name: configurations[name].map(text).mode().iloc[0] for name in analysis.axes}
    without = {"world_size", "nodes", "batch_per_gpu", *headline.shown}
    unusual = [name for name in analysis.axes if name not in without and text(row[name]) not in (usual[name], MISSING)]
    settings = configuration_label(row, unusual[:_MOST_SETTINGS], study_ranks(analysis))
    return ", ".join(part for part in (workload_label(analysis, headline), settings) if part)


def _full_label(analysis: Analysis, row: pd.Series) -> str:
    configurations = analysis.configurations
    names = [name for name in analysis.axes if name != "world_size"]
    shown = analysis.fields.with_effect(telling_fields(configurations, row, names), row.to_dict())
    row = with_short_arguments(configurations, row)
    return configuration_label(row, shown, study_ranks(analysis)) or "all defaults"


def holds_back(analysis: Analysis) -> Table:
    """Tabulate the ranks that the headline configuration loses by cause, or the parts of its step."""
    if visible_causes(analysis.lost_ranks):
        return _lost(analysis)
    ranks = study_ranks(analysis)
    several = analysis.headline is not None and analysis.headline_row["world_size"] > 1
    longest = " The wait for a batch is that of the rank that waits longest." if several else ""
    columns = (
        Column("part", "part of the step"),
        Column("share_percent", "share (%)", f"of the step.{longest}", decimals=1),
        Column("how", "what reduces it"),
    )
    shares = {} if analysis.headline is None else analysis.headline_regions.to_dict()
    # a host that bounds the step makes it wait, though not known how long
    with_host = "compute" if shares.get("bound") == "host" and not float(shares["host"]) >= LEAST_SHOWN else ""
    rows = [
        {
            "part": f"{WORDS[name].takes}{', and waiting for the host' if name == with_host else ''}",
            "share_percent": 100 * float(shares[name]),
            "how": change_for("host" if name == with_host else name, analysis.headline_row),
        }
        for name in REGIONS
        if pd.notna(shares.get(name)) and float(shares[name]) >= LEAST_SHOWN
    ]
    frame = pd.DataFrame(rows, columns=["part", "share_percent", "how"])
    frame["share_percent"] = frame["share_percent"].astype(float)
    frame["trial_ids"] = [_trial_ids(analysis, analysis.headline)] * len(frame)
    size = (
        "" if analysis.headline is None else value_label("world_size", int(analysis.headline_row["world_size"]), ranks)
    )
    frame = frame.sort_values("share_percent", ascending=False, ignore_index=True)
    return Table(f"Parts of a step on {size}{_of_workload(analysis)}", columns, frame)


def _of_workload(analysis: Analysis) -> str:
    """Return the headline's workload as the end of a title; empty if the study has one workload."""
    label = workload_label(analysis, analysis.headlines[0]) if analysis.headlines else ""
    return f" ({label})" if label else ""


def _what_reduces(cause: str, row: pd.Series) -> str:
    return change_for(_CAUSE_REGIONS[cause], row) if cause in _CAUSE_REGIONS else _OTHER_CHANGES[cause]


def _lost(analysis: Analysis) -> Table:
    ranks = study_ranks(analysis)
    to_seconds = float(analysis.headline_row["step_s"] / analysis.headline_row["world_size"])
    causes, total = visible_causes(analysis.lost_ranks), sum(analysis.lost_ranks.values())
    exact = {name: analysis.lost_ranks[name] for name in causes if name != "remainder_s"}
    exact["remainder_s"] = total - sum(exact.values())
    rows = [
        {
            "cause": cause_label(name, value),
            "lost": value,
            "longer_s": exact[name] * to_seconds,
            "how": _what_reduces(name, analysis.headline_row) if value > 0 else None,
        }
        for name, value in causes.items()
        if value
    ]
    decimals = lost_decimals(total)
    rows.append({"cause": "total", "lost": round(total, decimals), "longer_s": total * to_seconds, "how": None})
    frame = pd.DataFrame(rows)
    frame["trial_ids"] = [_trial_ids(analysis, analysis.headline)] * len(frame)
    size = value_label("world_size", int(analysis.headline_row["world_size"]), ranks)
    ms_decimals = min(3, decimals_for(1e3 * frame["longer_s"].tail(1)))  # those of the total, to add up
    return Table(
        f"{ranks[1]} lost on {size}{_of_workload(analysis)}",
        (
            Column("cause", "cause", "see the communication breakdown; causes add up to the total."),
            Column("lost", f"{ranks[1]} lost", f"{ranks[1]} x growth / step time.", decimals=decimals),
            Column("longer_s", "step longer by (ms)", "than on the fewest; step time x share lost.", 1e3, ms_decimals),
            Column("how", "what reduces it"),
        ),
        frame,
    )


def changes(analysis: Analysis) -> Table:
    """Tabulate what changes gain, measured or at most."""
    count = len(analysis.gains)
    frame = analysis.gains.head(MOST_ROWS).copy()
    frame["percent"] = 100 * (frame["gain"] - 1)
    frame["percent_low"], frame["percent_high"] = (100 * (frame[f"gain_{end}"] - 1) for end in ("low", "high"))
    frame["evidence"] = [
        "measured" if row["is_measured"] else f"upper bound{' of what is exposed' if row['is_partial'] else ''}"
        for _, row in frame.iterrows()
    ]
    names = [name for name in ("world_size", "batch_per_gpu", "model") if name in analysis.axes]
    frame["where"] = [_where(analysis, names, index) for index in frame["configuration"]]
    frame["trial_ids"] = [_trial_ids(analysis, index) for index in frame["configuration"]]
    return Table(
        f"{'Gain' if frame['is_measured'].any() else 'Largest possible gain'} by one change{_of_workload(analysis)}",
        (
            Column("change", "change"),
            Column("how", "how"),
            Column("percent", "gain (%)", "in throughput, with all else equal [95 % interval].", 1, 1, True),
            Column("evidence", "evidence", "measured in this study, or the most that the change could gain."),
            Column("where", "measured on", "the configuration that the row is about."),
        ),
        frame,
        f"The first {MOST_ROWS} of {count} rows." if count > MOST_ROWS else "",
    ).telling()


def _where(analysis: Analysis, names: Sequence[str], configuration: int) -> str:
    """Name a configuration by those of these fields that its workload reads."""
    row = analysis.configurations.loc[[configuration]].iloc[0]
    return configuration_label(row, analysis.fields.with_effect(names, row.to_dict()), study_ranks(analysis))


def outlook(analysis: ReportInputs) -> Table:
    """Tabulate what twice and four times the ranks would do; the headline's series first."""
    ranks = study_ranks(analysis)
    models = analysis.models
    columns = (
        # with others not predicted, readers must see which these are
        Column("label", "configuration", is_main=len(models) > 1),
        Column("world_size", field_label("world_size", ranks), decimals=0),
        Column(
            "work",
            f"work (in {ranks[1]})",
            "predicted, not measured [95 % interval, or why there is none].",
            1,
            1,
            True,
            "caveat",
        ),  # fmt: skip
        Column("efficiency", "efficiency (%)", "predicted, not measured.", 100, 1),
        Column("throughput_samples_per_s", "samples/s", "predicted, not measured."),
        Column("held_out_error", "held-out error (%)", "of the largest measured size, predicted without it.", 100, 1),
    )
    if not models:
        return Table("Predicted, not measured", columns, pd.DataFrame(columns=[column.name for column in columns]))
    largest = max(model.series.sizes[-1] for model in models)
    rows = forecast(analysis, [largest * factor for factor in FORECAST_FACTORS]).rows
    rows = rows[rows["step_s"].notna()].reset_index(drop=True)
    by_number = {model.number: model for model in models}
    rows = without_emulated(rows)
    is_first = [analysis.headline in set(by_number[number].series.points["configuration"]) for number in rows["series"]]
    frame = rows.assign(is_other=[not first for first in is_first])
    frame = frame.sort_values("is_other", kind="stable", ignore_index=True)
    frame["label"] = [series_label(analysis, models, by_number[number]) for number in frame["series"]]
    for end in ("", "_low", "_high"):
        frame[f"work{end}"] = frame[f"efficiency{end}"].astype(float) * frame["world_size"].astype(float)
    frame["trial_ids"] = [
        tuple(
            trial_id
            for index in by_number[number].series.points["configuration"]
            for trial_id in analysis.configurations["trial_ids"].to_dict()[index]
        )
        for number in frame["series"]
    ]
    return shortened(Table("Predicted, not measured", columns, frame))


def _trial_ids(analysis: Analysis, configuration: int | None) -> tuple[str, ...]:
    return () if configuration is None else tuple(analysis.configurations["trial_ids"].to_dict()[configuration])
