"""Reduce trials to configurations: trials that differ only in their repeat."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.measure.measures import MEASURES
from analysis.read.fields import Fields
from analysis.read.reduce import require
from analysis.read.results import OUTCOME_COLUMNS
from analysis.statistics import ESTIMATE_COLUMNS, intervals, log_estimates


def units_per_s(found: pd.DataFrame, measured: pd.DataFrame, fields: Fields) -> dict[str, pd.Series]:
    """Return the `characters` and `tokens` that all ranks process per second, each NaN where it is not the unit.

    Models of this project that read text read bytes, one per character, unless the trial counted tokens. found: see
    `configurations`. measured: see `tokens_per_s`.
    """
    tokens = tokens_per_s(found, measured)
    if not {"model", "sequence_length"} <= {*found.columns}:
        return {"characters": pd.Series(float("nan"), index=found.index), "tokens": tokens}
    of_bytes = found["model"].isin(fields.sequence_models) & tokens.isna()
    characters = (found["throughput_samples_per_s"] * found["sequence_length"].astype(float)).where(of_bytes)
    return {"characters": characters, "tokens": tokens}


def tokens_per_s(found: pd.DataFrame, measured: pd.DataFrame) -> pd.Series:
    """Return the tokens that all ranks process per second; NaN if the number of tokens per sample is not known.

    A workload or model states it, and the probe sees it in the batches of a script. found: see `configurations`.
    measured: see `measures.summaries`.
    """
    known = [tokens_per_sample(environment) for environment in measured["environment"]]
    by_trial = pd.Series(known, index=measured["trial_id"].to_numpy(), dtype=float)
    per_sample = found["trial_ids"].map(lambda trial_ids: by_trial.reindex(list(trial_ids)).median()).astype(float)
    return found["throughput_samples_per_s"] * per_sample


def tokens_per_sample(environment: Mapping[str, Any]) -> float | None:
    """Return the tokens per sample that a trial's environment states, or that the probe saw; None if unknown."""
    first: Mapping[str, Any] = next(iter(environment.get("ranks") or ()), {})
    seen = first.get("probe") or {}
    if seen.get("tokens_per_step") and seen.get("samples_per_step"):
        return seen["tokens_per_step"] / seen["samples_per_step"]
    return first.get("tokens_per_sample")


_ENDS = ("low", "high", "more")


_ESTIMATE = tuple(name for name in ESTIMATE_COLUMNS if name not in ("n", "groups", "value"))
"""Columns of `statistics.log_estimates` that ratios need."""


RESULT_COLUMNS = (
    "global_batch", "n", "groups", *(f"throughput_samples_per_s_{end}" for end in _ENDS),
    *(f"step_s_{end}" for end in _ENDS), *(f"throughput_{name}" for name in _ESTIMATE), "trial_ids",
)  # fmt: skip
"""Columns that `configurations` adds to the fields and measures of a trial."""


_NOT_MEDIANS = (
    "throughput_samples_per_s", "step_s", "slowest_rank", "fastest_rank", "host_bound", "peak_memory_bytes",
    "peak_reserved_bytes",
)  # fmt: skip
"""Measures that a configuration does not aggregate by the median over repeats."""


LAYOUT = ("world_size", "nodes")
"""Fields in which the members of a series differ."""


_LENGTHS = ("steps", "warmup_steps")


_NEEDED = ("world_size", "nodes", "batch_per_gpu", "device", "worker_group")


def trial_fields(frame: pd.DataFrame) -> list[str]:
    """Return the columns of `frame` that are fields of a trial."""
    return [name for name in frame.columns if name not in OUTCOME_COLUMNS and name not in MEASURES]


def derived_lengths(trials: pd.DataFrame) -> list[str]:
    """Return window lengths, in steps, that follow from other fields, for example if each window lasts an epoch.

    They vary with batch and ranks and do not distinguish configurations. Lengths that were chosen do.
    """
    lengths = [name for name in _LENGTHS if name in trials and trials[name].nunique(dropna=False) > 1]
    others = [name for name in trial_fields(trials) if name not in (*lengths, "repeat")]
    if not lengths:
        return []
    chosen = (trials.groupby(others, dropna=False)[lengths].nunique(dropna=False) > 1).any()
    return [] if chosen.any() else lengths


def _is_whole(rows: pd.DataFrame, name: str) -> bool:
    return name in rows and bool(rows[name].notna().all())


def configurations(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per configuration, from `measures.summaries`; the index numbers them from 0.

    Columns: the fields of a trial except repeat; global_batch (samples per optimizer step); n (repeats) and groups
    (worker groups); throughput_samples_per_s and step_s with `_low` and `_high` (95 % interval, NaN for one repeat) and
    `_more` (see `statistics.intervals`); `throughput_*` with the columns of `statistics.log_estimates`, for ratios;
    medians over repeats of the other measures; host_bound (majority of the repeats, None if unknown);
    peak_memory_bytes and peak_reserved_bytes (maxima); trial_ids. Host-bound configurations and others are strata.
    """
    rows = rows.dropna(subset="throughput_samples_per_s")
    # as columns with gaps they are floats, because trials without a result have an unknown batch
    rows = rows.astype({name: int for name in ("batch_per_gpu", "accumulation_steps") if _is_whole(rows, name)})
    fields = [name for name in trial_fields(rows) if name != "repeat"]
    if rows.empty:
        return pd.DataFrame(columns=list(dict.fromkeys([*fields, *_NEEDED, *MEASURES, *RESULT_COLUMNS])))
    require(rows, _NEEDED, "the frame of trials")
    varying = [
        name for name in fields if name not in ("batch_per_gpu", *LAYOUT) and rows[name].nunique(dropna=False) > 1
    ]
    order = ["batch_per_gpu", *varying, *LAYOUT]
    rows = rows.sort_values(order, kind="stable").copy()  # one block per type, else pandas warns of many fields
    rows = rows.assign(configuration=rows.groupby(fields, dropna=False, sort=False).ngroup())
    grouped = rows.groupby("configuration")
    result = grouped[fields].first().copy()
    result["global_batch"] = result["world_size"] * result["batch_per_gpu"]
    if "accumulation_steps" in result:
        result["global_batch"] *= result["accumulation_steps"]
    for name in ("throughput_samples_per_s", "step_s"):
        estimates = log_estimates(rows, "configuration", name, stratum="host_bound")
        result[name] = estimates["value"]
        result[[f"{name}_{end}" for end in _ENDS]] = intervals(estimates)
        if name == "throughput_samples_per_s":
            result[["n", "groups"]] = estimates[["n", "groups"]]
            result = result.join(estimates[list(_ESTIMATE)].add_prefix("throughput_"))
    by_configuration = rows["configuration"]
    medians = [name for name in MEASURES if name not in _NOT_MEDIANS]
    peaks = ["peak_memory_bytes", "peak_reserved_bytes"]
    votes = rows["host_bound"].astype(float).groupby(by_configuration).mean()
    parts = [
        result,
        rows[medians].astype(float).groupby(by_configuration).median(),
        (votes > 0.5).astype(object).where(votes.notna(), None).rename("host_bound"),
        rows[peaks].astype(float).groupby(by_configuration).max(),
        grouped["trial_id"].agg(tuple).rename("trial_ids"),
    ]
    return pd.concat(parts, axis=1).copy()


def rows_with(rows: pd.DataFrame, values: Mapping[str, object]) -> pd.DataFrame:
    """Return the rows with these values, each one value or a tuple; ignore fields that are not recorded."""
    for name, value in values.items():
        if name in rows:
            rows = rows[rows[name].isin(value if isinstance(value, tuple) else (value,))]
    return rows


def throughput_estimates(found: pd.DataFrame) -> pd.DataFrame:
    """Return the throughput columns of `configurations` in the format of `statistics.ratios`."""
    names = {f"throughput_{name}": name for name in _ESTIMATE}
    return found[list(names)].rename(columns=names)
