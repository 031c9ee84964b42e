"""The bandwidth that training reaches, from the bytes, the ranks and the time that it is made of."""

from analysis.columns import GB, MIB, N_COLUMN, axis_columns, blocks
from analysis.communication_cost import bandwidth_rows
from analysis.study import Analysis, study_ranks
from analysis.table import Column, Table


def bandwidth(analysis: Analysis) -> Table:
    """Bandwidth and utilisation of the all-reduces of a step."""
    axes = axis_columns(analysis)
    fields = [column.name for column in axes if column.name != "world_size"]
    frame = bandwidth_rows(analysis.configurations, analysis.communication).join(analysis.configurations[fields])
    one, several = study_ranks(analysis)
    return Table(
        "Bandwidth of the all-reduces and its utilisation",
        (
            *axes,
            Column("gradient_bytes", "S (MiB)", "bytes of gradients that every rank reduces in a step; 1 MiB = 2²⁰ bytes.", 1 / MIB, 1),
            Column("buckets", "buckets", "groups of gradients that are reduced together, in a step.", decimals=0),
            Column("wire_s", "t (ms)", "transfer of all buckets in training: the shortest time of any rank, the wait for late ones left out.", 1e3, 2),
            Column("algorithm_bytes_per_s", "S/t (GB/s)", "algorithm bandwidth; 1 GB = 10⁹ bytes.", 1 / GB, 2),
            Column("wire_bus_bytes_per_s", "bus bandwidth (GB/s)", f"S/t · 2(N-1)/N, N being the number of {several}.", 1 / GB, 2),
            Column("ceiling_s", "t alone (ms)", "the same buckets one after another, with nothing beside them, on the same ranks.", 1e3, 2, optional=True),
            Column("ceiling_bus_bytes_per_s", "ceiling (GB/s)", "bus bandwidth with that t.", 1 / GB, 2, optional=True),
            Column("utilisation", "utilisation (%)", "t alone / t, both summed over the median buckets.", 1e2, 1, optional=True),
            Column("course_bus_bytes_per_s", f"by N minus 1 {one} (GB/s)", f"with t = step on N {several} minus step on one {one}, as courses do it. That t holds waiting and "
                   "contention and leaves out what is hidden, so the better the overlap, the higher this number, without bound.", 1 / GB, 2, optional=True),
            N_COLUMN,
        ),
        frame,
        "All-reduce of S bytes on N ranks in time t: each sends and receives at least 2(N-1)/N · S bytes, so bus bandwidth = 2(N-1)/N · S/t "
        "compares with the speed of a link (NVIDIA nccl-tests, doc/PERFORMANCE.md).",
        blocks=blocks(axes),
    )  # fmt: skip
