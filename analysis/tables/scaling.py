"""Tables of throughput, efficiency and speed-up."""

import pandas as pd

from analysis.compare.scaling import PLAIN, STRONG, WEAK
from analysis.measure.configurations import units_per_s
from analysis.study import Analysis, study_ranks
from analysis.tables.table import ESTIMATE, N_COLUMN, RATIO_ESTIMATE, Column, Table, axis_columns, blocks
from analysis.text import GIB, decimals_for, field_label, value_label

_THROUGHPUT = ("throughput_samples_per_s", "throughput_samples_per_s_more")


def throughput(analysis: Analysis) -> Table:
    """Tabulate throughput and step time of every configuration."""
    configurations = analysis.configurations
    units = units_per_s(configurations, analysis.measured, analysis.fields)
    labels = analysis.scaling.groupby("configuration")["scaling"].agg(" + ".join)
    frame = configurations.assign(
        series=labels.reindex(configurations.index).astype(object),
        **{f"{unit}_per_s": values for unit, values in units.items()},
    )
    axes = axis_columns(analysis)
    return Table(
        "Throughput and step time",
        (
            *axes,
            Column("global_batch", "global batch", "samples per step on all ranks.", decimals=0),
            Column(
                "throughput_samples_per_s",
                "throughput (samples/s)",
                f"samples of all ranks / wall time of the slowest, in a window without instrumentation; {ESTIMATE}.",
                interval=True,
            ),
            Column(
                "characters_per_s",
                "characters/s",
                "samples/s × bytes per sample, for models that read text as bytes.",
                decimals=0,
            ),
            Column(
                "tokens_per_s",
                "tokens/s",
                "samples/s × tokens per sample, as the model or the user's code states, or its batches show.",
                decimals=0,
            ),
            Column(
                "step_s", "step time (ms)", "wall time of the slowest rank / steps, same window.", 1e3, interval=True
            ),
            Column(
                "peak_memory_bytes",
                "peak memory (GiB)",
                "largest of all ranks; 1 GiB = 2³⁰ bytes.",
                1 / GIB,
                2,
            ),
            N_COLUMN,
            Column(
                "series",
                "scaling",
                "weak: constant batch per rank as ranks are added; strong: constant global batch; neither: no matching "
                "configuration ran on another number of ranks.",
            ),
        ),
        frame,
        blocks=blocks(axes),
        empty="No trial is done yet.",
    )


def weak_scaling(analysis: Analysis) -> Table:
    """Tabulate speed-up and efficiency at a constant batch per rank."""
    one = study_ranks(analysis)[0]
    return _scaling_table(
        analysis,
        WEAK,
        f"Weak scaling: constant batch per {one}",
        axis_columns(analysis),
        f"No two configurations differ only in the number of {study_ranks(analysis)[1]}.",
    )


def strong_scaling(analysis: Analysis) -> Table:
    """Tabulate speed-up and efficiency at a constant global batch."""
    columns = axis_columns(analysis, last=("world_size", "batch_per_gpu"))
    return _scaling_table(
        analysis,
        STRONG,
        "Strong scaling: constant global batch",
        [Column("global_batch", "global batch", "samples per step on all ranks.", decimals=0), *columns],
        f"No two configurations share a global batch on different numbers of {study_ranks(analysis)[1]}.",
    )


def _scaling_table(analysis: Analysis, label: str, title: str, axes: list[Column], empty: str) -> Table:
    rows = analysis.scaling[analysis.scaling["scaling"] == label]
    shown = [column.name for column in axes if column.name != "world_size"]
    configurations = analysis.configurations
    frame = rows.join(configurations[[*shown, *_THROUGHPUT, "trial_ids"]], on="configuration")
    frame["efficiency_percent"] = 100 * frame["efficiency"]
    for end in ("low", "high"):
        frame[f"efficiency_percent_{end}"] = 100 * frame[f"efficiency_{end}"]
        frame[f"plain_percent_{end}"] = 100 * frame[f"plain_efficiency_{end}"]
    frame["efficiency_percent_more"], frame["plain_percent_more"] = (
        frame["efficiency_more"],
        frame["plain_efficiency_more"],
    )
    frame["plain_percent"] = 100 * frame["plain_efficiency"].astype(float)
    frame[["reference_samples_per_s", "reference_samples_per_s_more"]] = (
        configurations[list(_THROUGHPUT)].reindex(frame["reference"]).to_numpy()
    )
    differs_from_plain = frame["plain_percent"].notna() & (frame["plain_percent"] != 100)
    frame["is_reference"] = (frame["configuration"] == frame["reference"]) & ~differs_from_plain
    references = sorted(set(frame["reference_world_size"].dropna().astype(int)))
    ranks = study_ranks(analysis)
    reference = f"N₀ = {', '.join(map(str, references))}" if references else ""
    return Table(
        title,
        (
            *axes,
            Column(
                "reference_samples_per_s",
                "reference (samples/s)",
                f"throughput of the reference, the smallest number of ranks in its series ({reference}); only the CSV "
                "has a row for each reference.",
            ),
            Column("throughput_samples_per_s", "throughput (samples/s)", f"{ESTIMATE}, not shown here."),
            Column(
                "speed_up",
                "speed-up",
                f"throughput / throughput of the reference {RATIO_ESTIMATE}.",
                decimals=2,
                interval=True,
            ),
            *([] if (frame["ideal"] == frame["world_size"]).all() else [_ideal(frame)]),
            Column(
                "plain_percent",
                f"efficiency, plain {ranks[0]} (%)",
                f"throughput / ({ranks[1]} × throughput of one {ranks[0]} without any parallel strategy).",
                1,
                1,
                True,
            ),
            Column(
                "efficiency_percent",
                "efficiency (%)",
                "speed-up / (number of ranks / that of the reference, which has the same parallel strategy).",
                1,
                1,
                True,
            ),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
        empty=empty,
        not_shown="is_reference",
    )


def _ideal(frame: pd.DataFrame) -> Column:
    decimals = 0 if (frame["ideal"].dropna() % 1 == 0).all() else 2
    return Column("ideal", "ideal", "number of ranks / that of the reference.", decimals=decimals)


def speed_up_weak_table(analysis: Analysis) -> Table:
    """Tabulate the speed-up at each batch per rank, with columns for each number of ranks."""
    return _speed_up_table(analysis, WEAK)


def speed_up_strong_table(analysis: Analysis) -> Table:
    """Tabulate the speed-up at each global batch, with columns for each number of ranks."""
    return _speed_up_table(analysis, STRONG)


_BATCH_MEANINGS = {
    "batch_per_gpu": "samples per step on each rank.",
    "global_batch": "samples per step on all ranks.",
}


def _speed_up_table(analysis: Analysis, label: str) -> Table:
    rows = analysis.speed_ups
    frame = rows[rows["scaling"] == label]
    ranks = study_ranks(analysis)
    sizes = [size for size in sorted(set(analysis.configurations["world_size"])) if f"step_s_{size}" in frame]
    sizes = [size for size in sizes if frame[f"step_s_{size}"].notna().any()]
    batch = "batch_per_gpu" if label == WEAK else "global_batch"
    axes = axis_columns(analysis, last=(), without=("world_size", "nodes", "batch_per_gpu"))
    by_epoch = any(frame[f"epoch_s_{size}"].notna().any() for size in sizes)
    kind, unit, scale, meaning = (
        ("epoch_s", "s", 1.0, "one pass over the data.")
        if by_epoch
        else ("step_s", "ms", 1e3, "plain step, without instrumentation.")
    )
    decimals = decimals_for(
        pd.Series(scale * frame[[f"{kind}_{size}" for size in sizes]].to_numpy(dtype=float).ravel())
    )
    gain = f"throughput (samples/s of all {ranks[1]}) / that of the baseline {RATIO_ESTIMATE}."
    measured = []
    for size in sizes:
        name = value_label("world_size", size, ranks)
        measured.append(Column(f"{kind}_{size}", f"{name} ({unit})", meaning, scale, decimals))
        if not (frame[f"speed_up_{size}"].dropna() == 1).all():  # the baseline itself
            measured.append(Column(f"speed_up_{size}", f"speed-up on {size}", gain, decimals=2, interval=size > 1))
    frame = (
        frame.assign(with_strategy=frame["baseline"] != PLAIN).sort_values(
            [*(column.name for column in axes if column.name in frame), batch, "with_strategy"], kind="stable"
        )
        if len(frame)
        else frame
    )
    batch_label = f"batch per {ranks[0]}" if label == WEAK else "global batch"
    borrowed = (
        f"If one {ranks[0]} was not measured with all fields of a row, the row borrows a baseline with another "
        f"interconnect, which one {ranks[0]} does not use, or with other timing settings. "
    )
    may_borrow = not {"interconnect", *analysis.fields.timing}.isdisjoint(analysis.axes)
    columns = [*(column.name for column in axes), batch, "baseline", "trial_ids", "n"]
    return Table(
        f"Speed-up at each {batch_label} ({label} scaling)",
        (
            *axes,
            Column(batch, field_label(batch, ranks), _BATCH_MEANINGS[batch], decimals=0),
            Column(
                "baseline",
                "baseline",
                f"strategy on one {ranks[0]}: none, which is plain training without any wrapper, or the same strategy.",
            ),
            *measured,
            N_COLUMN,
        ),
        frame.reindex(columns=list(dict.fromkeys([*columns, *frame.columns]))),
        f"{borrowed if may_borrow else ''}n: minimum repeats of the cells of a row.",
        blocks=tuple(column.name for column in axes),
    )
