"""Compare batch sizes on one rank up to the limit of its memory, and compute the time per epoch."""

from collections.abc import Hashable
from typing import Any

import pandas as pd

from analysis.measure.configurations import trial_fields
from analysis.measure.measures import configuration_of
from analysis.read.environment import used_gpus
from analysis.read.schema import TOO_LARGE

_MEASURED, OUT_OF_MEMORY, _PRUNED = "measured", "out of memory", "not tried: a smaller batch ran out of memory"

_THROUGHPUT = tuple(f"throughput_samples_per_s{end}" for end in ("", "_low", "_high", "_more"))


def batch_curve(trials: pd.DataFrame, configurations: pd.DataFrame) -> pd.DataFrame:
    """Return one row per batch size tried on one rank, measured or not, series by series.

    trials: see `results.Results`. configurations: see the function of that name.

    Columns: the fields of a trial; series (configurations that differ only in the batch); configuration (index into
    `configurations`, null if not measured); outcome; throughput with interval, n, trial_ids and peak_memory_bytes of
    the configuration; memory_share (of the smallest GPU's memory); sample_s (1 / throughput); relative (throughput /
    the best of the series); both null if the throughput is not resolved. Series with a single batch are omitted.
    """
    fields = [name for name in trial_fields(trials) if name in configurations]
    columns = [
        *dict.fromkeys([*fields, "batch_per_gpu"]), "series", "configuration", "outcome", *_THROUGHPUT, "n",
        "trial_ids", "peak_memory_bytes", "memory_share", "sample_s", "relative",
    ]  # fmt: skip
    tried = trials[(trials["world_size"] == 1) & trials["status"].isin(["done", *TOO_LARGE])] if len(trials) else trials
    if tried.empty:
        return pd.DataFrame(columns=columns)
    single_rank = configurations[configurations["world_size"] == 1]
    measured = single_rank[[*fields, *_THROUGHPUT, "n", "trial_ids", "peak_memory_bytes"]]
    rows: list[dict[Hashable, Any]] = []
    configuration = configuration_of(measured)
    for _, group in tried.groupby(fields, dropna=False, sort=False):
        measured_index = configuration.reindex(group["trial_id"]).dropna()
        statuses = set(group["status"])
        row: dict[Hashable, Any] = group.iloc[0][fields].to_dict()
        row |= {"configuration": None, "trial_ids": tuple(group["trial_id"])}
        if len(measured_index):
            index = int(measured_index.iloc[0])
            row |= measured.loc[index].to_dict() | {"configuration": index, "outcome": _MEASURED}
            row["memory_share"] = row["peak_memory_bytes"] / total if (total := _memory_bytes(group)) else None
        elif "out_of_memory" in statuses:
            row["outcome"] = OUT_OF_MEMORY
        elif statuses == {"pruned"}:
            row["outcome"] = _PRUNED
        else:
            continue
        rows.append(row)
    frame = pd.DataFrame(rows).reindex(columns=columns)
    other_fields = [name for name in fields if name != "batch_per_gpu"]
    frame["series"] = frame.groupby(other_fields, dropna=False, sort=False).ngroup()
    frame = frame[frame["batch_per_gpu"].groupby(frame["series"]).transform("nunique") > 1]
    frame = frame.sort_values(["series", "batch_per_gpu"], kind="stable", ignore_index=True)
    numbers = [*_THROUGHPUT, "n", "peak_memory_bytes", "memory_share"]
    frame[numbers] = frame[numbers].astype(float)
    resolved = frame["throughput_samples_per_s"].mask(frame["throughput_samples_per_s_more"] > 0)
    frame["sample_s"] = 1 / resolved
    frame["relative"] = resolved / resolved.groupby(frame["series"]).transform("max")
    for _, series in frame.groupby("series"):
        fits = series[series["outcome"] == _MEASURED]
        if len(fits) and (series["outcome"] == OUT_OF_MEMORY).any():
            frame.loc[fits.index[-1], "outcome"] = "measured: the largest tried that fits"
    return frame


def _memory_bytes(trials: pd.DataFrame) -> float | None:
    """Return the memory of the smallest GPU that these trials ran on."""
    sizes = [
        gpu.get("memory_bytes") for environment in trials["environment"] for _, gpu in used_gpus(environment or {})
    ]
    return min((size for size in sizes if size), default=None)


def epoch_seconds(configurations: pd.DataFrame, measured: pd.DataFrame) -> dict[Hashable, float]:
    """Return the seconds per epoch by configuration, if ranks recorded the number of samples.

    configurations: see the function of that name. measured: see `measures.summaries`.
    """
    samples = {
        trial_id: ranks[0].get("dataset_samples")
        for trial_id, environment in zip(measured["trial_id"], measured["environment"], strict=True)
        if (ranks := environment.get("ranks"))
    }
    return {
        index: count / throughput
        for index, ids, throughput in zip(
            configurations.index, configurations["trial_ids"], configurations["throughput_samples_per_s"], strict=True
        )
        if (count := samples.get(ids[0]))
    }
