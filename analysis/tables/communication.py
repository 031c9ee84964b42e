"""Tables on communication: what it costs a step, where its time goes, and how near it comes to the ceiling.

Each is empty, and so left out of the report, where the study measured no such thing.
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
    """The live account of gradient communication."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    frame["late"] = [_late(row) for _, row in frame.iterrows()]
    decimals = _typical_decimals(frame["communication_s"] * _MS)
    seconds = (
        Column("last_gradient_s", "last gradient", "when in a step the last local gradient is there."),
        Column("communication_s", "all-reduces", "time in which at least one bucket is being reduced = wire + wait."),
        Column("wire_s", "wire", "transfer: the shortest time of any rank, which is that of the last to arrive."),
        Column("wait_s", "wait", "what ranks spend in all-reduces on top of that, until the last rank is there."),
        Column(
            "queueing_s",
            "queueing",
            "time for which ready buckets stood behind earlier ones, added up; not part of the all-reduces' time.",
            optional=True,
        ),
        Column("hidden_s", "hidden", "all-reduces before the last local gradient, beside the backward pass."),
        Column("exposed_s", "exposed", "all-reduces after it, when the step has nothing else to do."),
        Column("exposed_wire_s", "exposed wire", "the part of wire that is exposed."),
        Column("exposed_wait_s", "exposed wait", "the part of wait that is exposed: what lateness costs."),
    )
    axes = axis_columns(analysis)
    return Table(
        "Account of the all-reduces (ms a step)",
        (
            *axes,
            Column("gradient_bytes", "gradients (MiB)", "bytes that every rank reduces in a step.", 1 / MIB, 1),
            Column("buckets", "buckets", "groups of gradients that are reduced together, in a step.", decimals=0),
            *(replace(column, scale=_MS, decimals=decimals) for column in seconds),
            Column("late", "late rank", "the rank that the others wait for, and for how long at the bucket where it is latest."),
            N_COLUMN,
        ),
        frame,
        "Of steps with a communication hook, every rank and every bucket: median over a rank's steps, mean over ranks, "
        "median over repeats. In each step hidden + exposed are the time of the all-reduces, and so are wire + wait; their medians "
        "add up to it only nearly. A bucket waits first and transfers last. A late rank is waited for at each bucket, so the wait "
        "may be several times its lateness; what the backward pass hides of it costs nothing.",
        blocks=blocks(axes),
    )  # fmt: skip


def exposed_cost(analysis: Analysis) -> Table:
    """Compute and communication of a step, told apart in three ways."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    parts = analysis.communication.slowdown.set_index("configuration")
    step_s = analysis.configurations["step_s"].astype(float).to_dict()
    explained = dict(parts.iterrows())
    frame["step_s"] = analysis.configurations["step_s"].reindex(frame.index).astype(float)
    frame["live_compute_s"] = frame["step_s"] - frame["exposed_s"].astype(float)
    frame["alone_step_s"] = frame["step_s"] - frame["course_s"].astype(float)
    frame["reading"] = [_reading(row, explained.get(i), step_s[i]) for i, row in frame.iterrows()]
    decimals = _typical_decimals(frame["exposed_s"] * _MS)
    ranks = study_ranks(analysis)
    axes = axis_columns(analysis)
    return Table(
        "Compute and communication of a step, three ways",
        (
            *axes,
            Column("step_s", "step (ms)", "plain step, without instruments.", _MS, decimals),
            Column("live_compute_s", "rest, live (ms)", "plain step minus live.", _MS, decimals),
            Column("exposed_s", "live (ms)", "all-reduces after a rank's last gradient, mean over ranks.", _MS, decimals, True),
            Column("no_sync_step_s", "rest, no_sync (ms)", "a step under no_sync, which computes and does not communicate.", _MS, decimals),
            Column(
                "difference_s",
                "by difference (ms)",
                "a step with communication minus one under no_sync, interleaved on the same ranks, mean over ranks.",
                _MS,
                decimals,
                True,
            ),
            Column("alone_step_s", f"rest, 1 {ranks[0]} (ms)", f"plain step on one {ranks[0]} with the same batch per {ranks[0]}.", _MS, decimals, optional=True),
            Column(
                "course_s",
                f"N minus 1 {ranks[0]} (ms)",
                f"the usual course method: plain step minus the plain step on one {ranks[0]} with the same batch per {ranks[0]}.",
                _MS,
                decimals,
                True,
                optional=True,
            ),
            Column("reading", "largest reason why they differ", f"what makes N minus 1 {ranks[0]} differ most from live, with its size, by the account of why a step takes longer; they agree where they differ by less than 2 % of a step.", optional=True),
            N_COLUMN,
        ),
        frame,
        "Each pair: what the step takes without communication, and what communication adds. The three measure different things. Live counts only what the device does between its last gradient and the end of "
        "the last all-reduce: wire and wait. By difference adds what communicating costs elsewhere in the step: DDP's host "
        "work for each bucket, and a backward pass slowed down because the all-reduces use multiprocessors and memory. "
        f"N minus 1 adds everything else that more {ranks[1]} change, on the slowest of them: the load wait, host work of "
        "processes that share cores, and a rank that is late through its own work. Only the first is a bandwidth's doing.",
        blocks=blocks(axes),
    )  # fmt: skip


def slowdown(analysis: Analysis) -> Table:
    """Why a step takes longer on more ranks."""
    rows = analysis.communication.slowdown.set_index("configuration")
    frame = _by_configuration(analysis, rows.drop(columns="world_size"))
    whole = frame["slower_s"].where(frame["slower_s"] > 0)
    for name in SLOWDOWN_PARTS:
        frame[f"{name}_share"] = frame[name].astype(float) / whole
        frame[name] = frame[name].astype(float)
    decimals = _typical_decimals(frame["slower_s"] * _MS)
    meanings = {
        "exposed_wire_s": "transfer after the last local gradient.",
        "exposed_wait_s": "wait for a later rank, after the last local gradient.",
        "host_work_s": "where the device waits for the host: growth of the host's time to issue a step, at most what the "
        "other parts leave. Not separable from compute on CPU ranks.",
        "load_s": "growth of the wait for a batch.",
        "remainder_s": "explained by none of these: contention of communication and compute, work of the host that no "
        "instrument sees, noise. Negative: the parts were measured longer than the step grew.",
    }
    axes = axis_columns(analysis)
    several = frame["reference_world_size"].nunique() > 1
    return Table(
        "Why a step takes longer on more ranks" if len(frame) == 0 else f"Why a step takes longer on more {study_ranks(analysis)[1]}",
        (
            *axes,
            *([Column("reference_world_size", "against", "number of ranks of the reference.", decimals=0)] if several else []),
            Column("slower_s", "longer (ms)", "plain step minus that of the smallest size with the same batch.", _MS, decimals),
            *(
                Column(name, f"{label} (ms)", meanings[name], _MS, decimals, share=f"{name}_share", optional=True)
                for name, label in SLOWDOWN_LABELS.items()
            ),
        ),
        frame,
        "Seen from the rank that waits most, whose own work is the shortest; in brackets the share of the whole.",
        blocks=blocks(axes),
    )  # fmt: skip


def bucket_utilisation(analysis: Analysis) -> Table:
    """Every gradient bucket against the ceiling at its size."""
    rows = analysis.communication.buckets
    axes = axis_columns(analysis)
    frame = rows.join(analysis.configurations[[column.name for column in axes]], on="configuration")
    overlap = study_ranks(analysis)[0] == "CPU rank"
    return Table(
        "Utilisation of the ceiling, bucket by bucket",
        (
            *axes,
            Column("bucket", "bucket", "in the order in which buckets are reduced.", decimals=0),
            Column("bytes", "size (MiB)", "bytes of gradients in the bucket; 1 MiB = 2²⁰ bytes.", 1 / MIB, 2),
            Column("wire_s", "wire (ms)", "transfer in training.", _MS, 3),
            Column("ceiling_s", "ceiling (ms)", "the same size in the same trial's sweep, where nothing else runs.", _MS, 3),
            Column("bus_bytes_per_s", "bus bandwidth (GB/s)", "bytes / wire · 2(N-1)/N.", 1 / GB, _bandwidth_decimals(frame)),
            Column("utilisation_percent", "utilisation (%)", "ceiling / wire.", 1, 1),
            N_COLUMN,
        ),
        frame.assign(utilisation_percent=100 * frame["utilisation"].astype(float)),
        "Below 100 %: the backward pass takes multiprocessors and memory from the all-reduce"
        + (", or its buckets share the ranks' cores and links with each other. " if overlap else ". ")
        + "Above 100 %: in training all-reduces follow each other on busy devices with high clocks, and the shortest time of "
        "any rank leaves out what its last arrival overlaps; such values are shown as they are.",
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip


def ceiling(analysis: Analysis) -> Table:
    """Latency and bandwidth of each group of ranks, fitted to its sweep."""
    frame = analysis.communication.fits
    axes = _ceiling_columns(analysis, frame)
    return Table(
        "Ceiling: latency and bandwidth of an all-reduce",
        (
            *axes,
            Column("latency_s", "latency (µs)", "time of an all-reduce of nothing, by the fit.", 1e6, 1),
            Column("algorithm_bytes_per_s", "algbw (GB/s)", "bytes / time for endless messages, by the fit.", 1 / GB, _bandwidth_decimals(frame)),
            Column("bus_bytes_per_s", "busbw (GB/s)", "algbw · 2(N-1)/N.", 1 / GB, _bandwidth_decimals(frame)),
            Column("median_percent", "median error (%)", "of the fit, over the sizes.", 1, 1),
            Column("largest_percent", "largest error (%)", "a large one: no one latency and bandwidth describes all sizes.", 1, 1),
            Column("sizes", "sizes", "message sizes that the fit is made of.", decimals=0),
            Column("n", "n", "trials whose sweeps are pooled.", decimals=0),
        ),
        frame.assign(
            median_percent=100 * frame["median_error"].astype(float), largest_percent=100 * frame["largest_error"].astype(float)
        ),
        "Fitted: time = latency + bytes / bandwidth, least squares on logarithms of time. busbw as in NVIDIA nccl-tests "
        "(doc/PERFORMANCE.md), which supposes a ring; where a switch adds (NVLS, SHARP) it may exceed the links. 1 GB = 10⁹ bytes.",
    )  # fmt: skip


def sweep(analysis: Analysis) -> Table:
    """All-reduces of every size on otherwise idle ranks."""
    frame = analysis.communication.sweep
    axes = _ceiling_columns(analysis, frame)
    return Table(
        "Ceiling: sweep of message sizes",
        (
            *axes,
            Column("bytes", "bytes", "of the message that each rank contributes.", decimals=0),
            Column("seconds", "time (ms)", "median over repetitions of the mean over ranks, median over trials.", _MS, 3),
            Column("algorithm_bytes_per_s", "algbw (GB/s)", "bytes / time.", 1 / GB, 3),
            Column("bus_bytes_per_s", "busbw (GB/s)", "algbw · 2(N-1)/N.", 1 / GB, 3),
            Column("n", "n", "trials.", decimals=0),
        ),
        frame,
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip


def audit(analysis: Analysis) -> Table:
    """Trials whose instruments cost more than the budget."""
    flagged = flagged_trials(analysis.measured)
    return Table(
        f"Trials whose instruments cost more than {AUDIT_BUDGET:.0%}".replace("%", " %"),
        (
            Column("trial_id", "trial", "its folder below trials/ in the results."),
            Column("instruments_ratio", "phases / plain", "wall time a step with marks at each phase / without.", decimals=3),
            Column(
                "communication_ratio",
                "communication / plain",
                "wall time a step with the communication hook / without.",
                decimals=3,
                optional=True,
            ),
        ),
        flagged,
        "Wall time of the slowest rank each, windows of one trial after another: noise of the machine counts too.",
    )  # fmt: skip


def _by_configuration(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """`rows`, indexed by configuration, with that configuration's fields and in its order."""
    fields = [column.name for column in axis_columns(analysis)]
    found = analysis.configurations
    own = found[[*fields, "trial_ids"]].assign(n=found["n"])
    return own[own.index.isin(rows.index)].join(rows.drop(columns="n", errors="ignore"))


def _late(row: pd.Series) -> str | None:
    if pd.isna(row["waited_for_rank"]):
        return None
    return f"rank {int(row['waited_for_rank'])}: {_MS * row['lateness_s']:.1f} ms"


def _reading(row: pd.Series, parts: pd.Series | None, step_s: float) -> str | None:
    """In a few words, what makes N minus 1 larger than the live account; None where there is nothing to compare with."""
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
    """What tells ceilings apart: the number of ranks always, anything else where it differs or is emulated."""
    names = {
        "interconnect": "interconnect",
        "cpus_per_rank": field_label("cpus_per_rank", study_ranks(analysis)),
        "nodes": "nodes",
        "place": "place",
    }
    shown = [
        name
        for name in names
        if frame[name].nunique(dropna=False) > 1 or (name == "interconnect" and (frame[name] != "auto").any())
    ]
    meanings = {
        "interconnect": "auto: what NCCL or gloo chooses itself; the others are emulated, by forbidding it faster ways.",
        "cpus_per_rank": "for its threads and its loaders.",
        "nodes": "hosts that share the ranks evenly.",
        "place": "like ranks on other GPUs or hosts, numbered.",
    }
    return [
        *(Column(name, names[name], meanings[name], decimals=0) for name in shown),
        Column("world_size", field_label("world_size", study_ranks(analysis)), decimals=0),
    ]


def _typical_decimals(values: pd.Series) -> int:
    """Decimals that give a typical value of a column three digits; at most three, for no clock tells more of a ms."""
    return min(3, decimals_for(pd.Series([values.astype(float).abs().median()])))


def _bandwidth_decimals(frame: pd.DataFrame) -> int:
    return min(3, 1 + decimals_for(frame["bus_bytes_per_s"].astype(float) / GB))


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
