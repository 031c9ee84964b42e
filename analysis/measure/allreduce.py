"""The ceiling: what an all-reduce of each size takes on the same ranks when nothing else runs.

algbw = bytes / seconds; busbw = algbw · 2(N-1)/N, which does not depend on the number of ranks N where links are the
limit (NVIDIA nccl-tests, doc/PERFORMANCE.md). GB/s are 10⁹ bytes a second. busbw supposes that every byte crosses links
as in a ring: where a switch adds (NVLS, SHARP) it may lie above the link's own speed, and is shown as it is.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from analysis.load.reduce import require

KEYS = ["interconnect", "cpus_per_rank", "place", "nodes", "world_size"]
"""What a ceiling is of: so many ranks, over this interconnect, at this place. `place` numbers groups of like ranks on
other GPUs or hosts from 1."""

SWEEP_COLUMNS = [*KEYS, "bytes", "seconds", "algorithm_bytes_per_s", "bus_bytes_per_s", "n", "trial_ids"]
FIT_COLUMNS = [
    *KEYS, "latency_s", "algorithm_bytes_per_s", "bus_bytes_per_s", "largest_error", "median_error", "sizes", "n", "trial_ids",
]  # fmt: skip

MIN_SIZES = 3
"""Sizes that a fit of two parameters needs at least, so that it can be wrong."""


def sweep_seconds(sweep: pd.DataFrame) -> pd.DataFrame:
    """A row for each trial and size, in order: seconds of one all-reduce, the median over repetitions of the mean over
    ranks (nccl-tests averages over ranks too).

    sweep: frame of `load.Results`. Columns: trial_id, bytes, seconds. Raises ValueError naming a column that it lacks.
    """
    require(sweep, ("trial_id", "rank", "bytes", "repetition", "seconds"), "the frame of the sweep")
    each = sweep.groupby(["trial_id", "bytes", "repetition"])["seconds"].mean()
    return each.groupby(level=["trial_id", "bytes"]).median().reset_index()


def ceilings(trials: pd.DataFrame, sweep: pd.DataFrame) -> pd.DataFrame:
    """A row for each group of ranks and size, with `SWEEP_COLUMNS`: medians over the trials (n) that ran on the group.

    trials, sweep: frames of `load.Results`, of trials under one environment.
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
    """`KEYS` of each trial that has a sweep, indexed by trial_id. Frames as in `ceilings`."""
    shared = [name for name in KEYS if name != "place"]
    swept = trials[trials["trial_id"].isin(sweep["trial_id"])]
    frame = swept.set_index("trial_id").reindex(columns=[*shared, "environment"])
    frame["interconnect"] = frame["interconnect"].fillna("auto")
    frame["ranks"] = frame.pop("environment").map(_place)
    # Numbered in the order in which they come within like groups.
    frame["place"] = frame.groupby(shared, dropna=False)["ranks"].transform(lambda ranks: pd.factorize(ranks)[0] + 1)
    return frame.drop(columns="ranks")


def fits(sweep: pd.DataFrame) -> pd.DataFrame:
    """A row for each ceiling of `ceilings` with at least `MIN_SIZES` sizes, with `FIT_COLUMNS`.

    Fitted is seconds = latency + bytes / bandwidth (Hockney's model, Parallel Computing 20, 1994), by least squares on
    the logarithm of seconds, so that every size counts alike. largest_error and median_error: of |fitted / measured - 1|
    over the sizes; a large one says that no single latency and bandwidth describes these links.
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
    """Latency (s) and bandwidth (bytes/s) of seconds = latency + bytes / bandwidth, least squares on log seconds."""

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        latency_s, bandwidth = np.exp(logarithms)
        return np.log(latency_s + size_bytes / bandwidth) - np.log(seconds)

    largest = size_bytes.argmax()
    start = np.log([seconds[size_bytes.argmin()], size_bytes[largest] / seconds[largest]])
    latency_s, bandwidth = np.exp(least_squares(residuals, start).x)
    return float(latency_s), float(bandwidth)


def ceiling_seconds(seconds: pd.DataFrame, buckets: pd.DataFrame) -> pd.Series:
    """Seconds of an all-reduce as large as each bucket in its own trial's sweep; NaN where that has no such range.

    seconds: see `sweep_seconds`. buckets: columns trial_id and bytes, any index. A size that was not swept itself lies on
    the straight line between its neighbours, both axes logarithmic.
    """
    result = pd.Series(np.nan, index=buckets.index)
    curves = {trial_id: curve for trial_id, curve in seconds.groupby("trial_id")}
    for trial_id, group in buckets.groupby("trial_id"):
        if trial_id in curves:
            x, y = np.log(curves[trial_id]["bytes"].astype(float)), np.log(curves[trial_id]["seconds"])
            size = np.log(group["bytes"].astype(float))
            result[group.index] = np.exp(np.interp(size, x, y, left=np.nan, right=np.nan))
    return result


def bus_factor(world_size: pd.Series) -> pd.Series:
    """busbw / algbw of an all-reduce on so many ranks."""
    return 2 * (world_size - 1) / world_size


def _place(environment: dict[str, Any]) -> str:
    """The hosts and GPUs of a trial's ranks in order. Ray's node ids are new in each session, so hosts count."""
    hosts = {node.get("node_id"): node.get("host") for node in environment.get("nodes") or ()}
    ranks = environment.get("ranks") or ()
    return " ".join(f"{hosts.get(rank.get('node_id'))}:{rank.get('gpu_uuid') or rank.get('device')}" for rank in ranks)
