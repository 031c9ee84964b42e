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
from typing import Literal

import pandas as pd

from analysis.ceiling import bus_factor, ceiling_seconds, ceilings, fits, ranks_of, sweep_seconds
from analysis.measures import configuration_of
from analysis.results import Results
from analysis.statistics import intervals, log_estimates
from analysis.windows import require

WINDOW = "communication"

WAIT_MATTERS_SHARE = 0.02
"""Share of a step from which the wait for one rank is reported with its name."""

_STEP = ["trial_id", "window", "rank", "step"]
_SECONDS = [
    "queueing_s", "wire_s", "wait_s", "communication_s", "hidden_s", "exposed_s", "exposed_wire_s", "exposed_wait_s",
    "first_ready_s", "last_gradient_s",
]  # fmt: skip
_OF_BUCKETS = ["wire_s", "ready_before_s", "ceiling_s", "utilisation", "bus_bytes_per_s"]
_SUMS = ["queueing_s", "communication_s", "hidden_s", "exposed_s", "wire_s", "wait_s", "exposed_wire_s"]

ACCOUNT_COLUMNS = [
    "gradient_bytes", "buckets", *_SECONDS, "waited_for_rank", "lateness_s", "caused_wait_s", "late_by_load_s", "synchronised_step_s",
    "no_sync_step_s", "seen_exposed_wire_s", "seen_exposed_wait_s", "seen_load_wait_s",
]  # fmt: skip
"""Columns of `account`, which is indexed by trial_id."""

SLOWDOWN_PARTS = ("exposed_wire_s", "exposed_wait_s", "host_work_s", "load_s", "remainder_s")
"""What a slowdown is made of; the parts that are known add up to it."""


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


def bucket_rows(buckets: pd.DataFrame, steps: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """A row for each bucket of a rank's step, in the order of trial, window, rank, step and bucket.

    buckets, steps, trials: frames of `results.Results`; rows whose trial is not in `trials` are left out. Raises ValueError
    naming a column that a frame lacks.

    Columns: those of `buckets`, world_size, in_order (NCCL), last_gradient_s, and in seconds:
    start_s, queueing_s: see the top of this file; queueing is null where buckets overlap.
    wire_s: end - start, least of all ranks. wait_s: what this rank saw on top of it.
    hidden_s, exposed_s: the parts of [start, end] before and after the rank's last local gradient. Null without it.
    exposed_wire_s, exposed_wait_s: of a bucket the wait comes first and the transfer last, so [end - wire, end] is wire.
    """
    require(buckets, (*_STEP, "bucket", "bytes", "ready_s", "end_s"), "the frame of buckets")
    require(steps, _STEP, "the frame of steps")
    require(trials, ("trial_id",), "the frame of trials")
    known = trials.set_index("trial_id").reindex(columns=["device", "world_size"])
    rows = buckets[buckets["trial_id"].isin(known.index)]
    rows = rows.sort_values([*_STEP, "bucket"], kind="stable", ignore_index=True)
    rows["world_size"] = rows["trial_id"].map(known["world_size"])
    rows["in_order"] = rows["trial_id"].map(known["device"]) == "cuda"
    stamps = steps.reindex(columns=[*_STEP, "last_gradient_s"]).dropna(subset=["last_gradient_s"])
    rows = rows.merge(stamps, on=_STEP, how="left")
    before = _latest_end_before(rows)
    rows["start_s"] = rows["ready_s"].where(~rows["in_order"], rows["ready_s"].clip(lower=before))
    rows["queueing_s"] = (rows["start_s"] - rows["ready_s"]).where(rows["in_order"])
    duration = rows["end_s"] - rows["start_s"]
    of_bucket = [rows[name] for name in ("trial_id", "window", "step", "bucket")]
    rows["wire_s"] = duration.groupby(of_bucket).transform("min")
    rows["wait_s"] = duration - rows["wire_s"]
    rows["exposed_s"] = _after(rows["start_s"], rows["end_s"], rows["last_gradient_s"])
    rows["hidden_s"] = duration - rows["exposed_s"]
    rows["exposed_wire_s"] = _after(rows["end_s"] - rows["wire_s"], rows["end_s"], rows["last_gradient_s"])
    rows["exposed_wait_s"] = (rows["exposed_s"] - rows["exposed_wire_s"]).clip(lower=0.0)
    return rows


def step_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each step of a rank, from `bucket_rows`: totals over its buckets.

    Columns: trial_id, window, rank, step, gradient_bytes, buckets (how many), first_ready_s, last_gradient_s, and
    communication_s: |union of the buckets' [start, end]|, of which hidden_s + exposed_s lie before and after the last
    local gradient, and wire_s + wait_s are transfer and wait.
    wire is the sum over buckets where they run in order, and wait too; where they overlap, it is the least union of all
    ranks, and wait the excess. exposed_wire_s: |union of the buckets' [end - wire, end]| after the last local gradient;
    exposed_wait_s: what else is exposed.
    """
    low = _uncovered_start(rows, rows["start_s"])
    wire_low = _uncovered_start(rows, rows["end_s"] - rows["wire_s"])
    new = rows["end_s"] - low
    exposed = _after(low, rows["end_s"], rows["last_gradient_s"])
    rows = rows.assign(
        communication_s=new,
        exposed_s=exposed,
        hidden_s=new - exposed,
        exposed_wire_s=_after(wire_low, rows["end_s"], rows["last_gradient_s"]),
    )
    result = (
        rows.groupby(_STEP)
        .agg(
            in_order=("in_order", "first"),
            gradient_bytes=("bytes", "sum"),
            buckets=("bucket", "count"),
            first_ready_s=("ready_s", "min"),
            last_gradient_s=("last_gradient_s", "first"),
        )
        .join(rows.groupby(_STEP)[_SUMS].sum(min_count=1))
        .reset_index()
    )
    union = result["communication_s"].groupby([result[name] for name in ("trial_id", "window", "step")])
    in_order = result["in_order"]
    result["wire_s"] = result["wire_s"].where(in_order, union.transform("min"))
    result["wait_s"] = result["wait_s"].where(in_order, result["communication_s"] - result["wire_s"])
    result["exposed_wait_s"] = (result["exposed_s"] - result["exposed_wire_s"]).clip(lower=0.0)
    return result.drop(columns="in_order")


def account(rows: pd.DataFrame, of_windows: pd.DataFrame, window: str = WINDOW) -> pd.DataFrame:
    """A row for each trial with buckets in `window`, indexed by trial_id, with `ACCOUNT_COLUMNS`.

    rows: see `bucket_rows`. of_windows: see `windows.windows`. Seconds: per rank the median over its steps, then the mean
    over ranks. first_ready_s and last_gradient_s say when in a step the first bucket and the last local gradient are
    there. synchronised_step_s and no_sync_step_s: interleaved steps with and without communication.

    waited_for_rank: the one that waits least, for it arrives last. lateness_s: how long the others wait for it, in the mean,
    at the bucket of the step where that is longest. caused_wait_s: how much longer the others' exposed wait
    is than its own, in the mean; late_by_load_s: how much longer it waits for its batch than they do. The rank has a name
    only where caused_wait_s is at least `WAIT_MATTERS_SHARE` of a step.

    seen_exposed_wire_s, seen_exposed_wait_s, seen_load_wait_s: the same on the rank whose exposed wait is longest.
    """
    per_step = step_rows(rows[rows["window"] == window])
    if per_step.empty:
        return pd.DataFrame(columns=ACCOUNT_COLUMNS, index=pd.Index([], name="trial_id"), dtype=float)
    ranks = per_step.groupby(["trial_id", "rank"])[["gradient_bytes", "buckets", *_SECONDS]].median()
    ranks["load_wait_s"] = _rank_medians(of_windows, "phases", "load_wait_s").reindex(ranks.index)
    result = ranks.drop(columns="load_wait_s").groupby(level="trial_id").mean()
    for kind in ("synchronised", "no_sync"):
        result[f"{kind}_step_s"] = _rank_medians(of_windows, kind, "step_s").groupby(level="trial_id").mean()
    late = _rank_with(ranks["wait_s"], "idxmin")
    result["lateness_s"] = _lateness(rows[rows["window"] == window], late)
    result["caused_wait_s"] = -_against_others(ranks["exposed_wait_s"], late)
    result["late_by_load_s"] = _against_others(ranks["load_wait_s"], late)
    step_s = _rank_medians(of_windows, window, "step_s").groupby(level="trial_id").mean()
    matters = result["caused_wait_s"] >= WAIT_MATTERS_SHARE * step_s
    result["waited_for_rank"] = late.get_level_values("rank").to_series(result.index).where(matters).astype("Int64")
    seen = ranks.loc[_rank_with(ranks["exposed_wait_s"].fillna(-1.0), "idxmax")].droplevel("rank")
    for name in ("exposed_wire_s", "exposed_wait_s", "load_wait_s"):
        result[f"seen_{name}"] = seen[name]
    return result[ACCOUNT_COLUMNS]


def _lateness(rows: pd.DataFrame, late: pd.MultiIndex) -> pd.Series:
    """By trial: the wait of ranks other than `late` (trial_id, rank) at the bucket where it is longest, median over steps."""
    others = rows[~pd.MultiIndex.from_frame(rows[["trial_id", "rank"]]).isin(late)]
    at_bucket = others.groupby(["trial_id", "step", "bucket"])["wait_s"].mean()
    return at_bucket.groupby(level=["trial_id", "step"]).max().groupby(level="trial_id").median()


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
        return pd.DataFrame(columns=["trial_id", "configuration", "bucket", "bytes", "in_order", *_OF_BUCKETS])
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
    columns = [*keys, "bucket", "bytes", "in_order", *_OF_BUCKETS, "n", "trial_ids"]
    if of_trials.empty:
        return pd.DataFrame(columns=columns)
    grouped = of_trials.groupby([*keys, "bucket"], dropna=False)
    result = grouped[_OF_BUCKETS].median()
    result[["bytes", "in_order"]] = grouped[["bytes", "in_order"]].first()
    result["n"] = grouped.size()
    result["trial_ids"] = grouped["trial_id"].agg(tuple)
    return result.reset_index()[columns]


def _latest_end_before(rows: pd.DataFrame) -> pd.Series:
    """The latest end of all rows before this one in the same step; NaN for the first. `rows` lie step by step."""
    step = rows.groupby(_STEP, sort=False).ngroup()
    return rows["end_s"].groupby(step).cummax().groupby(step).shift()


def _uncovered_start(rows: pd.DataFrame, start_s: pd.Series) -> pd.Series:
    """Where each [start, end] goes beyond those of its step that start before it; `end_s` where it does not.

    The intervals from there to `end_s` are disjoint, and their union is that of all.
    """
    ordered = rows[[*_STEP, "end_s"]].assign(start_s=start_s).sort_values([*_STEP, "start_s"], kind="stable")
    low = ordered["start_s"].clip(lower=_latest_end_before(ordered))
    return low.clip(upper=ordered["end_s"]).reindex(rows.index)


def _after(start_s: pd.Series, end_s: pd.Series, stamp_s: pd.Series) -> pd.Series:
    """Length of the part of [start, end] after the stamp; NaN where there is no stamp."""
    return (end_s - start_s.where(start_s > stamp_s, stamp_s)).clip(lower=0.0)


def _rank_medians(of_windows: pd.DataFrame, window: str, column: str) -> pd.Series:
    """Median over a rank's steps in a window, by trial_id and rank."""
    return of_windows[of_windows["window"] == window].set_index(["trial_id", "rank"])[column]


def _rank_with(values: pd.Series, which: Literal["idxmin", "idxmax"]) -> pd.MultiIndex:
    """(trial_id, rank) with the least or largest value, one for each trial; `values` is indexed by both."""
    return pd.MultiIndex.from_tuples(values.groupby(level="trial_id").agg(which), names=["trial_id", "rank"])


def _against_others(values: pd.Series, chosen: pd.MultiIndex) -> pd.Series:
    """The value of the chosen rank minus the mean of the others', by trial_id."""
    own = values.loc[chosen].droplevel("rank")
    others = values.drop(chosen).groupby(level="trial_id").mean()
    return own - others


def _weak_pairs(scaling: pd.DataFrame) -> pd.DataFrame:
    """The rows of weak scaling that have fewer ranks to compare with."""
    pairs = scaling[(scaling["scaling"] == "weak") & (scaling["ideal"] > 1)]
    return pairs.astype({"configuration": int, "reference": int, "world_size": int, "reference_world_size": int})


def _named_by_most(ranks: pd.Series) -> int | None:
    """The rank that more than half of the repeats name."""
    counts = ranks.value_counts()
    return int(counts.index[0]) if len(counts) and counts.iloc[0] > len(ranks) / 2 else None
