"""Reduce gradient buckets to communication times per rank, step and trial."""

from typing import Literal

import pandas as pd

from analysis.read.reduce import require

WINDOW = "communication"


WAIT_MATTERS_SHARE = 0.02
"""The slowest rank is reported if the wait for it exceeds this share of a step."""


_STEP = ["trial_id", "window", "rank", "step"]


_SECONDS = [
    "queueing_s", "wire_s", "wait_s", "communication_s", "hidden_s", "exposed_s", "exposed_wire_s", "exposed_wait_s",
    "first_ready_s", "last_gradient_s",
]  # fmt: skip


BUCKET_COLUMNS = ["wire_s", "ready_before_s", "ceiling_s", "utilisation", "bus_bytes_per_s"]


_SUMS = ["queueing_s", "communication_s", "hidden_s", "exposed_s", "wire_s", "wait_s", "exposed_wire_s"]


BREAKDOWN_COLUMNS = [
    "gradient_bytes", "buckets", *_SECONDS, "waited_for_rank", "lateness_s", "caused_wait_s", "late_by_load_s",
    "synchronised_step_s", "no_sync_step_s", "seen_exposed_wire_s", "seen_exposed_wait_s", "seen_load_wait_s",
]  # fmt: skip
"""Columns of `communication_breakdown`, which is indexed by trial_id."""


def bucket_rows(buckets: pd.DataFrame, steps: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row per bucket of a rank's step, ordered by trial, window, rank, step and bucket.

    buckets, steps, trials: frames of `results.Results`; rows of trials not in `trials` are omitted. Raises ValueError
    naming a missing column.

    Columns: those of `buckets`, world_size, in_order (NCCL), last_gradient_s, and in seconds:
    start_s, queueing_s: see `compare.communication`; queueing is null if buckets overlap.
    wire_s: end - start, minimum over ranks.
    wait_s: the excess on this rank.
    hidden_s, exposed_s: parts of [start, end] before and after the rank's last local gradient. Null without that stamp.
    exposed_wire_s, exposed_wait_s: parts of exposed_s. A bucket first waits, then transfers, so wire is [end - wire,
    end].
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
    previous_end_s = _latest_end_before(rows)
    rows["start_s"] = rows["ready_s"].where(~rows["in_order"], rows["ready_s"].clip(lower=previous_end_s))
    rows["queueing_s"] = (rows["start_s"] - rows["ready_s"]).where(rows["in_order"])
    duration = rows["end_s"] - rows["start_s"]
    bucket_keys = [rows[name] for name in ("trial_id", "window", "step", "bucket")]
    rows["wire_s"] = duration.groupby(bucket_keys).transform("min")
    rows["wait_s"] = duration - rows["wire_s"]
    rows["exposed_s"] = _after(rows["start_s"], rows["end_s"], rows["last_gradient_s"])
    rows["hidden_s"] = duration - rows["exposed_s"]
    rows["exposed_wire_s"] = _after(rows["end_s"] - rows["wire_s"], rows["end_s"], rows["last_gradient_s"])
    rows["exposed_wait_s"] = (rows["exposed_s"] - rows["exposed_wire_s"]).clip(lower=0.0)
    return rows


def step_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return totals over buckets from `bucket_rows`, one row per step of a rank.

    Columns: trial_id, window, rank, step, gradient_bytes, buckets (count), first_ready_s, last_gradient_s;
    communication_s: |union of the buckets' [start, end]| = hidden_s + exposed_s (before and after the last local
    gradient) = wire_s + wait_s (transfer and wait). If buckets run in order, wire_s and wait_s are sums over buckets.
    If they overlap, wire_s is the smallest union over ranks, and wait_s the excess.
    exposed_wire_s: |union of the buckets' [end - wire, end]| after the last local gradient; exposed_wait_s: the rest of
    exposed_s.
    """
    uncovered_start_s = _uncovered_start(rows, rows["start_s"])
    wire_start_s = _uncovered_start(rows, rows["end_s"] - rows["wire_s"])
    added_s = rows["end_s"] - uncovered_start_s
    exposed = _after(uncovered_start_s, rows["end_s"], rows["last_gradient_s"])
    rows = rows.assign(
        communication_s=added_s,
        exposed_s=exposed,
        hidden_s=added_s - exposed,
        exposed_wire_s=_after(wire_start_s, rows["end_s"], rows["last_gradient_s"]),
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


def communication_breakdown(rows: pd.DataFrame, window_rows: pd.DataFrame, window: str = WINDOW) -> pd.DataFrame:
    """Return `BREAKDOWN_COLUMNS` per trial with buckets in `window`, indexed by trial_id.

    rows: see `bucket_rows`. window_rows: see `reduce.windows`. Seconds are the median over steps per rank, then the
    mean over ranks. first_ready_s, last_gradient_s: times in the step of the first bucket and of the last local
    gradient. synchronised_step_s, no_sync_step_s: interleaved steps with and without communication.

    waited_for_rank: the rank that waits least, because it arrives last. lateness_s: the others' mean wait for it, at
    the bucket of the step with the longest wait. caused_wait_s: excess of the others' mean exposed wait over its own.
    late_by_load_s: excess of its wait for a batch over theirs. The rank is only reported if caused_wait_s is at least
    `WAIT_MATTERS_SHARE` of a step.

    seen_exposed_wire_s, seen_exposed_wait_s, seen_load_wait_s: values on the rank with the longest exposed wait.
    """
    per_step = step_rows(rows[rows["window"] == window])
    if per_step.empty:
        return pd.DataFrame(columns=BREAKDOWN_COLUMNS, index=pd.Index([], name="trial_id"), dtype=float)
    ranks = per_step.groupby(["trial_id", "rank"])[["gradient_bytes", "buckets", *_SECONDS]].median()
    ranks["load_wait_s"] = _rank_medians(window_rows, "phases", "load_wait_s").reindex(ranks.index)
    result = ranks.drop(columns="load_wait_s").groupby(level="trial_id").mean()
    for kind in ("synchronised", "no_sync"):
        result[f"{kind}_step_s"] = _rank_medians(window_rows, kind, "step_s").groupby(level="trial_id").mean()
    late = _rank_with(ranks["wait_s"], "idxmin")
    result["lateness_s"] = _lateness(rows[rows["window"] == window], late)
    result["caused_wait_s"] = -_against_others(ranks["exposed_wait_s"], late)
    result["late_by_load_s"] = _against_others(ranks["load_wait_s"], late)
    step_s = _rank_medians(window_rows, window, "step_s").groupby(level="trial_id").mean()
    is_relevant = result["caused_wait_s"] >= WAIT_MATTERS_SHARE * step_s
    result["waited_for_rank"] = late.get_level_values("rank").to_series(result.index).where(is_relevant).astype("Int64")
    longest_wait = ranks.loc[_rank_with(ranks["exposed_wait_s"].fillna(-1.0), "idxmax")].droplevel("rank")
    for name in ("exposed_wire_s", "exposed_wait_s", "load_wait_s"):
        result[f"seen_{name}"] = longest_wait[name]
    return result[BREAKDOWN_COLUMNS]


def _lateness(rows: pd.DataFrame, late: pd.MultiIndex) -> pd.Series:
    """Return, per trial, the mean wait of all ranks except `late` at the bucket where it is longest.

    late: (trial_id, rank). Median over steps.
    """
    others = rows[~pd.MultiIndex.from_frame(rows[["trial_id", "rank"]]).isin(late)]
    at_bucket = others.groupby(["trial_id", "step", "bucket"])["wait_s"].mean()
    return at_bucket.groupby(level=["trial_id", "step"]).max().groupby(level="trial_id").median()


def _latest_end_before(rows: pd.DataFrame) -> pd.Series:
    """Return the latest end of all previous rows of the same step; NaN for the first.

    The rows of a step must be contiguous.
    """
    step = rows.groupby(_STEP, sort=False).ngroup()
    return rows["end_s"].groupby(step).cummax().groupby(step).shift()


def _uncovered_start(rows: pd.DataFrame, start_s: pd.Series) -> pd.Series:
    """Return where each [start, end] extends beyond those of its step that start earlier; else `end_s`.

    The intervals from there to `end_s` are disjoint, and their union is that of all.
    """
    ordered = rows[[*_STEP, "end_s"]].assign(start_s=start_s).sort_values([*_STEP, "start_s"], kind="stable")
    uncovered_start_s = ordered["start_s"].clip(lower=_latest_end_before(ordered))
    return uncovered_start_s.clip(upper=ordered["end_s"]).reindex(rows.index)


def _after(start_s: pd.Series, end_s: pd.Series, stamp_s: pd.Series) -> pd.Series:
    """Return the length of the part of [start, end] after the stamp; NaN without a stamp."""
    return (end_s - start_s.where(start_s > stamp_s, stamp_s)).clip(lower=0.0)


def _rank_medians(window_rows: pd.DataFrame, window: str, column: str) -> pd.Series:
    """Return the median over a rank's steps in a window, by trial_id and rank."""
    return window_rows[window_rows["window"] == window].set_index(["trial_id", "rank"])[column]


def _rank_with(values: pd.Series, which: Literal["idxmin", "idxmax"]) -> pd.MultiIndex:
    """Return (trial_id, rank) of the smallest or largest value per trial; `values` is indexed by both."""
    return pd.MultiIndex.from_tuples(values.groupby(level="trial_id").agg(which), names=["trial_id", "rank"])


def _against_others(values: pd.Series, chosen: pd.MultiIndex) -> pd.Series:
    """Return the value of the chosen rank minus the mean of the others', by trial_id."""
    chosen_values = values.loc[chosen].droplevel("rank")
    others = values.drop(chosen).groupby(level="trial_id").mean()
    return chosen_values - others
