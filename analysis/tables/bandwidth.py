"""Tables about all-reduce bandwidth: in training, and the measured limit of otherwise idle ranks.

A table is empty, and omitted from the report, if the study did not measure it.
"""

import pandas as pd

from analysis.compare.communication_cost import bandwidth_rows
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import GB, MIB, decimals_for, field_label

_MS = 1e3


def bandwidth(analysis: Analysis) -> Table:
    """Tabulate bandwidth and utilisation of the all-reduces of a step."""
    axes = axis_columns(analysis)
    fields = [column.name for column in axes if column.name != "world_size"]
    frame = bandwidth_rows(analysis.configurations, analysis.communication).join(analysis.configurations[fields])
    one, several = study_ranks(analysis)
    return Table(
        "All-reduce bandwidth and utilisation",
        (
            *axes,
            Column(
                "gradient_bytes",
                "S (MiB)",
                "bytes of gradients that every rank reduces per step; 1 MiB = 2²⁰ bytes.",
                1 / MIB,
                1,
            ),
            Column("buckets", "buckets", "groups of gradients that are reduced together, per step.", decimals=0),
            Column(
                "wire_s",
                "t (ms)",
                "transfer time of all buckets in training: the shortest time of any rank, without the wait for late "
                "ones.",
                1e3,
                2,
            ),
            Column("algorithm_bytes_per_s", "S/t (GB/s)", "algorithm bandwidth; 1 GB = 10⁹ bytes.", 1 / GB, 2),
            Column(
                "wire_bus_bytes_per_s",
                "bus bandwidth (GB/s)",
                f"S/t · 2(N-1)/N, where N is the number of {several}.",
                1 / GB,
                2,
            ),
            Column(
                "ceiling_s",
                "t, otherwise idle (ms)",
                "the same buckets one after another on the same, otherwise idle ranks.",
                1e3,
                2,
            ),
            Column(
                "ceiling_bus_bytes_per_s",
                "measured all-reduce limit (GB/s)",
                "bus bandwidth of these.",
                1 / GB,
                2,
            ),
            Column(
                "utilisation",
                "utilisation (%)",
                "t, otherwise idle / t, both summed over the median buckets.",
                1e2,
                1,
            ),
            Column(
                "step_time_difference_bus_bytes_per_s",
                f"by N minus 1 {one} (GB/s)",
                f"the textbook estimate, t = step on N {several} minus step on one {one}. It includes waiting and "
                "contention but omits hidden communication, so it overstates bandwidth if overlap is good.",
                1 / GB,
                2,
            ),
            N_COLUMN,
        ),
        frame,
        "In an all-reduce of S bytes on N ranks in time t, each rank sends and receives at least 2(N-1)/N · S bytes. "
        "The bus bandwidth 2(N-1)/N · S/t is therefore comparable to the speed of a link (NVIDIA nccl-tests, "
        f"doc/PERFORMANCE.md).{_ABOVE_LIMIT if (frame['utilisation'].astype(float) > 1).any() else ''}",
        blocks=blocks(axes),
    )


_ABOVE_LIMIT = (
    " Above 100 %, all-reduces reach the limit: in training they run back to back on busy devices with high clocks, "
    "the shortest time of any rank excludes what overlaps with the last arrival, and the limit is interpolated between "
    "the sizes of a sweep. Such values are not corrected."
)


def bucket_utilisation(analysis: Analysis) -> Table:
    """Tabulate every gradient bucket and the measured all-reduce limit at its size."""
    rows = analysis.communication.buckets
    axes = axis_columns(analysis)
    frame = rows.join(analysis.configurations[[column.name for column in axes]], on="configuration")
    shares_cores = study_ranks(analysis)[0] == "CPU rank"
    return Table(
        "Utilisation of the measured all-reduce limit by bucket",
        (
            *axes,
            Column("bucket", "bucket", "in the order of reduction.", decimals=0),
            Column("bytes", "size (MiB)", "bytes of gradients in the bucket; 1 MiB = 2²⁰ bytes.", 1 / MIB, 2),
            Column("wire_s", "wire time (ms)", "transfer time in training.", _MS, 3),
            Column(
                "ceiling_s",
                "measured limit (ms)",
                "time of an all-reduce of this size in the same trial's sweep, with otherwise idle ranks.",
                _MS,
                3,
            ),
            Column(
                "bus_bytes_per_s",
                "bus bandwidth (GB/s)",
                "bytes / wire time · 2(N-1)/N.",
                1 / GB,
                _bandwidth_decimals(frame),
            ),
            Column("utilisation_percent", "utilisation (%)", "measured limit / wire time.", 1, 1),
            N_COLUMN,
        ),
        frame.assign(utilisation_percent=100 * frame["utilisation"].astype(float)),
        "Below 100 %: the backward pass competes with the all-reduce for multiprocessors and "
        f"memory{', or buckets compete with each other for cores and links' if shares_cores else ''}.{_ABOVE_LIMIT}",
        blocks=tuple(column.name for column in axes),
    )


def ceiling(analysis: Analysis) -> Table:
    """Tabulate latency and bandwidth of each group of ranks, fitted to its sweep."""
    frame = analysis.communication.fits
    axes = _ceiling_columns(analysis, frame)
    return Table(
        "Measured all-reduce limit: latency and bandwidth",
        (
            *axes,
            Column("latency_s", "latency (µs)", "fitted time of an empty all-reduce.", 1e6, 1),
            Column(
                "algorithm_bytes_per_s",
                "algbw (GB/s)",
                "fitted bytes / time for infinitely long messages.",
                1 / GB,
                _bandwidth_decimals(frame),
            ),
            Column("bus_bytes_per_s", "busbw (GB/s)", "algbw · 2(N-1)/N.", 1 / GB, _bandwidth_decimals(frame)),
            Column("median_percent", "median error (%)", "of the fit, over the sizes.", 1, 1),
            Column(
                "largest_percent",
                "largest error (%)",
                "if large, no single latency and bandwidth describe all sizes.",
                1,
                1,
            ),
            Column("sizes", "sizes", "number of message sizes in the fit.", decimals=0),
            Column("n", "n", "trials whose sweeps are pooled.", decimals=0),
        ),
        frame.assign(
            median_percent=100 * frame["median_error"].astype(float),
            largest_percent=100 * frame["largest_error"].astype(float),
        ),
        "Fit: time = latency + bytes / bandwidth, least squares on logarithms of time. busbw as in NVIDIA nccl-tests "
        "(doc/PERFORMANCE.md), which assumes a ring; if a switch reduces (NVLS, SHARP), it may exceed the link "
        "speed. 1 GB = 10⁹ bytes.",
    )


def sweep(analysis: Analysis) -> Table:
    """Tabulate all-reduces of every message size on otherwise idle ranks."""
    frame = analysis.communication.sweep
    axes = _ceiling_columns(analysis, frame)
    return Table(
        "Measured all-reduce limit by message size",
        (
            *axes,
            Column("bytes", "bytes", "size of the message that each rank contributes.", decimals=0),
            Column(
                "seconds", "time (ms)", "median over repetitions of the mean over ranks, median over trials.", _MS, 3
            ),
            Column("algorithm_bytes_per_s", "algbw (GB/s)", "bytes / time.", 1 / GB, 3),
            Column("bus_bytes_per_s", "busbw (GB/s)", "algbw · 2(N-1)/N.", 1 / GB, 3),
            Column("n", "n", "trials.", decimals=0),
        ),
        frame,
        blocks=tuple(column.name for column in axes),
    )


def _ceiling_columns(analysis: Analysis, frame: pd.DataFrame) -> list[Column]:
    """Return the columns that identify a group of ranks: its size, and other fields if they vary or are emulated."""
    headers = {
        "interconnect": "interconnect",
        "cpus_per_rank": field_label("cpus_per_rank", study_ranks(analysis)),
        "nodes": "nodes",
        "place": "rank group",
    }
    shown = [
        name
        for name in headers
        if frame[name].nunique(dropna=False) > 1 or (name == "interconnect" and (frame[name] != "auto").any())
    ]
    meanings = {
        "interconnect": "auto: chosen by NCCL or gloo; others are emulated by disabling faster ones.",
        "cpus_per_rank": "that Ray reserves, and threads of the rank; loaders may use more.",
        "nodes": "hosts that share the ranks evenly.",
        "place": "number of a group of equal ranks on other GPUs or hosts.",
    }
    return [
        *(Column(name, headers[name], meanings[name], decimals=0) for name in shown),
        Column("world_size", field_label("world_size", study_ranks(analysis)), decimals=0),
    ]


def _bandwidth_decimals(frame: pd.DataFrame) -> int:
    return min(3, 1 + decimals_for(frame["bus_bytes_per_s"].astype(float) / GB))
