"""Tables by batch size: efficiency on one rank up to the end of its memory, and speed-up at each batch on more ranks."""

from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns
from analysis.text import GIB


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
