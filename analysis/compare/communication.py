"""DDP's gradient communication, from buckets to what it costs a step: hidden, exposed, wire and wait.

A bucket's all-reduce ends on all ranks together and begins when the last of them is there. So the rank that arrives last
sees the transfer alone, and what others see on top of it is their wait for that rank (AMD's TraceLens; DeepSpeed's
straggler report). Times are seconds from the begin of a rank's own step; clocks of ranks are never compared.

NCCL reduces the buckets of a rank one after another, so a bucket starts at max(ready, end of the one before it), and what
passes until then is queueing. gloo's buckets overlap and end out of order: a bucket starts when it is ready, and totals
of a step are unions of intervals.

A rank that is 20 ms late is waited for at each of its buckets, so waits add up to more than 20 ms; but what the backward
pass hides costs nothing. The exposed wait, after a rank's last local gradient, is what lateness costs.
"""

from dataclasses import dataclass

import pandas as pd

from analysis.load.results import Results
from analysis.measure.allreduce import bus_factor, ceiling_seconds, ceilings, fits, ranks_of, sweep_seconds
from analysis.measure.communication import ACCOUNT_COLUMNS, BUCKET_COLUMNS, WINDOW, account, bucket_rows
from analysis.measure.measures import configuration_of
from analysis.statistics import intervals, log_estimates

SLOWDOWN_PARTS = ("exposed_wire_s", "exposed_wait_s", "host_work_s", "load_s", "remainder_s")
"""What a slowdown is made of; the parts that are known add up to it."""


def exposed_costs(accounts: pd.DataFrame, found: pd.DataFrame, scaling: pd.DataFrame) -> pd.DataFrame:
    """A row for each configuration with an account, indexed like `found`: medians over repeats, and exposed cost thrice.

    accounts: see `account`, with a column worker_group. found, scaling: as in `scaling.Analysis`.
    Columns: `ACCOUNT_COLUMNS` (waited_for_rank: the one named in most repeats), n (repeats), and in seconds with `_low`
    and `_high` (95 % interval, NaN for one repeat):
    exposed_s: live, from the buckets.
    difference_s: step with communication - step under no_sync, interleaved on the same ranks (AdaptDL's accumulation
    steps).
    course_s: plain step on N ranks - plain step on 1, same batch per rank; NaN where no single rank was measured.
    The first two are paired within a trial: their interval is that of the logarithm of (base + cost) / base, base being
    the step without communication, so that worker groups count as in `statistics`. The third's is that of efficiency.
    """
    rows = accounts.assign(configuration=configuration_of(found).reindex(accounts.index)).dropna(subset="configuration")
    columns = [
        *ACCOUNT_COLUMNS, "n", *(f"{name}{end}" for name in ("difference_s", "course_s") for end in ("", "_low", "_high")),
        "exposed_s_low", "exposed_s_high",
    ]  # fmt: skip
    if rows.empty:
        return pd.DataFrame(columns=columns, dtype=float)
    rows["configuration"] = rows["configuration"].astype(int)
    grouped = rows.groupby("configuration")
    result = grouped[[name for name in ACCOUNT_COLUMNS if name != "waited_for_rank"]].median()
    result["n"] = grouped.size()
    result["waited_for_rank"] = grouped["waited_for_rank"].agg(_named_by_most)
    rows["difference_s"] = rows["synchronised_step_s"] - rows["no_sync_step_s"]
    base = rows["no_sync_step_s"].fillna(rows["last_gradient_s"])
    for name in ("exposed_s", "difference_s"):
        estimates = log_estimates(rows.assign(ratio=1 + rows[name] / base), "configuration", "ratio")
        scale = base.groupby(rows["configuration"]).median()
        result[name] = ((estimates["median"] - 1) * scale).reindex(result.index)
        bounds = intervals(estimates).sub(1).mul(scale, axis=0).reindex(result.index)
        result[[f"{name}_low", f"{name}_high"]] = bounds
    pairs = _weak_pairs(scaling)
    pairs = pairs[pairs["reference_world_size"] == 1].set_index("configuration").reindex(result.index)
    alone = pairs["reference"].map(found["step_s"])
    result["course_s"] = found["step_s"].reindex(result.index) - alone
    for end, other in (("low", "high"), ("high", "low")):
        result[f"course_s_{end}"] = alone * (1 / pairs[f"efficiency_{other}"] - 1)
    return result[columns]


def step_of_account_s(exposed: pd.DataFrame, step_s: pd.Series) -> pd.Series:
    """The step that exposed seconds are a share of: the plain one, or where the account's window saw a longer one, that.

    exposed: see `exposed_costs`; step_s: plain steps, indexed like it. No share of it can pass 1.
    """
    seen_s = exposed["last_gradient_s"].astype(float) + exposed["exposed_s"].astype(float)
    return pd.concat([step_s.astype(float), seen_s], axis=1).max(axis=1)


def slowdown(exposed: pd.DataFrame, found: pd.DataFrame, scaling: pd.DataFrame) -> pd.DataFrame:
    """Why a step is slower on more ranks: a row for each weak pair, the smallest world size N₀ against one of its series.

    Columns: configuration, reference, world_size, reference_world_size, slower_s = step(N) - step(N₀) of the plain
    window, and `SLOWDOWN_PARTS`, which add up to it (null ones left out). All is seen from the rank that waits most: its
    own work is the shortest, so that the lateness of another is in its wait, and in nothing else.
    exposed_wire_s, exposed_wait_s: growth of what the live account exposes (one rank exposes nothing).
    load_s: growth of the wait for a batch.
    host_work_s: where the device waits for the host on N ranks (`measures.host_bound`), the growth of the host time to
    issue a step, at most what the parts above leave; 0 where it does not; null where host and device are one (CPU).
    remainder_s: what no part explains, such as contention of communication and compute for memory and multiprocessors,
    and noise. It may be negative, as any growth may.
    """
    columns = ["configuration", "reference", "world_size", "reference_world_size", "slower_s", *SLOWDOWN_PARTS]
    pairs = _weak_pairs(scaling)
    pairs = pairs[pairs["configuration"].isin(exposed.index)]
    with_account = pairs["reference"].isin(exposed.index) | (pairs["reference_world_size"] == 1)
    pairs = pairs[with_account].reset_index(drop=True)
    if pairs.empty:
        return pd.DataFrame(columns=columns)

    def growth(frame: pd.DataFrame, name: str, alone: pd.Series | float) -> pd.Series:
        small = pairs["reference"].map(frame[name]).where(pairs["reference_world_size"] != 1, alone)
        return (pairs["configuration"].map(frame[name]) - small).astype(float)

    result = pairs[["configuration", "reference", "world_size", "reference_world_size"]].copy()
    result["slower_s"] = growth(found, "step_s", pairs["reference"].map(found["step_s"]))
    for name in ("exposed_wire_s", "exposed_wait_s"):
        result[name] = growth(exposed, f"seen_{name}", 0.0)
    result["load_s"] = growth(exposed, "seen_load_wait_s", pairs["reference"].map(found["load_wait_s"]))
    left = result["slower_s"] - result[["exposed_wire_s", "exposed_wait_s", "load_s"]].sum(axis=1)
    issue = growth(found, "step_launch_s", pairs["reference"].map(found["step_launch_s"]))
    bound = pairs["configuration"].map(found["host_bound"]).astype(float)  # null where it is not known
    host = issue.clip(lower=0.0, upper=left.clip(lower=0.0))
    result["host_work_s"] = host.where(bound > 0, 0.0).where(bound.notna())
    result["remainder_s"] = left - result["host_work_s"].fillna(0.0)
    return result[columns]


@dataclass(frozen=True)
class Communication:
    """What a study says about communication; every frame is empty where it measured none.

    account: see `account`. exposed: see `exposed_costs`. slowdown: see `slowdown`. buckets, placed_buckets: see
    `bucket_utilisation`, over all places and place by place (see `ceiling.KEYS`; null for a trial without a sweep).
    sweep: see `ceiling.ceilings`. fits: see `ceiling.fits`.
    """

    account: pd.DataFrame
    exposed: pd.DataFrame
    slowdown: pd.DataFrame
    buckets: pd.DataFrame
    placed_buckets: pd.DataFrame
    sweep: pd.DataFrame
    fits: pd.DataFrame


def communication(results: Results, found: pd.DataFrame, scaling: pd.DataFrame) -> Communication:
    """Everything about communication in trials of one environment; `found` and `scaling` as in `scaling.Analysis`."""
    rows = bucket_rows(results.buckets, results.steps, results.trials)
    accounts = account(rows, results.windows)
    exposed = exposed_costs(accounts.join(results.trials.set_index("trial_id")["worker_group"]), found, scaling)
    of_trials = trial_buckets(rows, results.sweep, found)
    places = ranks_of(results.trials, results.sweep)["place"]
    sweep = ceilings(results.trials, results.sweep)
    return Communication(
        accounts,
        exposed,
        slowdown(exposed, found, scaling),
        bucket_utilisation(of_trials, ["configuration"]),
        bucket_utilisation(of_trials.join(places, on="trial_id"), ["configuration", "place"]),
        sweep,
        fits(sweep),
    )


def trial_buckets(rows: pd.DataFrame, sweep: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """A row for each bucket of a trial: how near its transfer comes to the ceiling of the same ranks.

    rows: see `bucket_rows`. sweep: frame of `results.Results`. Columns: trial_id, configuration, bucket, bytes, wire_s
    (median over steps), ready_before_s (how long before the last local gradient it is ready, likewise; null without that
    stamp), in_order (NCCL: one bucket after another), ceiling_s (time of an all-reduce of that size in the trial's sweep),
    utilisation = ceiling_s / wire_s, bus_bytes_per_s = bytes / wire_s · 2(N-1)/N (NVIDIA nccl-tests, PERFORMANCE.md).
    """
    by_trial = configuration_of(found)
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
    trials["ceiling_s"] = ceiling_seconds(sweep_seconds(sweep), trials)
    wire = trials["wire_s"].where(trials["wire_s"] > 0)
    trials["utilisation"] = trials["ceiling_s"] / wire
    trials["bus_bytes_per_s"] = trials["bytes"] / wire * bus_factor(trials["world_size"])
    return trials.drop(columns="world_size")


def bucket_utilisation(of_trials: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """A row for each bucket and value of `keys`: medians over the trials of `trial_buckets`, n (how many) and trial_ids."""
    columns = [*keys, "bucket", "bytes", "in_order", *BUCKET_COLUMNS, "n", "trial_ids"]
    if of_trials.empty:
        return pd.DataFrame(columns=columns)
    grouped = of_trials.groupby([*keys, "bucket"], dropna=False)
    result = grouped[BUCKET_COLUMNS].median()
    result[["bytes", "in_order"]] = grouped[["bytes", "in_order"]].first()
    result["n"] = grouped.size()
    result["trial_ids"] = grouped["trial_id"].agg(tuple)
    return result.reset_index()[columns]


def _weak_pairs(scaling: pd.DataFrame) -> pd.DataFrame:
    """The rows of weak scaling that have fewer ranks to compare with."""
    pairs = scaling[(scaling["scaling"] == "weak") & (scaling["ideal"] > 1)]
    return pairs.astype({"configuration": int, "reference": int, "world_size": int, "reference_world_size": int})


def _named_by_most(ranks: pd.Series) -> int | None:
    """The rank that more than half of the repeats name."""
    counts = ranks.value_counts()
    return int(counts.index[0]) if len(counts) and counts.iloc[0] > len(ranks) / 2 else None
