"""Tables by batch size: efficiency on one rank up to the end of its memory, and speed-up at each batch on more ranks."""

import pandas as pd

from analysis.columns import GIB, N_COLUMN, axis_columns
from analysis.formatting import decimals_for, field_label, value_label
from analysis.scaling import STRONG, WEAK
from analysis.study import Analysis, study_ranks
from analysis.table import Column, Table


def batch_size(analysis: Analysis) -> Table:
    """Throughput of one rank over its batch, to the end of memory."""
    frame = analysis.batch_curve
    one, _ = study_ranks(analysis)
    axes = [
        Column(column.name, column.header, decimals=0 if column.name == "batch_per_gpu" else column.decimals)
        for column in axis_columns(analysis, last=("batch_per_gpu",), without=("world_size", "nodes"))
    ]
    return Table(
        f"Batch size on one {one}",
        (
            *axes,
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats [95 % interval].", interval=True),
            Column("sample_s", "time per sample (µs)", "1 / throughput.", 1e6),
            Column("relative", "of the best (%)", "throughput / the highest of these batches.", 1e2, 1),
            Column("peak_memory_bytes", "peak memory (GiB)", f"allocated at most, in brackets the share of the {one}'s memory; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2, share="memory_share", optional=True),
            Column("outcome", "outcome", "the largest batch that fits is known only where a larger one ran out of memory."),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
    )  # fmt: skip


def speed_up_weak_table(analysis: Analysis) -> Table:
    """Speed-up at each batch per rank, in a column for each number of ranks."""
    return _speed_up_table(analysis, WEAK)


def speed_up_strong_table(analysis: Analysis) -> Table:
    """Speed-up at each global batch, in a column for each number of ranks."""
    return _speed_up_table(analysis, STRONG)


_HELD = {
    "batch_per_gpu": "samples that each rank takes in one step.",
    "global_batch": "samples that all ranks take in one step.",
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
    kind, unit, scale, what = (
        ("epoch_s", "s", 1.0, "one pass over the data.")
        if by_epoch
        else ("step_s", "ms", 1e3, "a plain step, without instruments.")
    )
    decimals = decimals_for(
        pd.Series(scale * frame[[f"{kind}_{size}" for size in sizes]].to_numpy(dtype=float).ravel())
    )
    gain = f"throughput (samples of all {ranks[1]} a second) / that of the baseline [95 % interval]."
    measured = []
    for size in sizes:
        name = value_label("world_size", size, ranks)
        measured.append(Column(f"{kind}_{size}", f"{name} ({unit})", what, scale, decimals))
        measured.append(Column(f"speed_up_{size}", f"speed-up on {size}", gain, decimals=2, interval=size > 1))
    frame = (
        frame.sort_values([*(column.name for column in axes if column.name in frame), batch, "baseline"], kind="stable")
        if len(frame)
        else frame
    )
    held = f"batch per {ranks[0]}" if label == WEAK else "global batch"
    columns = [*(column.name for column in axes), batch, "baseline", "trial_ids", "n"]
    return Table(
        f"Speed-up at each {held} ({label} scaling)",
        (
            *axes,
            Column(batch, field_label(batch, ranks), _HELD[batch], decimals=0),
            Column("baseline", "baseline", f"what the one {ranks[0]} of the comparison runs: the strategy itself, or none, plain training "
                   "without any wrapper.", optional=True),
            *measured,
            N_COLUMN,
        ),
        frame.reindex(columns=list(dict.fromkeys([*columns, *frame.columns]))),
        f"Where one {ranks[0]} was not measured with all of a row's fields, the row borrows that over another interconnect, which one "
        f"{ranks[0]} does not use, or that was timed otherwise. n: the fewest repeats of any of a row's cells.",
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip
