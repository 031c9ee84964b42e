"""Reduce gradient buckets to communication times per rank, step and trial."""

from typing import Literal

import pandas as pd

from analysis.load.reduce import require

WINDOW = "communication"


WAIT_MATTERS_SHARE = 0.02
"""Share of a step from which the wait for one rank is reported with its name."""


_STEP = ["trial_id", "window", "rank", "step"]


_SECONDS = [
    "queueing_s", "wire_s", "wait_s", "communication_s", "hidden_s", "exposed_s", "exposed_wire_s", "exposed_wait_s",
    "first_ready_s", "last_gradient_s",
]  # fmt: skip


BUCKET_COLUMNS = ["wire_s", "ready_before_s", "ceiling_s", "utilisation", "bus_bytes_per_s"]


_SUMS = ["queueing_s", "communication_s", "hidden_s", "exposed_s", "wire_s", "wait_s", "exposed_wire_s"]


ACCOUNT_COLUMNS = [
    "gradient_bytes", "buckets", *_SECONDS, "waited_for_rank", "lateness_s", "caused_wait_s", "late_by_load_s", "synchronised_step_s",
    "no_sync_step_s", "seen_exposed_wire_s", "seen_exposed_wait_s", "seen_load_wait_s",
]  # fmt: skip
"""Columns of `account`, which is indexed by trial_id."""


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
