"""Reduce gradient buckets to communication times per rank, step and trial."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.measure.measures import total_busy_s
from analysis.read.reduce import LAUNCHED, require

WINDOW = "communication"


WAIT_MATTERS_SHARE = 0.02
"""The slowest rank is reported if its lateness exceeds this share of a step."""


_STEP = ["trial_id", "window", "rank", "step"]


_CAUGHT_UP = 0.5
"""Hidden lateness / lateness from which a report tells both."""

BUCKET_COLUMNS = ["wire_s", "ready_before_s", "ceiling_s", "utilisation", "bus_bytes_per_s"]


_SUMS = ["queueing_s", "communication_s", "hidden_s", "exposed_s", "wire_s", "wait_s", "exposed_wire_s"]


_OF_WAITING_RANKS = [
    "gradient_bytes", "buckets", "queueing_s", "wire_s", "communication_s", "first_ready_s", "last_gradient_s",
]  # fmt: skip


BREAKDOWN_COLUMNS = [
    *_OF_WAITING_RANKS, "wait_s", "hidden_s", "exposed_s", "exposed_wire_s", "exposed_queueing_s", "exposed_wait_s",
    "waited_for_rank", "lateness_s", "hidden_lateness_s", "late_by_load_s", "communication_step_s",
    "synchronised_step_s", "no_sync_step_s", "kernel_s", "traced",
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
    exposed_s. exposed_queueing_s: the part of exposed_s before the last bucket starts; null if buckets overlap.
    """
    uncovered_start_s = _uncovered_start(rows, rows["start_s"])
    wire_start_s = _uncovered_start(rows, rows["end_s"] - rows["wire_s"])
    added_s = rows["end_s"] - uncovered_start_s
    exposed = _after(uncovered_start_s, rows["end_s"], rows["last_gradient_s"])
    is_last_bucket = rows["bucket"] == rows.groupby(_STEP)["bucket"].transform("max")
    rows = rows.assign(
        communication_s=added_s,
        exposed_s=exposed,
        hidden_s=added_s - exposed,
        exposed_wire_s=_after(wire_start_s, rows["end_s"], rows["last_gradient_s"]),
        exposed_queueing_s=exposed.where(~is_last_bucket, 0.0).where(rows["in_order"]),
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
        .join(rows.groupby(_STEP)[[*_SUMS, "exposed_queueing_s"]].sum(min_count=1))
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

    rows: see `bucket_rows`. window_rows: see `reduce.windows`.

    All ranks leave the last all-reduce together, so the last rank to arrive in a step has the shortest exposed time.
    Values are those of the ranks that wait for it: the median over all ranks but the last to arrive, then the median
    over steps. communication_s: all-reduces = wire_s + wait_s = hidden_s + exposed_s. first_ready_s, last_gradient_s:
    times in the step of the first bucket and of the last local gradient.

    exposed_wire_s: exposed time of the last rank to arrive, which waits for nobody. exposed_queueing_s: its part before
    the last bucket starts, because earlier ones still occupy the link; null if buckets overlap. exposed_wait_s: how
    much later the last rank has its last gradient than the median of the others, that is, the excess of their exposed
    time over its own. exposed_s: the sum of both.

    communication_step_s: step in this window. synchronised_step_s, no_sync_step_s: interleaved steps with and without
    communication. kernel_s: kernel time of a step without communication; null on CPU ranks. Each is the median over
    the steps of a rank, then the median over all ranks but the usual last one. traced: 0, see `traced_breakdown`.

    waited_for_rank: the rank that usually arrives last. lateness_s: how much less exposed time it has than the median
    of the others. late_by_load_s: excess of its wait for a batch over theirs. The rank is only reported if lateness_s
    is at least `WAIT_MATTERS_SHARE` of a step. hidden_lateness_s: how much later than that it is at its latest bucket.
    The others lose this lead while they wait, for kernels of NCCL that wait occupy multiprocessors (two H200, a rank
    20 ms late: 21 ms at the first bucket, 5 ms at the last gradient, `benchmarks/results/doors-2gpu`).
    """
    rows = rows[rows["window"] == window]
    if rows.empty:
        empty = pd.DataFrame(columns=BREAKDOWN_COLUMNS, index=pd.Index([], name="trial_id"), dtype=float)
        return empty.astype({"waited_for_rank": "Int64"})
    per_step = step_rows(rows)
    step = ["trial_id", "step"]
    order = per_step.groupby(step)["exposed_s"].rank(method="first", na_option="bottom")
    last, waiting = per_step[order == 1].set_index(step), per_step[order > 1].groupby(step)
    steps = waiting[_OF_WAITING_RANKS].median()
    steps["exposed_wire_s"], steps["exposed_queueing_s"] = last["exposed_s"], last["exposed_queueing_s"]
    steps["exposed_wait_s"] = waiting["exposed_s"].median() - last["exposed_s"]
    result = steps.groupby(level="trial_id").median()
    result["exposed_s"] = result["exposed_wire_s"] + result["exposed_wait_s"]
    result["communication_s"] = result[["communication_s", "exposed_s"]].max(axis=1)
    result["hidden_s"] = result["communication_s"] - result["exposed_s"]
    result["wait_s"] = (result["communication_s"] - result["wire_s"]).clip(lower=0.0)

    exposed = per_step.groupby(["trial_id", "rank"])["exposed_s"].median()
    usual_last = least(exposed.fillna(np.inf))

    def of_waiting(window_name: str, columns: Sequence[str]) -> pd.Series:
        """Return the median over all ranks but the usual last one of the sum of these columns, by trial_id."""
        return others(rank_medians(window_rows, window_name, columns), usual_last)

    result["traced"] = 0.0
    result["communication_step_s"] = of_waiting(window, ["step_s"])
    result["synchronised_step_s"] = of_waiting("synchronised", ["step_s"])
    result["no_sync_step_s"] = of_waiting("no_sync", ["step_s"])
    busy, phases = (of_ranks(window_rows, name, LAUNCHED) for name in ("busy", "phases"))
    result["kernel_s"] = others(total_busy_s(busy, phases.reindex(busy.index)), usual_last)
    result["lateness_s"] = others(exposed, usual_last) - exposed.loc[usual_last].droplevel("rank")
    at_latest_s = largest_excess(rows, usual_last, ["bucket"], "ready_s")
    result["hidden_lateness_s"] = (at_latest_s - result["lateness_s"]).clip(lower=0.0)
    load_wait_s = rank_medians(window_rows, "phases", ["load_wait_s"]).reindex(exposed.index)
    result["late_by_load_s"] = load_wait_s.loc[usual_last].droplevel("rank") - others(load_wait_s, usual_last)
    is_relevant = result["lateness_s"] >= WAIT_MATTERS_SHARE * result["communication_step_s"]
    ranks = usual_last.get_level_values("rank").to_series(result.index)
    result["waited_for_rank"] = ranks.where(is_relevant).astype("Int64")
    return result[BREAKDOWN_COLUMNS]


def catches_up(row: pd.Series) -> bool:
    """Return True if the usual last rank is much later at a bucket than at its last gradient. row: of a breakdown."""
    return pd.notna(row["hidden_lateness_s"]) and bool(row["hidden_lateness_s"] >= _CAUGHT_UP * row["lateness_s"])


def most_late_s(row: pd.Series) -> float:
    """Return how late the usual last rank is at its latest bucket, in seconds; NaN if unknown."""
    return float(row["lateness_s"] + row["hidden_lateness_s"])


def largest_excess(rows: pd.DataFrame, late: pd.MultiIndex, keys: Sequence[str], column: str) -> pd.Series:
    """Return by how much `column` of the ranks `late` exceeds the median of the others, where this is most, by trial.

    keys: columns that identify a bucket or collective of a step. Its excess is the median over steps.
    """
    call = ["trial_id", *keys, "step"]
    is_late = pd.MultiIndex.from_frame(rows[["trial_id", "rank"]]).isin(late)
    of_late, of_others = (rows[chosen].groupby(call, dropna=False)[column].median() for chosen in (is_late, ~is_late))
    excess = (of_late - of_others).groupby(level=call[:-1], dropna=False).median()
    return excess.groupby(level="trial_id").max()


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


def rank_medians(window_rows: pd.DataFrame, window: str, columns: Sequence[str]) -> pd.Series:
    """Return the sum of the medians of these columns over a rank's steps in a window, by trial_id and rank."""
    return of_ranks(window_rows, window, columns).sum(axis=1, min_count=len(columns))


def of_ranks(window_rows: pd.DataFrame, window: str, columns: Sequence[str]) -> pd.DataFrame:
    """Return the medians of these columns over a rank's steps in a window, by trial_id and rank."""
    rows = window_rows[window_rows["window"] == window].set_index(["trial_id", "rank"])
    return rows[list(columns)].astype(float)


def least(values: pd.Series) -> pd.MultiIndex:
    """Return (trial_id, rank) of the smallest value per trial; `values` is indexed by both."""
    return pd.MultiIndex.from_tuples(values.groupby(level="trial_id").idxmin(), names=["trial_id", "rank"])


def others(values: pd.Series, excluded: pd.MultiIndex) -> pd.Series:
    """Return the median over all ranks except `excluded`, by trial_id; `values` is indexed by trial_id and rank."""
    return values[~values.index.isin(excluded)].groupby(level="trial_id").median()
