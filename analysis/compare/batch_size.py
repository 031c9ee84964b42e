"""The batch size on one rank, up to the end of its memory, and the time of one pass over the data."""

from collections.abc import Hashable
from typing import Any

import pandas as pd

from analysis.load.environment import used_gpus
from analysis.measure.configurations import trial_fields
from analysis.measure.measures import configuration_of

_MEASURED, _OUT_OF_MEMORY, _PRUNED = "measured", "out of memory", "not tried: a smaller batch ran out of memory"


def batch_curve(trials: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Every batch size that was tried on one rank: a row for each configuration, measured or not, series by series.

    trials: see `results.Results`. found: see `scaling.configurations`.

    Columns: the fields of a trial, series (configurations that differ in the batch alone), configuration (index into
    `found`, null where none was measured), outcome, the configuration's throughput with interval, n,
    trial_ids and peak_memory_bytes, memory_share (of the smallest GPU's memory), sample_s (1 / throughput), relative
    (throughput / the best of the series). Series with a single batch are left out.
    """
    fields = [name for name in trial_fields(trials) if name in found]
    columns = [*dict.fromkeys([*fields, "batch_per_gpu"]), "series", "configuration", "outcome", "throughput_samples_per_s", "throughput_samples_per_s_low",
               "throughput_samples_per_s_high", "n", "trial_ids", "peak_memory_bytes", "memory_share", "sample_s", "relative"]  # fmt: skip
    tried = (
        trials[(trials["world_size"] == 1) & trials["status"].isin(["done", "out_of_memory", "pruned"])]
        if len(trials)
        else trials
    )
    if tried.empty:
        return pd.DataFrame(columns=columns)
    own = found[found["world_size"] == 1]
    measured = own[[*fields, "throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "n",
                    "trial_ids", "peak_memory_bytes"]]  # fmt: skip
    rows: list[dict[Hashable, Any]] = []
    configuration = configuration_of(measured)
    for _, same in tried.groupby(fields, dropna=False, sort=False):
        known = configuration.reindex(same["trial_id"]).dropna()
        statuses = set(same["status"])
        row: dict[Hashable, Any] = same.iloc[0][fields].to_dict()
        row |= {"configuration": None, "trial_ids": tuple(same["trial_id"])}
        if len(known):
            index = int(known.iloc[0])
            row |= measured.loc[index].to_dict() | {"configuration": index, "outcome": _MEASURED}
            row["memory_share"] = row["peak_memory_bytes"] / total if (total := _memory_bytes(same)) else None
        elif "out_of_memory" in statuses:
            row["outcome"] = _OUT_OF_MEMORY
        elif statuses == {"pruned"}:
            row["outcome"] = _PRUNED
        else:
            continue
        rows.append(row)
    frame = pd.DataFrame(rows).reindex(columns=columns)
    held = [name for name in fields if name != "batch_per_gpu"]
    frame["series"] = frame.groupby(held, dropna=False, sort=False).ngroup()
    frame = frame[frame["batch_per_gpu"].groupby(frame["series"]).transform("nunique") > 1]
    frame = frame.sort_values(["series", "batch_per_gpu"], kind="stable", ignore_index=True)
    numbers = ["throughput_samples_per_s", "throughput_samples_per_s_low", "throughput_samples_per_s_high", "n", "peak_memory_bytes",
               "memory_share"]  # fmt: skip
    frame[numbers] = frame[numbers].astype(float)
    frame["sample_s"] = 1 / frame["throughput_samples_per_s"]
    best = frame["throughput_samples_per_s"].groupby(frame["series"]).transform("max")
    frame["relative"] = frame["throughput_samples_per_s"] / best
    for _, series in frame.groupby("series"):
        fitting = series[series["outcome"] == _MEASURED]
        if len(fitting) and (series["outcome"] == _OUT_OF_MEMORY).any():
            frame.loc[fitting.index[-1], "outcome"] = "measured: the largest tried that fits"
    return frame


def _memory_bytes(trials: pd.DataFrame) -> float | None:
    """Memory of the smallest GPU that these trials ran on."""
    sizes = [
        gpu.get("memory_bytes") for environment in trials["environment"] for _, gpu in used_gpus(environment or {})
    ]
    return min((size for size in sizes if size), default=None)


def epoch_seconds(found: pd.DataFrame, measured: pd.DataFrame) -> dict[Hashable, float]:
    """Seconds that one pass over the data takes, by configuration, if ranks noted how many samples there are.

    found: see `scaling.configurations`. measured: see `measures.summaries`."""
    samples = {
        trial_id: ranks[0].get("dataset_samples")
        for trial_id, environment in zip(measured["trial_id"], measured["environment"], strict=True)
        if (ranks := environment.get("ranks"))
    }
    return {
        index: count / throughput
        for index, ids, throughput in zip(
            found.index, found["trial_ids"], found["throughput_samples_per_s"], strict=True
        )
        if (count := samples.get(ids[0]))
    }
