"""From the steps of a trial to its measures: one number each for throughput, step time, phases and memory.

Order of aggregation: medians over the steps of a rank first, ranks afterwards; repeats are left to `statistics`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.reduce import LAUNCHED, LAUNCHES, WINDOW_COLUMNS, require, windows
from analysis.load.schema import PHASES

BUSY = tuple(f"{name.removesuffix('_s')}_busy_s" for name in LAUNCHED)

SYNCED = ("synced_host_transfer_s", "synced_host_to_device_s", "synced_forward_s", "synced_step_s")

MEASURES = (
    "throughput_samples_per_s", "step_s", "slowest_rank", "fastest_rank", "rank_window_ratio", *PHASES, "phases_step_s",
    "host_to_device_bytes", "host_to_device_bytes_per_s", "host_transfer_s", *SYNCED, "instruments_ratio",
    "communication_ratio", *LAUNCHES, "step_launch_s", "issue_step_s", *BUSY, "busy_s", "busy_fraction",
    "previous_step_done_share", "host_bound", "peak_memory_bytes", "peak_reserved_bytes",
)  # fmt: skip

HOST_BOUND_STEP_SHARE = 0.75
"""A host that needs longer to issue a step than the device for its kernels, and this share of the plain step, bounds it."""

HOST_BOUND_LAUNCH_RATIO = 0.9
"""On an idle device a host that needs this share of the step's span to issue it cannot run ahead of the device."""


def summarise(steps: pd.DataFrame) -> dict[str, float | int | bool | None]:
    """The measures of one trial, by the names in `MEASURES`; what was not measured is None.

    steps: rows of one trial, in the layout of steps.parquet. Raises ValueError naming missing columns.

    throughput_samples_per_s: samples of all ranks in the plain window / the slowest rank's wall time for it.
    step_s: the slowest rank's plain wall time / its steps. rank_window_ratio: slowest / fastest rank's plain wall time.
    Phases and phases_step_s: per rank the median over the steps of the phases window, then the mean over ranks, so
    that the parts add up to the step as nearly as medians do.
    host_to_device_bytes, host_to_device_bytes_per_s: of one step, the latter bytes / seconds; aggregated like phases.
    host_transfer_s: for how long the call that copies the batch keeps the host; aggregated like phases.
    synced_*: the same, host to device, forward and the step where the host waits for every copy.
    instruments_ratio: wall time a step with instruments / without (slowest rank each); 1.01 means they cost 1 %.
    communication_ratio: the same for the window with DDP's communication hook, null where there is none.
    *_launch_s, issue_step_s: on an idle device, host time to issue a phase or the step, and the step's span between
    device events.
    *_busy_s: device time of a phase whose kernels run back to back, without communication; an upper bound of what they
    need, for the gaps of about 1 us between kernels are in it. busy_s: their sum. Aggregated like phases.
    busy_fraction: (busy_s + host_to_device_s) / step_s, the share of a plain step for which the device has kernels or the
    batch's copy to run. What is left is waiting: for the host, a batch, or gradients (exposed communication is no part of it).
    previous_step_done_share: steps in free running at whose end the previous step had already left the device.
    host_bound: True where the host needs longer to issue a step than the device for its kernels, and for at least 0.75 of
    the plain step: else something other than either takes the step's time, a slow all-reduce say. Where kernel-busy time
    is not known: where issuing takes at least 0.9 of the span on an idle device and 0.75 of the plain step, and most
    previous steps had ended in free running. None where neither was measured.
    peak_memory_bytes, peak_reserved_bytes: allocated, and held by the allocator; maximum over ranks.
    """
    row = _measure(windows(steps.assign(trial_id=""))).iloc[0] if len(steps) else pd.Series(dtype=object)
    return {name: _plain_value(row.get(name)) for name in MEASURES}


def summaries(trials: pd.DataFrame, of_windows: pd.DataFrame) -> pd.DataFrame:
    """A row for each done trial: the columns of `trials` and its measures (see `summarise`), NaN or None where unknown.

    of_windows: see `windows.windows`. Raises ValueError naming a column that a frame lacks.
    """
    require(trials, ("trial_id", "status"), "the frame of trials")
    done = trials[trials["status"] == "done"]
    measured = (
        _measure(of_windows[of_windows["trial_id"].isin(done["trial_id"])])
        if len(of_windows)
        else pd.DataFrame(columns=list(MEASURES))
    )
    return done.join(measured.reindex(done["trial_id"]).set_axis(done.index)).reset_index(drop=True)


def configuration_of(found: pd.DataFrame) -> pd.Series:
    """Index of each trial's configuration (see `scaling.configurations`), by trial_id."""
    member = found["trial_ids"].explode().dropna()
    return pd.Series(member.index.to_numpy(), index=member.to_numpy(), dtype="int64")


def _plain_value(value: Any) -> float | int | bool | None:
    if value is None or (not isinstance(value, bool) and pd.isna(value)):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _measure(of_windows: pd.DataFrame) -> pd.DataFrame:
    """`MEASURES` for every trial in the frame of windows, indexed by trial_id."""
    require(of_windows, WINDOW_COLUMNS, "the frame of windows")
    rows = of_windows.assign(window_per_step_s=of_windows["window_s"] / of_windows["steps"])
    by_window = {name: part.set_index(["trial_id", "rank"]) for name, part in rows.groupby("window")}
    nothing = rows.iloc[:0].set_index(["trial_id", "rank"])
    plain, phases = (by_window.get(name, nothing) for name in ("plain", "phases"))
    result = pd.DataFrame(index=pd.Index(rows["trial_id"].unique(), name="trial_id"))

    by_trial = plain.groupby(level="trial_id")
    complete = ~plain["window_s"].isna().groupby(level="trial_id").any()  # one rank's time unknown: so is the slowest
    window_s = by_trial["window_s"].max().where(complete)
    result["throughput_samples_per_s"] = by_trial["samples"].sum() / window_s
    result["step_s"] = by_trial["window_per_step_s"].max().where(complete)
    ranks = (
        plain.dropna(subset="window_s").reset_index().sort_values("window_s", kind="stable").groupby("trial_id")["rank"]
    )
    result["slowest_rank"] = ranks.last().where(complete)
    result["fastest_rank"] = ranks.first().where(complete)
    result["rank_window_ratio"] = window_s / by_trial["window_s"].min()

    def over_ranks(window: str, columns: Sequence[str]) -> pd.DataFrame:
        """Means over the ranks' medians, indexed by trial_id."""
        return by_window.get(window, nothing)[list(columns)].astype(float).groupby(level="trial_id").mean()

    columns = [*PHASES, "host_transfer_s", "host_to_device_bytes", "host_to_device_bytes_per_s"]
    result[columns] = over_ranks("phases", columns)
    result["phases_step_s"] = over_ranks("phases", ["step_s"])["step_s"]
    synced = [name.removeprefix("synced_") for name in SYNCED]
    result[list(SYNCED)] = over_ranks("transfer_synced", synced)[synced]
    for name, window in (("instruments_ratio", "phases"), ("communication_ratio", "communication")):
        longest_s = by_window.get(window, nothing)["window_per_step_s"].groupby(level="trial_id").max()
        result[name] = longest_s / result["step_s"]

    launches = over_ranks("issue", [*LAUNCHES, "step_launch_s", "step_s", "launch_ratio"])
    result[[*LAUNCHES, "step_launch_s"]] = launches[[*LAUNCHES, "step_launch_s"]]
    result["issue_step_s"] = launches["step_s"]
    result[list(BUSY)] = over_ranks("busy", LAUNCHED)[list(LAUNCHED)]
    result["busy_s"] = result[list(BUSY)].sum(axis=1, min_count=len(BUSY))
    result["busy_fraction"] = (result["busy_s"] + result["host_to_device_s"].fillna(0.0)) / result["step_s"]
    previous = phases.groupby(level="trial_id")[["previous_steps_done", "previous_steps_seen"]].sum()
    seen = previous["previous_steps_seen"]
    result["previous_step_done_share"] = previous["previous_steps_done"] / seen.where(seen > 0)
    share = result["previous_step_done_share"]
    launch_ratio = launches["launch_ratio"].reindex(result.index)
    issued_s, busy_s = result["step_launch_s"], result["busy_s"]
    compared = issued_s.notna() & busy_s.notna() & result["step_s"].notna()
    slower = (issued_s > busy_s) & (issued_s >= HOST_BOUND_STEP_SHARE * result["step_s"])
    long = ~(issued_s < HOST_BOUND_STEP_SHARE * result["step_s"])
    bound = slower.where(compared, (launch_ratio >= HOST_BOUND_LAUNCH_RATIO) & (share > 0.5) & long)
    known = compared | (share.notna() & launch_ratio.notna())
    result["host_bound"] = bound.astype(object).where(known, None)
    peaks = ["peak_memory_bytes", "peak_reserved_bytes"]
    result[peaks] = rows.groupby("trial_id")[peaks].max()
    return result[list(MEASURES)]
