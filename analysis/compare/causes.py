"""Attribute the growth of a step with the number of ranks to causes, each counted once."""

from collections.abc import Mapping

import pandas as pd

from analysis.compare.scaling import STRONG
from analysis.text import lost_decimals

CAUSES = ("transfer_s", "queueing_s", "wait_s", "host_s", "load_s", "slower_compute_s")
SLOWDOWN_PARTS = (*CAUSES, "remainder_s")
"""Parts of a slowdown. The known ones add up to it."""

LEAST_LOST = 0.005
"""Ranks lost below which there is nothing to explain."""

LOAD_SHARE = 0.1
"""Share of a step that ranks wait for a batch, above which bursts of the loaders disturb short windows."""

_COMMUNICATION = ["transfer_s", "queueing_s", "wait_s"]
_MEASURED = ["step_s", "phases_step_s", "longest_load_wait_s", "host_to_device_s", "busy_s", "step_launch_s"]
_PAIR = ["configuration", "reference", "world_size", "reference_world_size"]
_COLUMNS = [*_PAIR, "growth_s", *SLOWDOWN_PARTS, "kernels_s", "issue_s", "host_bound"]


def slowdown(
    exposed: pd.DataFrame, configurations: pd.DataFrame, pairs: pd.DataFrame, ideal_share: float = 1.0
) -> pd.DataFrame:
    """Return why a step is slower on more ranks, one row per weak-scaling pair with a communication breakdown.

    exposed: see `communication.exposed_costs`. configurations: as in `Analysis`. pairs: configuration, reference,
    world_size and reference_world_size, with the same batch per rank; the reference has the fewest ranks of its series,
    usually one. ideal_share: an ideal step on N ranks takes this share of the reference's: 1 with the same batch per
    rank, N₀ / N if they share the global batch, whose smaller batches per rank then are a reason for slower compute.

    growth_s: plain step on N ranks - ideal step = the sum of `SLOWDOWN_PARTS` (null ones omitted).
    Each is a growth, and may be negative. Parts of communication are shares of the step in the communication window,
    applied to the plain step, since a slow network differs from window to window.
    transfer_s, queueing_s: exposed time of the rank that arrives last, in the last bucket and before it.
    wait_s: lateness of that rank, and of the slower compute at most its hidden lateness: what the others lose while
    they wait (see `communication_breakdown`).
    load_s: longest wait of a rank for its batch, for which the others wait, and the batch's copy to the device.
    slower_compute_s: all else in a step with communication: kernels that share cores, memory or clocks with other
    ranks, and compute that all-reduces slow down. From the interleaved window; of scripts, which have none, from the
    phases window; of strategies without either from the plain window, so that they have no remainder (see
    `traced_breakdown`).
    host_s: waiting of the device for the host; null if host and device are the same (CPU), 0 unless host_bound.
    remainder_s: not explained. It is the part without communication of the difference between the plain and the other
    window, such as noise.

    If waiting for batches takes more than `LOAD_SHARE` of a step, the other windows say little about it, since loaders
    deliver in bursts: work then comes from the phases window, and shares apply to the step without that wait.

    host_bound: the step is host-bound (`measures.summarise`) on N ranks or in the reference. All that the device waits
    for is then the host's, except what a cause adds to a step without it: communication counts only as far as
    synchronised steps are longer than those under no_sync, wait_s only if one rank is usually the last and only beyond
    what the device waits less for its own host meanwhile, and slower_compute_s is kernels_s. By definition there is no
    remainder, unless kernel time is unknown. host_s is then limited by issue_s.

    Evidence that is not part of the sum: kernels_s, the growth of kernel time without communication (of the step under
    no_sync if kernel time is unknown); issue_s, the growth of the host time to issue a step.
    """
    has_breakdown = pairs["reference"].isin(exposed.index) | (pairs["reference_world_size"] == 1)
    pairs = pairs[pairs["configuration"].isin(exposed.index) & has_breakdown].reset_index(drop=True)
    if pairs.empty:
        return pd.DataFrame(columns=_COLUMNS)
    votes = configurations["host_bound"].astype(float)  # null if unknown
    of_pair = pd.concat([pairs[name].map(votes) for name in ("configuration", "reference")], axis=1)
    by_host = of_pair.max(axis=1) > 0
    buckets = exposed.reindex(pairs["configuration"]).set_axis(pairs.index)
    is_loading = _is_loading(configurations)
    by_load = pairs["configuration"].map(is_loading) | pairs["reference"].map(is_loading)
    by_phases = by_load | (buckets["synchronised_step_s"].isna() & (buckets["traced"].astype(float) != 1))
    several, reference = (_step_parts(exposed, configurations, pairs[name], by_host, by_phases) for name in _PAIR[:2])
    growth = several - ideal_share * reference
    result = pairs[_PAIR].copy()
    result["growth_s"] = growth["step_s"]
    parts = [*_COMMUNICATION, "load_s"]
    result[parts] = growth[parts]
    unsynchronised = growth["no_sync_step_s"] - growth["load_s"]
    result["kernels_s"] = growth["kernel_s"].fillna(unsynchronised)
    result["issue_s"], result["host_bound"] = growth["issue_s"], by_host
    rest = growth["step_s"] - growth[parts].sum(axis=1)
    slower = growth["work_s"] - growth["load_s"]
    issue = growth["issue_s"].fillna(0.0).clip(lower=0.0, upper=slower.clip(lower=0.0))
    host = (rest - growth["kernel_s"]).fillna(issue).where(by_host, 0.0)
    result["host_s"] = host.where(of_pair.notna().any(axis=1))
    result["slower_compute_s"] = growth["kernel_s"].fillna(slower - issue).where(by_host, slower)
    hidden_s, slower_s = growth["hidden_lateness_s"].fillna(0.0), result["slower_compute_s"]
    lost_waiting = hidden_s.clip(lower=0.0, upper=slower_s.clip(lower=0.0)).mask(by_host, 0.0)
    result["wait_s"] += lost_waiting
    result["slower_compute_s"] -= lost_waiting
    for_both = result["wait_s"].clip(lower=0.0, upper=(-result["host_s"]).fillna(0.0).clip(lower=0.0)).fillna(0.0)
    result["wait_s"] -= for_both
    result["host_s"] += for_both
    result["remainder_s"] = growth["step_s"] - result[list(CAUSES)].sum(axis=1)
    return result[_COLUMNS]


def unloaded_step_s(step_s: pd.Series, rows: pd.DataFrame, window_step_s: pd.Series) -> pd.Series:
    """Return the seconds of a step to which shares of the step in the communication window apply.

    All of it, unless ranks wait for batches for more than `LOAD_SHARE` of a step: then the step without these waits,
    which the window may have missed, but at least the window's step. rows: configurations, with the index of `step_s`.
    """
    unloaded = step_s - rows["longest_load_wait_s"].astype(float)
    return step_s.where(~_is_loading(rows), step_s.clip(upper=unloaded.clip(lower=window_step_s)))


def _is_loading(configurations: pd.DataFrame) -> pd.Series:
    """Return True for steps with so long a wait for batches that it disturbs short windows; False if unknown."""
    waits = configurations["longest_load_wait_s"].astype(float)
    return waits / configurations["phases_step_s"].astype(float) > LOAD_SHARE


def lost_ranks(row: pd.Series | None, exposed: pd.DataFrame, configurations: pd.DataFrame) -> dict[str, float]:
    """Return how many ranks' work is lost, by cause; they add up to ranks * (1 - efficiency). Empty if unknown.

    row: of `scaling.scaling_rows`. A cause that makes each of N steps of length T longer by t costs N t / T ranks. Keys
    are `SLOWDOWN_PARTS`; the remainder contains what is not measured.
    """
    if row is None:
        return {}
    pair = pd.DataFrame([row[_PAIR].astype(int)]).reset_index(drop=True)
    share = row["reference_world_size"] / row["world_size"] if row["scaling"] == STRONG else 1.0
    rows = slowdown(exposed, configurations, pair, float(share))
    if rows.empty:
        return {}
    step_s = float(configurations["step_s"].to_dict()[int(row["configuration"])])
    known = rows.iloc[0][list(SLOWDOWN_PARTS)].astype(float).fillna(0.0)
    lost = {str(name): float(row["world_size"] * value / step_s) for name, value in known.items()}
    total = float(row["world_size"] * (1 - row["efficiency"]))
    return lost | {"remainder_s": total - sum(value for name, value in lost.items() if name != "remainder_s")}


def visible_causes(lost: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of `lost_ranks`, the largest first and the remainder, which includes those below 0.5 %, last.

    All are rounded to `lost_decimals`, and the remainder is such that they add up to the rounded total. It includes
    parts below a tenth of `LEAST_LOST`. Empty if the ranks lost are too few to show.
    """
    total = sum(lost.values())
    if abs(total) < LEAST_LOST:
        return {}
    decimals = lost_decimals(total)
    least = max(0.005 * sum(abs(value) for value in lost.values()), LEAST_LOST / 10)
    shown = {
        name: round(value, decimals)
        for name, value in lost.items()
        if abs(value) >= least and round(value, decimals) and name != "remainder_s"
    }
    shown = dict(sorted(shown.items(), key=lambda item: -item[1]))
    return shown | {"remainder_s": round(round(total, decimals) - sum(shown.values()), decimals)}


def _step_parts(
    exposed: pd.DataFrame, configurations: pd.DataFrame, chosen: pd.Series, by_host: pd.Series, by_phases: pd.Series
) -> pd.DataFrame:
    """Return parts of the step of the chosen configurations, in seconds, with the index of `chosen`.

    step_s: plain step. transfer_s, queueing_s, wait_s, load_s: see `slowdown`; 0 without communication, as is
    hidden_lateness_s. work_s: a step of the interleaved window, or with `by_phases` of the phases window, without these
    parts of communication.
    no_sync_step_s, kernel_s, issue_s: null if unknown.
    """
    rows = configurations[_MEASURED].loc[chosen].set_axis(chosen.index).astype({"step_s": float})
    buckets = exposed.reindex(chosen).set_axis(chosen.index)
    alone = ~chosen.isin(exposed.index)
    step_s = rows["step_s"]
    queueing = buckets["exposed_queueing_s"].astype(float).fillna(0.0)
    wait = buckets["exposed_wait_s"].astype(float)
    wait = wait.where(~by_host, wait.clip(upper=buckets["lateness_s"].astype(float).clip(lower=0.0)))
    shares = pd.DataFrame(
        {
            "transfer_s": buckets["exposed_wire_s"].astype(float) - queueing,
            "queueing_s": queueing,
            "wait_s": wait,
        }
    ).div(buckets["communication_step_s"].astype(float), axis=0)
    shares = shares.mask(alone, 0.0)
    is_traced = buckets["traced"].astype(float) == 1
    synchronised = buckets["synchronised_step_s"].astype(float)
    longer = (1 - buckets["no_sync_step_s"].astype(float) / synchronised).clip(lower=0.0)
    limit = longer.where(by_host & longer.notna() & ~is_traced, 1.0)  # no_sync skips only a part of their communication
    synchronised = synchronised.where(synchronised.notna() | ~is_traced, step_s)
    for name in _COMMUNICATION:
        shares[name] = shares[name].clip(upper=limit)
        limit = limit - shares[name].fillna(0.0)
    window_step_s = buckets["communication_step_s"].astype(float)
    plain_s = unloaded_step_s(step_s, rows, window_step_s)
    parts = shares.mul(plain_s, axis=0)
    parts["step_s"] = step_s
    parts["load_s"] = rows[["longest_load_wait_s", "host_to_device_s"]].astype(float).sum(axis=1)
    with_communication = synchronised.mask(alone, step_s).mask(by_phases, rows["phases_step_s"].astype(float))
    unloaded_s = unloaded_step_s(with_communication, rows, window_step_s)
    hidden = buckets["hidden_lateness_s"].astype(float) / window_step_s
    parts["hidden_lateness_s"] = hidden.mask(alone, 0.0) * plain_s
    parts["work_s"] = with_communication - shares.sum(axis=1) * unloaded_s
    parts["no_sync_step_s"] = buckets["no_sync_step_s"].astype(float).mask(alone, step_s)
    parts["kernel_s"] = buckets["kernel_s"].astype(float).mask(alone, rows["busy_s"].astype(float))
    parts["issue_s"] = rows["step_launch_s"].astype(float)
    return parts
