"""Reduce the steps of a trial to its measures: throughput, step time, phases and memory.

Aggregation order: over the steps of a rank first (see `reduce.windows`), then over ranks. `statistics` aggregates
repeats.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.read.reduce import LAUNCHED, LAUNCHES, TRACED_WINDOWS, WINDOW_COLUMNS, require, windows
from analysis.read.schema import PHASES

BUSY = tuple(f"{name.removesuffix('_s')}_busy_s" for name in LAUNCHED)

SYNCED = (
    "synced_host_transfer_s", "synced_host_to_device_s", "synced_forward_s", "synced_longest_load_wait_s",
    "synced_step_s",
)  # fmt: skip

MEASURES = (
    "throughput_samples_per_s", "step_s", "slowest_rank", "fastest_rank", "rank_window_ratio", *PHASES,
    "longest_load_wait_s", "phases_step_s", "host_to_device_bytes", "host_to_device_bytes_per_s", "host_transfer_s",
    *SYNCED, "instruments_ratio", "communication_ratio", *LAUNCHES, "step_launch_s", "issue_step_s", *BUSY, "busy_s",
    "busy_fraction", "previous_step_done_share", "host_bound", "peak_memory_bytes", "peak_reserved_bytes",
)  # fmt: skip

HOST_BOUND_STEP_SHARE = 0.75
"""A step is host-bound if issuing it takes longer than its kernels, and at least this share of the plain step."""

HOST_BOUND_LAUNCH_RATIO = 0.9
"""A host that needs this share of a step, plain or on an idle device, cannot run ahead of the device."""

WAITING_BUSY_SHARE = 0.95
"""If the device is busy for this share of the plain step, a launch that ends only with the device's work is a wait."""

_ENDS_TOGETHER = 0.99
"""Launch time as a share of the span on an idle device from which on both end together."""


def summarise(steps: pd.DataFrame) -> dict[str, float | int | bool | None]:
    """Return the measures of one trial by the names in `MEASURES`; None if not measured.

    steps: rows of one trial, in the layout of steps.parquet. Raises ValueError naming missing columns.

    throughput_samples_per_s: samples of all ranks in the plain window / wall time of the slowest rank.
    step_s: plain wall time of the slowest rank / its steps.
    rank_window_ratio: plain wall time of the slowest / fastest rank.
    Phases and phases_step_s: per rank the median over the steps of the phases window (the wait for a batch: the mean,
    see `reduce.windows`), then the mean over ranks. The parts add up to the step as closely as medians do.
    host_to_device_bytes, host_to_device_bytes_per_s: per step; the latter is bytes / seconds. Aggregated like phases.
    host_transfer_s: how long the call that copies the batch blocks the host. Aggregated like phases.
    longest_load_wait_s: mean wait for a batch of the rank that waits longest in a step, which may be another in each.
    synced_*: host to device, forward, longest wait and step, with a host that waits for every copy.
    instruments_ratio: wall time per step with / without instruments (slowest rank each); 1.01 is an overhead of 1 %.
    communication_ratio: the same for the window with DDP's communication hook; None without that window.
    *_launch_s, issue_step_s: on an idle device, host time to issue a phase or the step, and the step's span between
    device events.
    *_busy_s: device time of a phase whose kernels run back to back, without communication. It is an upper bound,
    because it includes gaps of about 1 us between kernels.
    busy_s: their sum. Aggregated like phases. Of sharded strategies, which communicate in every phase, of scripts, and
    if a phase launches more kernels than the device can queue: the time with computation in traced steps, and phases
    are unknown.
    busy_fraction: (busy_s + host_to_device_s) / step_s, the share of a plain step with kernels or the batch's copy on
    the device. The rest is waiting for the host, a batch, or gradients (exposed communication is not included).
    previous_step_done_share: share of steps, without synchronisation, at whose end the previous step had left the
    device.
    host_bound: True if issuing a step takes longer than its kernels on the device, and at least 0.75 of the plain step.
    Otherwise something else takes the time, such as a slow all-reduce. False if launching ends only with the device's
    work while the device is busy for 0.95 of the plain step: the host then waits for it, as with Horovod. If kernel
    time is unknown: True if issuing takes at least 0.75 of the plain step and 0.9 of it or of the span on an idle
    device, and most previous steps had ended.
    None if neither was measured.
    peak_memory_bytes, peak_reserved_bytes: allocated, and reserved by the allocator; maximum over ranks.
    """
    row = _measure(windows(steps.assign(trial_id=""))).iloc[0] if len(steps) else pd.Series(dtype=object)
    return {name: _plain_value(row.get(name)) for name in MEASURES}


def summaries(trials: pd.DataFrame, window_rows: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `trials` and the measures of each done trial (see `summarise`); NaN or None if unknown.

    window_rows: see `reduce.windows`. Raises ValueError naming a missing column.
    """
    require(trials, ("trial_id", "status"), "the frame of trials")
    done = trials[trials["status"] == "done"]
    measured = (
        _measure(window_rows[window_rows["trial_id"].isin(done["trial_id"])])
        if len(window_rows)
        else pd.DataFrame(columns=list(MEASURES))
    )
    return done.join(measured.reindex(done["trial_id"]).set_axis(done.index)).reset_index(drop=True)


def cost_of_waiting_s(rows: pd.DataFrame) -> pd.Series:
    """Return by how much a step takes longer if the host waits for every copy, without the waits for a batch.

    Those differ between the two windows, because loaders deliver in bursts. rows: with `MEASURES`.
    """
    longer_s = rows["synced_step_s"].astype(float) - rows["phases_step_s"].astype(float)
    load_s = rows[["synced_longest_load_wait_s", "longest_load_wait_s"]].astype(float).fillna(0.0)
    return longer_s - load_s["synced_longest_load_wait_s"] + load_s["longest_load_wait_s"]


def configuration_of(configurations: pd.DataFrame) -> pd.Series:
    """Return the index of each trial's configuration, by trial_id. See `configurations.configurations`."""
    trial_ids = configurations["trial_ids"].explode().dropna()
    return pd.Series(trial_ids.index.to_numpy(), index=trial_ids.to_numpy(), dtype="int64")


def _plain_value(value: Any) -> float | int | bool | None:
    if value is None or (not isinstance(value, bool) and pd.isna(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _measure(window_rows: pd.DataFrame) -> pd.DataFrame:
    """Return `MEASURES` of every trial in the frame of windows, indexed by trial_id."""
    require(window_rows, WINDOW_COLUMNS, "the frame of windows")
    rows = window_rows.assign(window_per_step_s=window_rows["window_s"] / window_rows["steps"])
    by_window = {name: part.set_index(["trial_id", "rank"]) for name, part in rows.groupby("window")}
    empty = rows.iloc[:0].set_index(["trial_id", "rank"])
    plain, phases = (by_window.get(name, empty) for name in ("plain", "phases"))
    result = pd.DataFrame(index=pd.Index(rows["trial_id"].unique(), name="trial_id"))

    by_trial = plain.groupby(level="trial_id")
    # The slowest rank is unknown if the time of any rank is.
    complete = ~plain["window_s"].isna().groupby(level="trial_id").any()
    window_s = by_trial["window_s"].max().where(complete)
    result["throughput_samples_per_s"] = by_trial["samples"].sum(min_count=1) / window_s
    result["step_s"] = by_trial["window_per_step_s"].max().where(complete)
    ranks_by_time = (
        plain.dropna(subset="window_s").reset_index().sort_values("window_s", kind="stable").groupby("trial_id")["rank"]
    )
    result["slowest_rank"] = ranks_by_time.last().where(complete)
    result["fastest_rank"] = ranks_by_time.first().where(complete)
    result["rank_window_ratio"] = window_s / by_trial["window_s"].min()

    def over_ranks(window: str, columns: Sequence[str]) -> pd.DataFrame:
        """Return the mean over ranks, indexed by trial_id."""
        return by_window.get(window, empty)[list(columns)].astype(float).groupby(level="trial_id").mean()

    columns = [*PHASES, "longest_load_wait_s", "host_transfer_s", "host_to_device_bytes", "host_to_device_bytes_per_s"]
    result[columns] = over_ranks("phases", columns)
    result["phases_step_s"] = over_ranks("phases", ["step_s"])["step_s"]
    synced = [name.removeprefix("synced_") for name in SYNCED]
    result[list(SYNCED)] = over_ranks("transfer_synced", synced)[synced]
    for name, window in (("instruments_ratio", "phases"), ("communication_ratio", "communication")):
        longest_s = by_window.get(window, empty)["window_per_step_s"].groupby(level="trial_id").max()
        result[name] = longest_s / result["step_s"]

    launches = over_ranks("issue", [*LAUNCHES, "step_launch_s", "step_s", "launch_ratio"])
    result[[*LAUNCHES, "step_launch_s"]] = launches[[*LAUNCHES, "step_launch_s"]]
    result["issue_step_s"] = launches["step_s"]
    busy = over_ranks("busy", LAUNCHED)[list(LAUNCHED)]
    traced = [over_ranks(name, ["kernels_s"])["kernels_s"].reindex(result.index) for name in TRACED_WINDOWS]
    traced_s = functools.reduce(pd.Series.fillna, traced)
    busy = busy.reindex(result.index).mask(traced_s.notna())
    result[list(BUSY)] = busy
    result["busy_s"] = traced_s.fillna(total_busy_s(busy, result))
    result["busy_fraction"] = (result["busy_s"] + result["host_to_device_s"].fillna(0.0)) / result["step_s"]
    previous = phases.groupby(level="trial_id")[["previous_steps_done", "previous_steps_seen"]].sum()
    observed = previous["previous_steps_seen"]
    result["previous_step_done_share"] = previous["previous_steps_done"] / observed.where(observed > 0)
    result["host_bound"] = _host_bound(result, launches["launch_ratio"].reindex(result.index))
    peaks = ["peak_memory_bytes", "peak_reserved_bytes"]
    result[peaks] = rows.groupby("trial_id")[peaks].max()
    return result[list(MEASURES)]


def total_busy_s(busy: pd.DataFrame, phases: pd.DataFrame) -> pd.Series:
    """Return the sum of the busy times of all phases that a step has. NaN if one of them is unknown.

    busy, phases: columns `LAUNCHED` of the window of that name, with one index. A step has no loss, or no function
    after the backward pass, if the phases do not have it either.
    """
    known = busy[list(LAUNCHED)].astype(float)
    for name in ("loss_s", "after_backward_s"):
        has_no_such_phase = phases[name].isna() & phases["forward_s"].notna()
        known[name] = known[name].mask(has_no_such_phase, 0.0)
    return known.sum(axis=1, min_count=len(LAUNCHED))


def _host_bound(measures: pd.DataFrame, launch_ratio: pd.Series) -> pd.Series:
    """Return True if a trial is host-bound, None if unknown; see `summarise`."""
    issue_s, busy_s, step_s = (measures[name] for name in ("step_launch_s", "busy_s", "step_s"))
    done_share = measures["previous_step_done_share"]
    is_compared = issue_s.notna() & busy_s.notna() & step_s.notna()
    slower = (issue_s > busy_s) & (issue_s >= HOST_BOUND_STEP_SHARE * step_s)
    slower &= ~((launch_ratio >= _ENDS_TOGETHER) & (measures["busy_fraction"] >= WAITING_BUSY_SHARE))
    is_long = ~(issue_s < HOST_BOUND_STEP_SHARE * step_s)
    share = pd.concat([launch_ratio, issue_s / step_s], axis=1).max(axis=1)
    by_ratio = (share >= HOST_BOUND_LAUNCH_RATIO) & (done_share > 0.5) & is_long
    is_known = is_compared | (done_share.notna() & launch_ratio.notna())
    return slower.where(is_compared, by_ratio).astype(object).where(is_known, None)
