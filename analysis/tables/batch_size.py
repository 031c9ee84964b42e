"""The tables of throughput by batch size on one rank, and of the acceleration ladder."""

import pandas as pd

from analysis.compare.accuracy import by_precision
from analysis.compare.ladder import BATCHES
from analysis.study import Analysis, study_ranks
from analysis.tables.table import ESTIMATE, N_COLUMN, RATIO_ESTIMATE, Column, Table, axis_columns
from analysis.text import GIB


def batch_size(analysis: Analysis) -> Table:
    """Tabulate throughput and memory of one rank by batch size, up to out of memory."""
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
            Column(
                "throughput_samples_per_s",
                "throughput (samples/s)",
                f"{ESTIMATE}.",
                interval=True,
            ),
            Column("sample_s", "time per sample (µs)", "1 / throughput.", 1e6),
            Column(
                "relative", "of the best (%)", "throughput / the highest of these batches that is resolved.", 1e2, 1
            ),
            Column(
                "peak_memory_bytes",
                "peak memory (GiB)",
                f"maximum allocated memory, share of the {one}'s memory in brackets; 1 GiB = 2³⁰ bytes.",
                1 / GIB,
                2,
                share="memory_share",
            ),
            Column(
                "outcome", "outcome", "the largest batch that fits is known only if a larger one ran out of memory."
            ),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
    )


def ladder(analysis: Analysis) -> Table:
    """Tabulate the gain of each step of the acceleration ladder, and of all steps together."""
    return Table(
        "Acceleration ladder",
        (
            Column("machine", "machine", "this study was measured; other machines are published numbers."),
            Column("step", "step", "one change after another, in the order of the study."),
            Column("samples", "samples per step", "of all ranks together.", decimals=0),
            Column(
                "batches_s",
                f"{BATCHES} batches (s)",
                f"{BATCHES} times the median plain step; the trials may run fewer steps.",
                decimals=1,
            ),
            Column("throughput_samples_per_s", "throughput (samples/s)", f"{ESTIMATE}, not shown here.", decimals=0),
            Column(
                "step_ratio",
                "step speed-up",
                f"throughput / that of the step in the next column {RATIO_ESTIMATE}.",
                decimals=2,
                interval=True,
            ),
            Column(
                "against",
                "compared with",
                "the earlier step from which it differs in the fewest settings; the first step with itself.",
            ),
            Column(
                "cumulative_ratio",
                "cumulative speed-up",
                "throughput / that of the first step, same interval.",
                decimals=2,
                interval=True,
            ),
            Column("trained_percent", "accuracy (%)", _trained_note(analysis), decimals=2, interval=True),
            N_COLUMN,
        ),
        _with_first_step(analysis.ladder),
        _source_note(analysis),
        blocks=("machine",),
    )


def _with_first_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `compare.ladder.ladder_rows`, with the first step of each ladder compared with itself."""
    is_first = rows["against"].isna()
    return rows.assign(
        against=rows["against"].where(~is_first, rows["step"]),
        step_ratio=rows["step_ratio"].astype(float).where(~is_first, 1.0),
    )


def _trained_note(analysis: Analysis) -> str:
    """Describe the accuracies of the number formats."""
    reached = by_precision(analysis.accuracy)
    on = f": {reached['trained'].iloc[0]}" if len(reached) else ""
    return f"held-out accuracy of training in the step's number format{on}, mean of the seeds [95 % interval]."


def _source_note(analysis: Analysis) -> str:
    """Name the sources of the reference ladders."""
    sources = dict.fromkeys(ladder.source for ladder in analysis.record.reference_ladders if ladder.source)
    if not sources:
        return ""
    return (
        f"Published ladder: {'; '.join(sources)}. "
        "It ran on different hardware, so compare speed-ups instead of seconds."
    )
