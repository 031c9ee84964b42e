"""Tables about communication: its cost per step and its breakdown.

A table is empty, and omitted from the report, if the study did not measure it.
"""

from dataclasses import replace

import pandas as pd

from analysis.compare.causes import SLOWDOWN_PARTS
from analysis.compare.communication_cost import AUDIT_BUDGET, flagged_trials
from analysis.measure.collectives import COLUMNS, by_operation
from analysis.measure.communication import catches_up, most_late_s
from analysis.measure.measures import configuration_of
from analysis.study import Analysis, study_ranks
from analysis.tables.table import N_COLUMN, Column, Table, axis_columns, blocks
from analysis.text import MIB, SLOWDOWN_LABELS, decimals_for

_MS = 1e3

MOST_SHARE = 1.5
"""Largest share of the slowdown that is shown: if causes cancel each other, shares of what is left say nothing."""


def communication(analysis: Analysis) -> Table:
    """Tabulate the communication breakdown of every configuration."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    frame["late"] = [_late(row) for _, row in frame.iterrows()]
    decimals = _typical_decimals(frame["communication_s"] * _MS)
    is_traced = bool((frame["traced"].astype(float) == 1).any())
    what = "collectives" if is_traced else "all-reduces"
    idle = ""
    if any(value is True for value in analysis.configurations["host_bound"].reindex(frame.index)):
        idle = " If the step is host-bound, this includes time in which the device idles between kernels."
    seconds = (
        Column("last_gradient_s", "last gradient", "time in the step at which the last local gradient is ready."),
        Column("communication_s", what, f"time with at least one {what[:-1]} in progress = wire time + wait."),
        Column(
            "wire_s", "wire time", "transfer time: the shortest time of any rank, which is that of the last to arrive."
        ),
        Column(
            "wait_s", f"wait in {what}", "the rest: time until the last rank arrives, also behind the backward pass."
        ),
        Column(
            "queueing_s",
            "queueing",
            f"total time for which ready buckets wait for earlier ones; not included in the {what}.",
        ),
        Column(
            "hidden_s",
            "hidden",
            f"all-reduces before the last local gradient, overlapped with the backward pass = {what} - exposed.{idle}",
        ),
        Column(
            "exposed_s", "exposed", "all-reduces after the last local gradient, when the step has nothing else to do."
        ),
        Column("exposed_wire_s", "exposed transfer", "exposed time of the rank that arrives last."),
        Column(
            "exposed_wait_s",
            "exposed wait",
            "how much later the last rank has its last gradient: the cost of late ranks.",
        ),
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
                "late",
                "late rank",
                "the rank that usually arrives last, and by how much in a step; in brackets at its latest bucket, if "
                "the others catch up with it by much, which compute more slowly while they wait.",
            ),
            N_COLUMN,
        ),
        frame,
        "Measured with a communication hook on every rank and bucket. All values but the exposed transfer are those of "
        "the ranks that wait: the median over all ranks except the last to arrive, over steps, then over repeats. A "
        "bucket waits first and transfers last. Ranks wait for a late rank at each bucket, so the wait may be several "
        "times its lateness; the part hidden by the backward pass costs only what it slows that pass."
        f"{_OF_TRACES if is_traced else ''}",
        blocks=blocks(axes),
    )


_OF_TRACES = (
    " The values of zero1, fsdp2 and hsdp are from a profiler trace of a few steps on every rank instead, and include "
    "all collectives: hidden is the time in which the device also computed, exposed the rest."
)


def exposed_cost(analysis: Analysis) -> Table:
    """Tabulate compute and communication of a step, measured in three ways."""
    frame = _by_configuration(analysis, analysis.communication.exposed)
    slowdowns = dict(analysis.communication.slowdown.set_index("configuration").iterrows())
    step_s = analysis.configurations["step_s"].astype(float).to_dict()
    frame["step_s"] = analysis.configurations["step_s"].reindex(frame.index).astype(float)
    frame["live_compute_s"] = frame["step_s"] - frame["exposed_s"].astype(float)
    frame["alone_step_s"] = frame["step_s"] - frame["step_time_difference_s"].astype(float)
    frame["reading"] = [_largest_reason(row, slowdowns.get(i), step_s[i]) for i, row in frame.iterrows()]
    frame["exposed_s_low"] = frame["exposed_s_low"].astype(float).clip(lower=0)  # a duration is not negative
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
                "exposed communication of the ranks that wait: transfer, and wait for the last rank.",
                _MS,
                decimals,
                True,
            ),
            Column(
                "no_sync_step_s",
                "rest, no_sync (ms)",
                "step under no_sync, which computes without communicating, of the same ranks.",
                _MS,
                decimals,
            ),
            Column(
                "difference_s",
                "by difference (ms)",
                "step with communication minus step under no_sync, interleaved, of the same ranks.",
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
            ),
            Column(
                "step_time_difference_s",
                f"N minus 1 {ranks[0]} (ms)",
                f"textbook estimate: plain step minus plain step on one {ranks[0]} with the same batch per {ranks[0]}.",
                _MS,
                decimals,
                True,
            ),
            Column(
                "reading",
                "largest reason for the difference",
                f"the largest part of the slowdown that makes N minus 1 {ranks[0]} differ from live; the two agree if "
                "they differ by less than 2 % of a step.",
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
    """Tabulate the causes of the slowdown with more ranks."""
    rows = analysis.communication.slowdown.set_index("configuration")
    frame = _by_configuration(analysis, rows.drop(columns=["world_size", "host_bound"]))
    total_s = frame["growth_s"].where(frame["growth_s"] > 0)
    parts_s = frame[list(SLOWDOWN_PARTS)].astype(float)
    frame = frame.assign(**parts_s, **shares_of(parts_s, total_s).add_suffix("_share"))
    decimals = _typical_decimals(frame["growth_s"] * _MS)
    parts = [
        Column(name, f"{label} (ms)", _SLOWDOWN_MEANINGS[name], _MS, decimals, share=f"{name}_share")
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
                "growth_s",
                "longer (ms)",
                "plain step minus that of the smallest size with the same batch per rank.",
                _MS,
                decimals,
            ),
            *parts,
            Column(
                "kernels_s",
                "kernels alone (ms)",
                "evidence: growth of kernel time without communication, or of the step under no_sync if kernel time is "
                "unknown. Slower compute contains it.",
                _MS,
                decimals,
            ),
        ),
        frame,
        "Causes and the unexplained part add up to the first column; shares of it in brackets, unless large causes "
        "cancel each other. Values of the ranks that wait for the last one. Communication takes the share of the plain "
        "step that it takes of a step in its own window.",
        blocks=blocks(axes),
    )


def shares_of(parts: pd.DataFrame, total: "pd.Series[float]") -> pd.DataFrame:
    """Return the shares of a total per row; unknown in rows whose parts cancel each other, see `MOST_SHARE`."""
    shares = parts.div(total, axis=0)
    return shares.mask(shares.abs().max(axis=1) > MOST_SHARE)


_SLOWDOWN_MEANINGS = {
    "transfer_s": "transfer of the last bucket after the last gradient of the rank that arrives last; with zero1, "
    "fsdp2 and hsdp, every transfer during which the device does not compute.",
    "queueing_s": "the same for earlier buckets, which still occupy the link.",
    "wait_s": "how much later the last rank has its last gradient than the others, or starts its collectives, and how "
    "much more slowly the others computed while they waited for it before.",
    "host_s": "if the step is host-bound on either size: growth of the time in which the device waits for the host. "
    "Not separable from compute on CPU ranks.",
    "load_s": "growth of the longest wait of a rank for its batch, and of the copy to the device.",
    "slower_compute_s": "growth of all else in a step with communication: kernels that share cores, memory or clocks "
    "with other ranks, or multiprocessors and memory with an all-reduce.",
    "remainder_s": "what no cause explains, such as noise between windows. Above 10 % of the growth, look into it.",
}


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
            ),
        ),
        flagged_trials(analysis.measured),
        "Wall time of the slowest rank, measured in successive windows of one trial, so noise of the machine is "
        "included.",
    )


def collectives(analysis: Analysis) -> Table:
    """Tabulate what scripts, and strategies that use more than DDP's buckets, communicate, by operation."""
    trials = by_operation(analysis.results.collectives).reset_index()
    trials["configuration"] = trials["trial_id"].map(configuration_of(analysis.configurations))
    grouped = trials.dropna(subset=["configuration"]).groupby(["configuration", "operation"])
    rows = grouped[COLUMNS].median().assign(n=grouped.size()).reset_index()
    axes = axis_columns(analysis)
    frame = rows.join(analysis.configurations[[column.name for column in axes]], on="configuration")
    decimals = decimals_for(frame["duration_s"].astype(float) * _MS)
    seconds = (
        ("duration_s", "time (ms)", "from the start on a rank to its end, summed over the calls."),
        ("transfer_s", "transfer (ms)", "the shortest time of any rank, which is that of the last to arrive."),
        ("wait_s", "wait (ms)", "additional time until the last rank arrives."),
        ("hidden_s", "hidden (ms)", "part during which the device also computed."),
        ("exposed_transfer_s", "exposed transfer (ms)", "part of the transfer during which it did not."),
        ("exposed_wait_s", "exposed wait (ms)", "part of the wait during which it did not: the cost of late ranks."),
    )
    return Table(
        "Collectives by operation, per step",
        (
            *axes,
            Column("operation", "operation", "as torch.distributed names it."),
            Column("calls", "calls", "per step and rank.", decimals=0),
            Column(
                "bytes", "size (MiB)", "the larger of input and output on a rank, summed over the calls.", 1 / MIB, 2
            ),
            *(Column(name, header, meaning, _MS, decimals) for name, header, meaning in seconds),
            N_COLUMN,
        ),
        frame,
        "From a profiler trace of a few steps on every rank, which slows the host: median over the steps of a rank, "
        "mean over ranks, median over repeats. Operations may overlap on CPUs, so that their times add up to more than "
        "a step.",
        blocks=blocks(axes),
    )


def _by_configuration(analysis: Analysis, rows: pd.DataFrame) -> pd.DataFrame:
    """Join `rows`, indexed by configuration, with the fields of the configurations, in their order."""
    fields = [column.name for column in axis_columns(analysis)]
    configurations = analysis.configurations[[*fields, "trial_ids", "n"]]
    return configurations[configurations.index.isin(rows.index)].join(rows.drop(columns="n", errors="ignore"))


def _late(row: pd.Series) -> str | None:
    if pd.isna(row["waited_for_rank"]):
        return None
    text = f"rank {int(row['waited_for_rank'])}: {_MS * row['lateness_s']:.1f} ms"
    return f"{text} ({_MS * most_late_s(row):.1f} ms)" if catches_up(row) else text


def _largest_reason(row: pd.Series, parts: pd.Series | None, step_s: float) -> str | None:
    """Return the main reason why N minus 1 differs from live; None if either or the slowdown `parts` are unknown."""
    if pd.isna(row["step_time_difference_s"]) or pd.isna(row["exposed_s"]) or parts is None:
        return None
    gap_s = row["step_time_difference_s"] - row["exposed_s"]
    if abs(gap_s) < 0.02 * step_s:
        return "agree within 2 % of a step"
    reasons = {
        "the host": parts["host_s"],
        "load": parts["load_s"],
        "slower compute": parts["slower_compute_s"],
        "unexplained": parts["remainder_s"],
    }
    sign = 1 if gap_s > 0 else -1
    name, value = max(reasons.items(), key=lambda reason: -1 if pd.isna(reason[1]) else sign * reason[1])
    return f"{name}, {_MS * value:+.1f} ms"


def _typical_decimals(values: pd.Series) -> int:
    """Return the decimals that give a typical value three digits; at most three, the resolution of clocks in ms."""
    return min(3, decimals_for(pd.Series([values.astype(float).abs().median()])))
