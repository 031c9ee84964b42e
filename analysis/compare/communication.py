"""Break down the cost of DDP's gradient communication per step: hidden, exposed, wire and wait.

A bucket's all-reduce ends on all ranks at the same time, and starts when the last of them arrives. The rank that
arrives last therefore measures the transfer alone ("wire"). Anything beyond that on other ranks is their wait for that
rank (AMD's TraceLens; DeepSpeed's straggler report). Times are in seconds from the start of a rank's own step; clocks
of ranks are never compared.

NCCL reduces the buckets of a rank one after another. A bucket starts at max(ready, end of the previous one), and the
time until then is queueing. gloo's buckets overlap and end out of order. A bucket starts when it is ready, and totals
of a step are unions of intervals.

A rank that is 20 ms late delays the others at each of its buckets, so waits add up to more than 20 ms. But time hidden
by the backward pass costs nothing. The cost of lateness is the exposed wait, after a rank's last local gradient.
"""

from dataclasses import dataclass

import pandas as pd

from analysis.measure.allreduce import bus_factor, fits, limit_seconds, measured_limits, ranks_of, sweep_seconds
from analysis.measure.communication import (
    BREAKDOWN_COLUMNS,
    BUCKET_COLUMNS,
    WINDOW,
    bucket_rows,
    communication_breakdown,
)
from analysis.measure.measures import configuration_of
from analysis.read.results import Results
from analysis.statistics import intervals, log_estimates

SLOWDOWN_PARTS = ("exposed_wire_s", "exposed_wait_s", "host_work_s", "load_s", "remainder_s")
"""Parts of a slowdown. The known ones add up to it."""


def exposed_costs(breakdown: pd.DataFrame, configurations: pd.DataFrame, scaling: pd.DataFrame) -> pd.DataFrame:
    """Return medians over repeats and three estimates of the exposed cost, one row per configuration.

    Rows: configurations with a communication breakdown, indexed like `configurations`.
    breakdown: see `communication_breakdown`, with a column worker_group.
    configurations, scaling: as in `Analysis`.
    Columns: `BREAKDOWN_COLUMNS` (waited_for_rank: the one reported by most repeats), n (repeats), and in seconds with
    `_low` and `_high` (95 % interval, NaN for one repeat):
    exposed_s: live, from the buckets.
    difference_s: step with communication - step under no_sync, interleaved on the same ranks (AdaptDL's accumulation
    steps).
    course_s: plain step on N ranks - plain step on 1, same batch per rank; NaN without a measurement on one rank.
    The first two are paired within a trial. Their interval is that of the logarithm of (base + cost) / base, with base
    the step without communication, so worker groups count as in `statistics`. The third has the interval of efficiency.
    """
    rows = breakdown.assign(configuration=configuration_of(configurations).reindex(breakdown.index)).dropna(
        subset="configuration"
    )
    columns = [
        *BREAKDOWN_COLUMNS, "n",
        *(f"{name}{end}" for name in ("difference_s", "course_s") for end in ("", "_low", "_high")),
        "exposed_s_low", "exposed_s_high",
    ]  # fmt: skip
    if rows.empty:
        return pd.DataFrame(columns=columns, dtype=float)
    rows["configuration"] = rows["configuration"].astype(int)
    grouped = rows.groupby("configuration")
    result = grouped[[name for name in BREAKDOWN_COLUMNS if name != "waited_for_rank"]].median()
    result["n"] = grouped.size()
    result["waited_for_rank"] = grouped["waited_for_rank"].agg(_reported_by_most)
    rows["difference_s"] = rows["synchronised_step_s"] - rows["no_sync_step_s"]
    base = rows["no_sync_step_s"].fillna(rows["last_gradient_s"])
    for name in ("exposed_s", "difference_s"):
        estimates = log_estimates(rows.assign(ratio=1 + rows[name] / base), "configuration", "ratio")
        scale = base.groupby(rows["configuration"]).median()
        result[name] = ((estimates["value"] - 1) * scale).reindex(result.index)
        bounds = intervals(estimates)[["low", "high"]].sub(1).mul(scale, axis=0).reindex(result.index)
        result[[f"{name}_low", f"{name}_high"]] = bounds
    weak_pairs = _weak_pairs(scaling)
    weak_pairs = weak_pairs[weak_pairs["reference_world_size"] == 1].set_index("configuration").reindex(result.index)
    single_step_s = weak_pairs["reference"].map(configurations["step_s"])
    result["course_s"] = configurations["step_s"].reindex(result.index) - single_step_s
    for end, other in (("low", "high"), ("high", "low")):
        result[f"course_s_{end}"] = single_step_s * (1 / weak_pairs[f"efficiency_{other}"] - 1)
    return result[columns]


def breakdown_step_s(exposed: pd.DataFrame, step_s: pd.Series) -> pd.Series:
    """Return the step times that exposed seconds are a share of, so that no share exceeds 1.

    It is the plain step, or the step in the communication window if that is longer. exposed: see `exposed_costs`;
    step_s: plain steps, indexed like it.
    """
    window_step_s = exposed["last_gradient_s"].astype(float) + exposed["exposed_s"].astype(float)
    return pd.concat([step_s.astype(float), window_step_s], axis=1).max(axis=1)


def slowdown(exposed: pd.DataFrame, configurations: pd.DataFrame, scaling: pd.DataFrame) -> pd.DataFrame:
    """Return why a step is slower on more ranks, one row per weak-scaling pair.

    A pair compares the smallest world size N₀ of a series with a larger one. Columns: configuration, reference,
    world_size, reference_world_size, slower_s = step(N) - step(N₀) of the plain window, and `SLOWDOWN_PARTS`, which add
    up to it (null ones omitted). All values come from the rank that waits longest. Its own work is the shortest, so
    lateness of another rank only shows in its wait.
    exposed_wire_s, exposed_wait_s: growth of the exposed parts (one rank exposes nothing).
    load_s: growth of the wait for a batch.
    host_work_s: if the step is host-bound on N ranks (`measures.summarise`), the growth of the host time to issue a
    step, at most the rest; 0 if it is not host-bound; null if host and device are the same (CPU).
    remainder_s: not explained by any part, such as noise, or contention of communication and compute for memory and
    multiprocessors. It may be negative, like any growth.
    """
    columns = ["configuration", "reference", "world_size", "reference_world_size", "slower_s", *SLOWDOWN_PARTS]
    pairs = _weak_pairs(scaling)
    pairs = pairs[pairs["configuration"].isin(exposed.index)]
    has_breakdown = pairs["reference"].isin(exposed.index) | (pairs["reference_world_size"] == 1)
    pairs = pairs[has_breakdown].reset_index(drop=True)
    if pairs.empty:
        return pd.DataFrame(columns=columns)

    def growth(frame: pd.DataFrame, name: str, on_one_rank: pd.Series | float) -> pd.Series:
        reference_values = pairs["reference"].map(frame[name]).where(pairs["reference_world_size"] != 1, on_one_rank)
        return (pairs["configuration"].map(frame[name]) - reference_values).astype(float)

    result = pairs[["configuration", "reference", "world_size", "reference_world_size"]].copy()
    result["slower_s"] = growth(configurations, "step_s", pairs["reference"].map(configurations["step_s"]))
    for name in ("exposed_wire_s", "exposed_wait_s"):
        result[name] = growth(exposed, f"seen_{name}", 0.0)
    result["load_s"] = growth(exposed, "seen_load_wait_s", pairs["reference"].map(configurations["load_wait_s"]))
    remainder = result["slower_s"] - result[["exposed_wire_s", "exposed_wait_s", "load_s"]].sum(axis=1)
    issue_growth = growth(configurations, "step_launch_s", pairs["reference"].map(configurations["step_launch_s"]))
    host_bound = pairs["configuration"].map(configurations["host_bound"]).astype(float)  # null if unknown
    host = issue_growth.clip(lower=0.0, upper=remainder.clip(lower=0.0))
    result["host_work_s"] = host.where(host_bound > 0, 0.0).where(host_bound.notna())
    result["remainder_s"] = remainder - result["host_work_s"].fillna(0.0)
    return result[columns]


@dataclass(frozen=True)
class Communication:
    """Communication results of a study; frames are empty if it measured none.

    breakdown: see `communication_breakdown`. exposed: see `exposed_costs`. slowdown: see `slowdown`. buckets,
    placed_buckets: see `bucket_utilisation`, over all places and per place (see `allreduce.KEYS`; null for a trial
    without a sweep). sweep: see `allreduce.measured_limits`. fits: see `allreduce.fits`.
    """

    breakdown: pd.DataFrame
    exposed: pd.DataFrame
    slowdown: pd.DataFrame
    buckets: pd.DataFrame
    placed_buckets: pd.DataFrame
    sweep: pd.DataFrame
    fits: pd.DataFrame


def communication(results: Results, configurations: pd.DataFrame, scaling: pd.DataFrame) -> Communication:
    """Evaluate the communication of all trials of one environment.

    configurations, scaling: as in `Analysis`.
    """
    rows = bucket_rows(results.buckets, results.steps, results.trials)
    breakdown = communication_breakdown(rows, results.windows)
    exposed = exposed_costs(
        breakdown.join(results.trials.set_index("trial_id")["worker_group"]), configurations, scaling
    )
    trial_rows = trial_buckets(rows, results.sweep, configurations)
    places = ranks_of(results.trials, results.sweep)["place"]
    sweep = measured_limits(results.trials, results.sweep)
    return Communication(
        breakdown,
        exposed,
        slowdown(exposed, configurations, scaling),
        bucket_utilisation(trial_rows, ["configuration"]),
        bucket_utilisation(trial_rows.join(places, on="trial_id"), ["configuration", "place"]),
        sweep,
        fits(sweep),
    )


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


def _weak_pairs(scaling: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of weak scaling that have a reference with fewer ranks."""
    pairs = scaling[(scaling["scaling"] == "weak") & (scaling["ideal"] > 1)]
    return pairs.astype({"configuration": int, "reference": int, "world_size": int, "reference_world_size": int})


def _reported_by_most(ranks: pd.Series) -> int | None:
    """Return the rank reported by more than half of the repeats."""
    counts = ranks.value_counts()
    return int(counts.index[0]) if len(counts) and counts.iloc[0] > len(ranks) / 2 else None
