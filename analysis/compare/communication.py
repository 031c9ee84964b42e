"""Break down the cost of DDP's gradient communication per step: hidden, exposed, transfer and wait.

A bucket's all-reduce ends on all ranks at the same time, and starts when the last of them arrives. The rank that
arrives last therefore measures the transfer alone ("wire"). Anything beyond that on other ranks is their wait for that
rank (AMD's TraceLens; DeepSpeed's straggler report). Times are in seconds from the start of a rank's own step; clocks
of ranks are never compared.

NCCL reduces the buckets of a rank one after another. A bucket starts at max(ready, end of the previous one), and the
time until then is queueing. gloo's buckets overlap and end out of order. A bucket starts when it is ready, and totals
of a step are unions of intervals.

A rank that is 20 ms late delays the others at each of its buckets, so waits add up to more than 20 ms, while time
hidden by the backward pass costs nothing. The cost of lateness is therefore attributed on the late rank: how much later
its last gradient is than the others'. The exposed transfer is the late rank's own exposed time. Collectives that wait
also slow the computation of their ranks, which shortens that lateness; see hidden_lateness_s in
`communication_breakdown`, and how `causes.slowdown` counts it.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.compare.causes import slowdown
from analysis.measure.allreduce import bus_factor, fits, limit_seconds, measured_limits, ranks_of, sweep_seconds
from analysis.measure.communication import (
    BREAKDOWN_COLUMNS,
    BUCKET_COLUMNS,
    WINDOW,
    bucket_rows,
    communication_breakdown,
)
from analysis.measure.measures import configuration_of
from analysis.measure.traced import TRACED_COLUMNS, traced_breakdown
from analysis.measure.traced import WINDOW as TRACED_WINDOW
from analysis.read.own_code import COMMAND_COLUMN
from analysis.read.results import Results
from analysis.statistics import intervals, log_estimates


def exposed_costs(breakdown: pd.DataFrame, configurations: pd.DataFrame, scaling: pd.DataFrame) -> pd.DataFrame:
    """Return medians over repeats and three estimates of the exposed cost, one row per configuration.

    Rows: configurations with a communication breakdown, indexed like `configurations`.
    breakdown: see `communication_breakdown`, with a column worker_group.
    configurations, scaling: as in `Analysis`.
    Columns: `BREAKDOWN_COLUMNS` (waited_for_rank: the one reported by most repeats; hidden_s: communication_s -
    exposed_s), n (repeats), and in seconds with `_low` and `_high` (95 % interval, NaN for one repeat):
    exposed_s: live, from the buckets.
    difference_s: step with communication - step under no_sync, interleaved on the same ranks (AdaptDL's accumulation
    steps).
    step_time_difference_s: plain step on N ranks - plain step on 1, same batch per rank; NaN without a measurement on
    one rank.
    The first two are medians over repeats of differences within a repeat. Their interval is that of the logarithm of
    (base + cost) / base, with base the step without communication, so worker groups count as in `statistics`. The third
    has the interval of efficiency.
    """
    rows = breakdown.assign(configuration=configuration_of(configurations).reindex(breakdown.index)).dropna(
        subset="configuration"
    )
    columns = [
        *BREAKDOWN_COLUMNS, "n",
        *(f"{name}{end}" for name in ("difference_s", "step_time_difference_s") for end in ("", "_low", "_high")),
        "exposed_s_low", "exposed_s_high",
    ]  # fmt: skip
    if rows.empty:
        return pd.DataFrame(columns=columns, dtype=float)
    rows["configuration"] = rows["configuration"].astype(int)
    rows["difference_s"] = rows["synchronised_step_s"] - rows["no_sync_step_s"]
    grouped = rows.groupby("configuration")
    medians = [name for name in BREAKDOWN_COLUMNS if name not in ("waited_for_rank", "hidden_s")]
    result = grouped[[*medians, "difference_s"]].median()
    result["communication_s"] = result[["communication_s", "exposed_s"]].max(axis=1)
    result["hidden_s"] = result["communication_s"] - result["exposed_s"]
    result["n"] = grouped.size()
    result["waited_for_rank"] = grouped["waited_for_rank"].agg(_reported_by_most)
    base = rows["no_sync_step_s"].fillna(rows["last_gradient_s"])
    base = base.fillna(rows["communication_step_s"] - rows["exposed_s"])
    for name in ("exposed_s", "difference_s"):
        estimates = log_estimates(rows.assign(ratio=1 + rows[name] / base), "configuration", "ratio")
        scale = base.groupby(rows["configuration"]).median()
        bounds = intervals(estimates)[["low", "high"]].sub(1).mul(scale, axis=0).reindex(result.index)
        result[[f"{name}_low", f"{name}_high"]] = bounds
    pairs = weak_pairs(scaling)
    pairs = pairs[pairs["reference_world_size"] == 1].set_index("configuration").reindex(result.index)
    single_step_s = pairs["reference"].map(configurations["step_s"])
    result["step_time_difference_s"] = configurations["step_s"].reindex(result.index) - single_step_s
    for end, other in (("low", "high"), ("high", "low")):
        result[f"step_time_difference_s_{end}"] = single_step_s * (1 / pairs[f"efficiency_{other}"] - 1)
    return result[columns]


MOST_SLOWED = 1.1
"""Traced step / step without a profiler up to which a trace shows how ranks wait for each other."""


EXPOSED = [
    "exposed_s", "exposed_wire_s", "exposed_wait_s", "waited_for_rank", "lateness_s", "late_by_load_s",
    "communication_step_s", "last_gradient_s", "traced",
]  # fmt: skip
"""columns of the breakdown that need only a step's last gradient and the end of its reductions"""

TRACED = [
    "queueing_s", "wire_s", "communication_s", "first_ready_s", "wait_s", "hidden_s", "exposed_queueing_s",
    "hidden_lateness_s",
]  # fmt: skip
"""columns of the breakdown that need the times of each bucket"""


@dataclass(frozen=True)
class Communication:
    """Communication results of a study; frames are empty if it measured none.

    breakdown: see `trial_breakdown`. exposed: see `exposed_costs`.
    slowdown: see `causes.slowdown`. buckets, placed_buckets: see `bucket_utilisation`, over all places and per place
    (see `allreduce.KEYS`; null for a trial without a sweep). sweep: see `allreduce.measured_limits`. fits: see
    `allreduce.fits`. slowed: see `slowed_by_trace`.
    """

    breakdown: pd.DataFrame
    exposed: pd.DataFrame
    slowdown: pd.DataFrame
    buckets: pd.DataFrame
    placed_buckets: pd.DataFrame
    sweep: pd.DataFrame
    fits: pd.DataFrame
    slowed: pd.Series


def communication(results: Results, configurations: pd.DataFrame, scaling: pd.DataFrame) -> Communication:
    """Evaluate the communication of all trials of one environment.

    configurations, scaling: as in `Analysis`.
    """
    rows = bucket_rows(results.buckets, results.steps, results.trials)
    slowed = slowed_by_trace(results.trials, results.windows)
    traced = traced_breakdown(results.collectives, results.windows)
    breakdown = trial_breakdown(rows, slowed, results.windows, traced)
    exposed = exposed_costs(
        breakdown.join(results.trials.set_index("trial_id")["worker_group"]), configurations, scaling
    )
    trial_rows = trial_buckets(rows, results.sweep, configurations)
    places = ranks_of(results.trials, results.sweep)["place"]
    sweep = measured_limits(results.trials, results.sweep)
    return Communication(
        breakdown,
        exposed,
        slowdown(exposed, configurations, weak_pairs(scaling)),
        bucket_utilisation(trial_rows, ["configuration"]),
        bucket_utilisation(trial_rows.join(places, on="trial_id"), ["configuration", "place"]),
        sweep,
        fits(sweep),
        slowed,
    )


def trial_breakdown(
    rows: pd.DataFrame, slowed: pd.Series, window_rows: pd.DataFrame, traced: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return `communication_breakdown` of all trials, with what a profiler changes taken from steps without one.

    rows: see `bucket_rows`. slowed: see `slowed_by_trace`. window_rows: see `reduce.windows`. traced: see
    `traced_breakdown`.

    The buckets of a user's own trials come from a trace. A probe also notes a step's last gradient and the end of its
    reductions in the window "phases", without a profiler: `EXPOSED` columns of these trials are of that window. For the
    trials in `slowed`, the `TRACED` columns are null.

    Strategies in `traced` have their values, which include all collectives, and of `communication_breakdown` those of
    the gradients alone (ZeRO-1). They have none if the profiler slowed them, because it exposes what is hidden without.
    """
    result = communication_breakdown(rows, window_rows)
    exposed = communication_breakdown(rows, window_rows, "phases")
    unknown = result.index.intersection(slowed.index).difference(exposed.index)
    result = result.drop(index=unknown).reindex(result.index.difference(unknown).union(exposed.index))
    result.loc[result.index.isin(slowed.index), TRACED] = np.nan
    is_exact = result.index.isin(exposed.index)
    for name in EXPOSED:  # one by one, because they have several types
        result[name] = result[name].mask(is_exact, exposed[name].reindex(result.index))
    total_s = result["communication_s"]
    result["communication_s"] = total_s.where(total_s.isna(), result[["communication_s", "exposed_s"]].max(axis=1))
    result["hidden_s"] = result["communication_s"] - result["exposed_s"]
    return result if traced is None else _with_traced(result, traced, slowed)


def _with_traced(breakdown: pd.DataFrame, traced: pd.DataFrame, slowed: pd.Series) -> pd.DataFrame:
    """Return the breakdown with the values of traced strategies."""
    exact = traced.drop(index=traced.index.intersection(slowed.index))
    result = breakdown.drop(index=breakdown.index.intersection(traced.index.difference(exact.index)))
    result = result.reindex(result.index.union(exact.index))
    for name in TRACED_COLUMNS:
        result[name] = result[name].mask(result.index.isin(exact.index), exact[name].reindex(result.index))
    return result


def slowed_by_trace(trials: pd.DataFrame, window_rows: pd.DataFrame) -> pd.Series:
    """Return traced step / step without a profiler above `MOST_SLOWED`, indexed by trial_id.

    Trials are those of a user's own code, and of strategies in `traced_breakdown`. The latter are compared with the
    phases window, because steps of their plain window have no times of their own. The communication of both is taken
    from a trace. A profiler that slows the host this much also decides which rank waits for which: on two H200 without
    a late rank, it made steps of VGG-19 1.5 times as long (`benchmarks/results/doors-2gpu`, batch 32).

    trials, window_rows: frames of `results.Results`.
    """
    own = trials.loc[trials[COMMAND_COLUMN].notna(), "trial_id"]
    strategies = window_rows.loc[window_rows["collectives_s"].notna(), "trial_id"].unique()
    steps = window_rows[window_rows["trial_id"].isin([*own, *strategies])]
    medians = steps.groupby(["trial_id", "window"], observed=True)["step_s"].median().unstack()
    medians = medians.reindex(columns=[WINDOW, "plain", TRACED_WINDOW, "phases"])
    ratio = (medians[WINDOW] / medians["plain"]).where(
        medians.index.isin(own), medians[TRACED_WINDOW] / medians["phases"]
    )
    return ratio[ratio > MOST_SLOWED]


def trial_buckets(rows: pd.DataFrame, sweep: pd.DataFrame, configurations: pd.DataFrame) -> pd.DataFrame:
    """Compare the transfer of each bucket with the measured all-reduce limit of its ranks, one row per trial and
    bucket.

    rows: see `bucket_rows`. sweep: frame of `results.Results`. Columns: trial_id, configuration, bucket, bytes;
    wire_s: median over steps; ready_before_s: how long before the last local gradient it is ready, median over steps,
    null without that stamp; in_order (NCCL: one bucket after another); ceiling_s: time of an all-reduce of that size in
    the trial's sweep; utilisation = ceiling_s / wire_s; bus_bytes_per_s = bytes / wire_s · 2(N-1)/N (NVIDIA nccl-tests,
    PERFORMANCE.md).
    """
    by_trial = configuration_of(configurations)
    rows = rows[(rows["window"] == WINDOW) & rows["trial_id"].isin(by_trial.index)]
    if rows.empty:
        return pd.DataFrame(columns=["trial_id", "configuration", "bucket", "bytes", "in_order", *BUCKET_COLUMNS])
    trials = (
        rows.assign(ready_before_s=rows["last_gradient_s"] - rows["ready_s"])
        .groupby(["trial_id", "bucket"])
        .agg(
            bytes=("bytes", "first"),
            wire_s=("wire_s", "median"),
            ready_before_s=("ready_before_s", "median"),
            in_order=("in_order", "first"),
            world_size=("world_size", "first"),
        )
        .reset_index()
    )
    trials["configuration"] = trials["trial_id"].map(by_trial).astype(int)
    trials["ceiling_s"] = limit_seconds(sweep_seconds(sweep), trials)
    wire = trials["wire_s"].where(trials["wire_s"] > 0)
    trials["utilisation"] = trials["ceiling_s"] / wire
    trials["bus_bytes_per_s"] = trials["bytes"] / wire * bus_factor(trials["world_size"])
    return trials.drop(columns="world_size")


def bucket_utilisation(trial_rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return medians over the trials of `trial_buckets`, with n and trial_ids, per bucket and value of `keys`."""
    columns = [*keys, "bucket", "bytes", "in_order", *BUCKET_COLUMNS, "n", "trial_ids"]
    if trial_rows.empty:
        return pd.DataFrame(columns=columns)
    grouped = trial_rows.groupby([*keys, "bucket"], dropna=False)
    result = grouped[BUCKET_COLUMNS].median()
    result[["bytes", "in_order"]] = grouped[["bytes", "in_order"]].first()
    result["n"] = grouped.size()
    result["trial_ids"] = grouped["trial_id"].agg(tuple)
    return result.reset_index()[columns]


def weak_pairs(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of weak scaling that have a reference with fewer ranks."""
    pairs = scaling[(scaling["scaling"] == "weak") & (scaling["ideal"] > 1)]
    return pairs.astype({"configuration": int, "reference": int, "world_size": int, "reference_world_size": int})


def _reported_by_most(ranks: pd.Series) -> int | None:
    """Return the rank reported by more than half of the repeats."""
    counts = ranks.value_counts()
    return int(counts.index[0]) if len(counts) and counts.iloc[0] > len(ranks) / 2 else None
