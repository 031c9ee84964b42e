"""The measured all-reduce limit: time of an all-reduce of each size on the same ranks when nothing else runs.

algbw = bytes / seconds; busbw = algbw · 2(N-1)/N, which is independent of the number of ranks N if links are the limit
(NVIDIA nccl-tests, doc/PERFORMANCE.md). GB/s are 10⁹ bytes per second. busbw assumes that every byte crosses links as
in a ring. If a switch reduces (NVLS, SHARP), busbw may exceed the speed of the link; it is reported as it is.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from analysis.read.reduce import require

KEYS = ["interconnect", "cpus_per_rank", "place", "nodes", "world_size"]
"""Identity of a measured limit: number of ranks, interconnect and place. `place` numbers groups of similar ranks on
different GPUs or hosts, starting at 1.
"""

SWEEP_COLUMNS = [*KEYS, "bytes", "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s", "n", "trial_ids"]
FIT_COLUMNS = [
    *KEYS, "latency_s", "algorithm_bytes_per_s", "bus_bytes_per_s", "largest_error", "median_error", "sizes", "n",
    "trial_ids",
]  # fmt: skip

MIN_SIZES = 3
"""Minimum number of sizes for a fit of two parameters, so that the fit can fail."""


def sweep_seconds(sweep: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of one all-reduce per trial and size, in order.

    The value is the median over repetitions of the mean over ranks (nccl-tests also averages over ranks). sweep: frame
    of `load.Results`. Columns: trial_id, bytes, seconds. Raises ValueError naming a missing column.
    """
    require(sweep, ("trial_id", "rank", "bytes", "repetition", "seconds"), "the frame of the sweep")
    rank_means = sweep.groupby(["trial_id", "bytes", "repetition"])["seconds"].mean()
    return rank_means.groupby(level=["trial_id", "bytes"]).median().reset_index()


def measured_limits(trials: pd.DataFrame, sweep: pd.DataFrame) -> pd.DataFrame:
    """Return `SWEEP_COLUMNS` per group of ranks and size: medians over the n trials that ran on the group.

    trials, sweep: frames of `load.Results`, of trials in one environment.
    """
    seconds = sweep_seconds(sweep)
    seconds = seconds[seconds["trial_id"].isin(trials["trial_id"])]
    if seconds.empty:
        return pd.DataFrame(columns=SWEEP_COLUMNS)
    rows = seconds.join(ranks_of(trials, sweep), on="trial_id")
    grouped = rows.groupby([*KEYS, "bytes"], dropna=False)
    result = grouped["seconds"].agg(["median", "size"]).rename(columns={"median": "seconds", "size": "n"})
    result = result.assign(trial_ids=grouped["trial_id"].agg(tuple)).reset_index()
    result["algorithm_bytes_per_s"] = result["bytes"] / result["seconds"]
    result["bus_bytes_per_s"] = result["algorithm_bytes_per_s"] * bus_factor(result["world_size"])
    return result[SWEEP_COLUMNS]


def ranks_of(trials: pd.DataFrame, sweep: pd.DataFrame) -> pd.DataFrame:
    """Return `KEYS` of each trial with a sweep, indexed by trial_id. Frames as in `measured_limits`."""
    shared = [name for name in KEYS if name != "place"]
    trials_with_sweep = trials[trials["trial_id"].isin(sweep["trial_id"])]
    frame = trials_with_sweep.set_index("trial_id").reindex(columns=[*shared, "environment"])
    frame["interconnect"] = frame["interconnect"].fillna("auto")
    frame["ranks"] = frame.pop("environment").map(_place)
    # Places are numbered in order of appearance within each group.
    frame["place"] = frame.groupby(shared, dropna=False)["ranks"].transform(lambda ranks: pd.factorize(ranks)[0] + 1)
    return frame.drop(columns="ranks")


def fits(sweep: pd.DataFrame) -> pd.DataFrame:
    """Return `FIT_COLUMNS` per group of `measured_limits` with at least `MIN_SIZES` sizes.

    The fit is seconds = latency + bytes / bandwidth (Hockney's model, Parallel Computing 20, 1994), by least squares on
    the logarithm of seconds, so every size has the same weight. largest_error and median_error: of |fitted / measured -
    1| over the sizes. A large error means that a single latency and bandwidth does not describe these links.
    """
    rows: list[dict[str, Any]] = []
    for key, group in sweep.groupby(KEYS, dropna=False):
        if len(group) < MIN_SIZES:
            continue
        size = group["bytes"].to_numpy(dtype=float)
        seconds = group["seconds"].to_numpy(dtype=float)
        latency_s, bandwidth = fit(size, seconds)
        error = np.abs((latency_s + size / bandwidth) / seconds - 1)
        rows.append(
            dict(zip(KEYS, key, strict=True))
            | {
                "latency_s": latency_s,
                "algorithm_bytes_per_s": bandwidth,
                "largest_error": error.max(),
                "median_error": float(np.median(error)),
                "sizes": len(group),
                "n": int(group["n"].max()),
                "trial_ids": tuple(dict.fromkeys(group["trial_ids"].explode())),
            }
        )
    result = pd.DataFrame(rows, columns=[name for name in FIT_COLUMNS if name != "bus_bytes_per_s"])
    result["bus_bytes_per_s"] = result["algorithm_bytes_per_s"] * bus_factor(result["world_size"])
    return result[FIT_COLUMNS]


def fit(size_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Fit latency (s) and bandwidth (bytes/s) of seconds = latency + bytes / bandwidth.

    Least squares on the logarithm of seconds.
    """

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        latency_s, bandwidth = np.exp(logarithms)
        return np.log(latency_s + size_bytes / bandwidth) - np.log(seconds)

    largest = size_bytes.argmax()
    start = np.log([seconds[size_bytes.argmin()], size_bytes[largest] / seconds[largest]])
    latency_s, bandwidth = np.exp(least_squares(residuals, start).x)
    return float(latency_s), float(bandwidth)


def limit_seconds(seconds: pd.DataFrame, buckets: pd.DataFrame) -> pd.Series:
    """Return the seconds of an all-reduce of each bucket's size in its trial's sweep; NaN outside its range.

    seconds: see `sweep_seconds`. buckets: columns trial_id and bytes, any index. Sizes between those of the sweep are
    interpolated linearly, with both axes logarithmic.
    """
    result = pd.Series(np.nan, index=buckets.index)
    curves = {trial_id: curve for trial_id, curve in seconds.groupby("trial_id")}
    for trial_id, group in buckets.groupby("trial_id"):
        if trial_id in curves:
            x, y = np.log(curves[trial_id]["bytes"].astype(float)), np.log(curves[trial_id]["seconds"])
            group = group[group["bytes"] > 0]  # parameters without elements have buckets without bytes
            size = np.log(group["bytes"].astype(float))
            result[group.index] = np.exp(np.interp(size, x, y, left=np.nan, right=np.nan))
    return result


def bus_factor(world_size: pd.Series) -> pd.Series:
    """Return busbw / algbw of an all-reduce on `world_size` ranks."""
    return 2 * (world_size - 1) / world_size


def _place(environment: dict[str, Any]) -> str:
    """Return hosts and GPUs of a trial's ranks, in order.

    Hosts identify nodes, because Ray's node ids change with every session.
    """
    hosts = {node.get("node_id"): node.get("host") for node in environment.get("nodes") or ()}
    ranks = environment.get("ranks") or ()
    return " ".join(f"{hosts.get(rank.get('node_id'))}:{rank.get('gpu_uuid') or rank.get('device')}" for rank in ranks)
