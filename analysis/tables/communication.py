"""Tables about communication: its cost per step, its breakdown, and how close it comes to the measured limit.

A table is empty, and omitted from the report, if the study did not measure it.
"""

from dataclasses import replace

import pandas as pd

from analysis.compare.communication import SLOWDOWN_PARTS
from analysis.compare.communication_cost import AUDIT_BUDGET, bandwidth_rows, flagged_trials
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import GB, MIB, SLOWDOWN_LABELS, decimals_for, field_label

_MS = 1e3


def communication(analysis: Analysis) -> Table:
    """Tabulate the communication breakdown of every configuration."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    frame["late"] = [_late(row) for _, row in frame.iterrows()]
    decimals = _typical_decimals(frame["communication_s"] * _MS)
    seconds = (
        Column("last_gradient_s", "last gradient", "time in the step at which the last local gradient is ready."),
        Column("communication_s", "all-reduces", "time with at least one all-reduce in progress = wire time + wait."),
        Column(
            "wire_s", "wire time", "transfer time: the shortest time of any rank, which is that of the last to arrive."
        ),
        Column(
            "wait_s",
            "wait for slowest rank",
            "additional time that ranks spend in all-reduces until the last rank arrives.",
        ),
        Column(
            "queueing_s",
            "queueing",
            "total time for which ready buckets wait for earlier ones; not included in the all-reduces.",
            optional=True,
        ),
        Column("hidden_s", "hidden", "all-reduces before the last local gradient, overlapped with the backward pass."),
        Column(
            "exposed_s", "exposed", "all-reduces after the last local gradient, when the step has nothing else to do."
        ),
        Column("exposed_wire_s", "exposed transfer", "the exposed part of the wire time."),
        Column("exposed_wait_s", "exposed wait", "the exposed part of the wait: the cost of late ranks."),
    )
    axes = axis_columns(analysis)
    return Table(
        "Communication breakdown (ms per step)",
        (
            *axes,
            Column("gradient_bytes", "gradients (MiB)", "bytes that every rank reduces per step.", 1 / MIB, 1),
            Column("buckets", "buckets", "groups of gradients that are reduced together, per step.", decimals=0),
            *(replace(column, scale=_MS, decimals=decimals) for column in seconds),
            Column(
                "late", "late rank", "the rank that the others wait for, and how long at the bucket where it is latest."
            ),
            N_COLUMN,
        ),
        frame,
        "Measured with a communication hook on every rank and bucket: median over the steps of a rank, mean over "
        "ranks, median over repeats. In each step, hidden + exposed = wire time + wait = all-reduces; their medians "
        "add up only nearly. A bucket waits first and transfers last. Ranks wait for a late rank at each bucket, so "
        "the wait may be several times its lateness; the part hidden by the backward pass costs nothing.",
        blocks=blocks(axes),
    )


def exposed_cost(analysis: Analysis) -> Table:
    """Tabulate compute and communication of a step, measured in three ways."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    slowdowns = dict(analysis.communication.slowdown.set_index("configuration").iterrows())
    step_s = analysis.configurations["step_s"].astype(float).to_dict()
    frame["step_s"] = analysis.configurations["step_s"].reindex(frame.index).astype(float)
    frame["live_compute_s"] = frame["step_s"] - frame["exposed_s"].astype(float)
    frame["alone_step_s"] = frame["step_s"] - frame["course_s"].astype(float)
    frame["reading"] = [_largest_reason(row, slowdowns.get(i), step_s[i]) for i, row in frame.iterrows()]
    decimals = _typical_decimals(frame["exposed_s"] * _MS)
    ranks = study_ranks(analysis)
    axes = axis_columns(analysis)
    return Table(
        "Compute and communication of a step, three methods",
        (
            *axes,
            Column("step_s", "step (ms)", "plain step, without instrumentation.", _MS, decimals),
            Column("live_compute_s", "rest, live (ms)", "plain step minus live.", _MS, decimals),
            Column(
                "exposed_s",
                "live (ms)",
                "all-reduces after the last gradient of a rank, mean over ranks.",
                _MS,
                decimals,
                True,
            ),
            Column(
                "no_sync_step_s",
                "rest, no_sync (ms)",
                "step under no_sync, which computes without communicating.",
                _MS,
                decimals,
            ),
            Column(
                "difference_s",
                "by difference (ms)",
                "step with communication minus step under no_sync, interleaved on the same ranks, mean over ranks.",
                _MS,
                decimals,
                True,
            ),
            Column(
                "alone_step_s",
                f"rest, 1 {ranks[0]} (ms)",
                f"plain step on one {ranks[0]} with the same batch per {ranks[0]}.",
                _MS,
                decimals,
                optional=True,
            ),
            Column(
                "course_s",
                f"N minus 1 {ranks[0]} (ms)",
                f"textbook estimate: plain step minus plain step on one {ranks[0]} with the same batch per {ranks[0]}.",
                _MS,
                decimals,
                True,
                optional=True,
            ),
            Column(
                "reading",
                "largest reason for the difference",
                f"the largest part of the slowdown that makes N minus 1 {ranks[0]} differ from live; the two agree if "
                "they differ by less than 2 % of a step.",
                optional=True,
            ),
            N_COLUMN,
        ),
        frame,
        "Each method splits a step into the time without communication and the time that communication adds. The "
        "methods measure different things. Live: only the time between the last gradient and the end of the last "
        "all-reduce (exposed transfer and wait). By difference: also the cost elsewhere in the step, such as DDP's "
        "host work per bucket, and a slower backward pass because all-reduces use multiprocessors and memory. N "
        f"minus 1: also everything else that changes with more {ranks[1]}, on the slowest of them, such as load wait, "
        "processes that share cores, and ranks that are late through their own work. Only live depends on bandwidth "
        "alone.",
        blocks=blocks(axes),
    )


def slowdown(analysis: Analysis) -> Table:
    """Tabulate the parts of the slowdown with more ranks."""
    rows = analysis.communication.slowdown.set_index("configuration")
    frame = _by_configuration(analysis, rows.drop(columns="world_size"))
    total_s = frame["slower_s"].where(frame["slower_s"] > 0)
    for name in SLOWDOWN_PARTS:
        frame[f"{name}_share"] = frame[name].astype(float) / total_s
        frame[name] = frame[name].astype(float)
    decimals = _typical_decimals(frame["slower_s"] * _MS)
    parts = [
        Column(name, f"{label} (ms)", _SLOWDOWN_MEANINGS[name], _MS, decimals, share=f"{name}_share", optional=True)
        for name, label in SLOWDOWN_LABELS.items()
    ]
    axes = axis_columns(analysis)
    references = []
    if frame["reference_world_size"].nunique() > 1:
        references.append(Column("reference_world_size", "reference", "number of ranks of the reference.", decimals=0))
    return Table(
        f"Slowdown with more {'ranks' if frame.empty else study_ranks(analysis)[1]}",
        (
            *axes,
            *references,
            Column(
                "slower_s",
                "longer (ms)",
                "plain step minus that of the smallest size with the same batch per rank.",
                _MS,
                decimals,
            ),
            *parts,
        ),
        frame,
        "Of the rank that waits most, since its own work is the shortest; shares of the total in brackets.",
        blocks=blocks(axes),
    )


_SLOWDOWN_MEANINGS = {
    "exposed_wire_s": "transfer after the last local gradient.",
    "exposed_wait_s": "wait for a later rank, after the last local gradient.",
    "host_work_s": "if the device waits for the host: growth of the host's launch time, at most what the other parts "
    "leave. Not separable from compute on CPU ranks.",
    "load_s": "growth of the wait for a batch.",
    "remainder_s": "unexplained: contention of communication and compute, unmeasured host work, noise. "
    "Negative if the parts add up to more than the slowdown.",
}


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
        f"memory{', or buckets compete with each other for cores and links' if shares_cores else ''}. Above 100 %: in "
        "training, all-reduces run back to back on busy devices with high clocks, and the shortest time of any rank "
        "excludes what overlaps with the last arrival. Such values are not corrected.",
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


def audit(analysis: Analysis) -> Table:
    """Tabulate the trials whose measurement overhead exceeds the budget."""
    return Table(
        f"Trials with a measurement overhead above {AUDIT_BUDGET:.0%}".replace("%", " %"),
        (
            Column("trial_id", "trial", "its folder below trials/ in the results."),
            Column(
                "instruments_ratio",
                "phases / plain",
                "wall time per step with marks at each phase / without.",
                decimals=3,
            ),
            Column(
                "communication_ratio",
                "communication / plain",
                "wall time per step with the communication hook / without.",
                decimals=3,
                optional=True,
            ),
        ),
        flagged_trials(analysis.measured),
        "Wall time of the slowest rank, measured in successive windows of one trial, so noise of the machine is "
        "included.",
    )


def _by_configuration(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Join `rows`, indexed by configuration, with the fields of the configurations, in their order."""
    fields = [column.name for column in axis_columns(analysis)]
    configurations = analysis.configurations[[*fields, "trial_ids", "n"]]
    return configurations[configurations.index.isin(rows.index)].join(rows.drop(columns="n", errors="ignore"))


def _late(row: pd.Series) -> str | None:
    if pd.isna(row["waited_for_rank"]):
        return None
    return f"rank {int(row['waited_for_rank'])}: {_MS * row['lateness_s']:.1f} ms"


def _largest_reason(row: pd.Series, parts: pd.Series | None, step_s: float) -> str | None:
    """Return the main reason why N minus 1 differs from live; None if either or the slowdown `parts` are unknown."""
    if pd.isna(row["course_s"]) or pd.isna(row["exposed_s"]) or parts is None:
        return None
    gap_s = row["course_s"] - row["exposed_s"]
    if abs(gap_s) < 0.02 * step_s:
        return "agree within 2 % of a step"
    reasons = {
        "DDP's host work": parts["host_work_s"],
        "load wait": parts["load_s"],
        "a late rank": parts["exposed_wait_s"] - row["exposed_wait_s"],
        "unexplained: contention or noise": parts["remainder_s"],
    }
    sign = 1 if gap_s > 0 else -1
    name, value = max(reasons.items(), key=lambda reason: -1 if pd.isna(reason[1]) else sign * reason[1])
    return f"{name}, {_MS * value:+.1f} ms"


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
        "cpus_per_rank": "for its threads and its loaders.",
        "nodes": "hosts that share the ranks evenly.",
        "place": "number of a group of equal ranks on other GPUs or hosts.",
    }
    return [
        *(Column(name, headers[name], meanings[name], decimals=0) for name in shown),
        Column("world_size", field_label("world_size", study_ranks(analysis)), decimals=0),
    ]


def _typical_decimals(values: pd.Series) -> int:
    """Return the decimals that give a typical value three digits; at most three, the resolution of clocks in ms."""
    return min(3, decimals_for(pd.Series([values.astype(float).abs().median()])))


def _bandwidth_decimals(frame: pd.DataFrame) -> int:
    return min(3, 1 + decimals_for(frame["bus_bytes_per_s"].astype(float) / GB))


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
                optional=True,
            ),
            Column(
                "ceiling_bus_bytes_per_s",
                "measured all-reduce limit (GB/s)",
                "bus bandwidth of these.",
                1 / GB,
                2,
                optional=True,
            ),
            Column(
                "utilisation",
                "utilisation (%)",
                "t, otherwise idle / t, both summed over the median buckets.",
                1e2,
                1,
                optional=True,
            ),
            Column(
                "course_bus_bytes_per_s",
                f"by N minus 1 {one} (GB/s)",
                f"the textbook estimate, t = step on N {several} minus step on one {one}. It includes waiting and "
                "contention but omits hidden communication, so it overstates bandwidth if overlap is good.",
                1 / GB,
                2,
                optional=True,
            ),
            N_COLUMN,
        ),
        frame,
        "In an all-reduce of S bytes on N ranks in time t, each rank sends and receives at least 2(N-1)/N · S bytes. "
        "The bus bandwidth 2(N-1)/N · S/t is therefore comparable to the speed of a link (NVIDIA nccl-tests, "
        "doc/PERFORMANCE.md).",
        blocks=blocks(axes),
    )
