"""From trials to configurations and scaling series: what was held constant, speed-up, efficiency, their intervals.

A configuration is a trial without its repeat. A series is a set of configurations that differ only in the number of
ranks (and the nodes that hold them) and, in strong scaling, in the batch per rank that keeps the global batch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from analysis.fields import Fields
from analysis.measures import MEASURES
from analysis.results import OUTCOME_COLUMNS
from analysis.statistics import intervals, log_estimates, ratios_to_reference
from analysis.windows import require

RESULT_COLUMNS = (
    "global_batch", "n", "groups", "groups_differ", "throughput_samples_per_s_low", "throughput_samples_per_s_high",
    "step_s_low", "step_s_high", "throughput_log_mean", "throughput_log_variance", "throughput_degrees", "trial_ids",
)  # fmt: skip
"""What `configurations` adds to a trial's fields and measures."""

_NOT_MEDIANS = (
    "throughput_samples_per_s", "step_s", "slowest_rank", "fastest_rank", "host_bound", "peak_memory_bytes",
    "peak_reserved_bytes",
)  # fmt: skip
"""Measures of which a configuration has something else than the median across repeats, or nothing."""

WEAK, STRONG, NEITHER = "weak", "strong", "neither"

SCALING_COLUMNS = [
    "scaling", "series", "configuration", "world_size", "reference", "reference_world_size", "ideal", "speed_up",
    "speed_up_low", "speed_up_high", "efficiency", "efficiency_low", "efficiency_high", "n", "reference_n",
]  # fmt: skip

LAYOUT = ("world_size", "nodes")
"""Fields in which the members of a series differ."""

_LENGTHS = ("steps", "warmup_steps")
_NEEDED = ("world_size", "nodes", "batch_per_gpu", "device", "worker_group")


def trial_fields(frame: pd.DataFrame) -> list[str]:
    """The columns of `frame` that are fields of a trial."""
    return [name for name in frame.columns if name not in OUTCOME_COLUMNS and name not in MEASURES]


def derived_lengths(trials: pd.DataFrame) -> list[str]:
    """Lengths of windows, in steps, that follow from a trial's other fields, as where each window lasts an epoch.

    They vary with the batch and the ranks, and tell no configurations apart; lengths that were chosen do.
    """
    lengths = [name for name in _LENGTHS if name in trials and trials[name].nunique(dropna=False) > 1]
    others = [name for name in trial_fields(trials) if name not in (*lengths, "repeat")]
    if not lengths:
        return []
    chosen = (trials.groupby(others, dropna=False)[lengths].nunique(dropna=False) > 1).any()
    return [] if chosen.any() else lengths


def configurations(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each configuration, from `measures.summaries`; the index numbers them from 0.

    Columns: the fields of a trial but repeat; global_batch (samples of one optimizer step); n (repeats), groups (worker groups)
    and groups_differ; throughput_samples_per_s and step_s (medians across repeats) with `_low` and `_high` (95 %
    interval, NaN for one repeat) and `throughput_log_*` for ratios; medians across repeats of the other measures;
    host_bound (what most repeats say, None if none does); peak_memory_bytes and peak_reserved_bytes (maxima); trial_ids.
    """
    rows = rows.dropna(subset="throughput_samples_per_s")
    fields = [name for name in trial_fields(rows) if name != "repeat"]
    if rows.empty:
        return pd.DataFrame(columns=list(dict.fromkeys([*fields, *_NEEDED, *MEASURES, *RESULT_COLUMNS])))
    require(rows, _NEEDED, "the frame of trials")
    varying = [
        name for name in fields if name not in ("batch_per_gpu", *LAYOUT) and rows[name].nunique(dropna=False) > 1
    ]
    order = ["batch_per_gpu", *varying, *LAYOUT]
    rows = rows.sort_values(order, kind="stable")
    rows = rows.assign(configuration=rows.groupby(fields, dropna=False, sort=False).ngroup())
    grouped = rows.groupby("configuration")
    result = grouped[fields].first()
    result["global_batch"] = result["world_size"] * result["batch_per_gpu"]
    if "accumulation_steps" in result:
        result["global_batch"] *= result["accumulation_steps"]
    throughput = log_estimates(rows, "configuration", "throughput_samples_per_s")
    result[["n", "groups", "groups_differ"]] = throughput[["n", "groups", "groups_differ"]]
    result["throughput_samples_per_s"] = throughput["median"]
    result[["throughput_samples_per_s_low", "throughput_samples_per_s_high"]] = intervals(throughput)
    for name in ("log_mean", "log_variance", "degrees"):
        result[f"throughput_{name}"] = throughput[name]
    step = log_estimates(rows, "configuration", "step_s")
    result["step_s"] = step["median"]
    result[["step_s_low", "step_s_high"]] = intervals(step)
    medians = [name for name in MEASURES if name not in _NOT_MEDIANS]
    result[medians] = rows[medians].astype(float).groupby(rows["configuration"]).median()
    votes = rows["host_bound"].astype(float).groupby(rows["configuration"]).mean()
    result["host_bound"] = (votes > 0.5).astype(object).where(votes.notna(), None)
    peaks = ["peak_memory_bytes", "peak_reserved_bytes"]
    result[peaks] = rows[peaks].astype(float).groupby(rows["configuration"]).max()
    result["trial_ids"] = grouped["trial_id"].agg(tuple)
    return result


def scaling_rows(found: pd.DataFrame, declared: Fields) -> pd.DataFrame:
    """Speed-up and efficiency of every configuration, once for each series that it belongs to.

    Columns: scaling ("weak" where the batch per rank is held, "strong" where the global batch is, "neither" where no
    other number of ranks was measured like it), series (number), configuration (index into `found`), world_size,
    reference (configuration) and reference_world_size, ideal (speed-up), speed_up and efficiency with `_low` and
    `_high`, n, reference_n.

    A series without one rank refers to that of `one_rank`, where there is one, which is then no row of it.
    With N₀ the smallest world size of the series, that one included, and thr its throughput: speed-up = thr(N) / thr(N₀), ideal N / N₀,
    efficiency = thr(N) N₀ / (thr(N₀) N). For the same global batch this is T(N₀) N₀ / (T(N) N), and for the same batch
    per rank T(N₀) / T(N). The reference itself is 1 by definition and has no interval.
    """
    shared = [
        name for name in trial_fields(found) if name in found and name not in RESULT_COLUMNS and name not in LAYOUT
    ]
    held = {
        WEAK: shared,
        STRONG: [*(n for n in shared if n != "batch_per_gpu"), "global_batch"],
    }
    parts, first_series = [], 0
    for label, keys in held.items():
        if found.empty:
            break
        members = found.assign(series=found.groupby(keys, dropna=False, sort=False).ngroup())
        members = members.sort_values(["series", *LAYOUT], kind="stable")
        by_series = members.groupby("series")
        first = members.index.to_series().groupby(members["series"]).transform("first")
        borrowed = {
            number: one for number, rows in by_series if (one := one_rank(rows, found, keys, declared)) is not None
        }
        reference = members["series"].map(borrowed).fillna(first).astype(int)
        several = (by_series["world_size"].transform("nunique") > 1) | members["series"].isin(list(borrowed))
        part = _against_reference(members[several], found, reference[several])
        part["series"] = part.groupby("series", sort=False).ngroup() + first_series
        first_series += part["series"].nunique()
        parts.append(part.assign(scaling=label))
    covered: Iterable[Any] = pd.concat(parts)["configuration"].unique() if parts else []
    alone = found[~found.index.isin(covered)]
    parts.append(
        pd.DataFrame(
            {"configuration": alone.index, "world_size": alone["world_size"].to_numpy(), "n": alone["n"].to_numpy()}
        ).assign(scaling=NEITHER)
    )
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True).reindex(columns=SCALING_COLUMNS)


def one_rank(rows: pd.DataFrame, found: pd.DataFrame, keys: Sequence[str], declared: Fields) -> int | None:
    """The configuration on one rank that a series lacks.

    rows: the series, of configurations that are alike in `keys`. The one that is alike in all of them comes first, then one
    measured over another interconnect, of which one rank uses none, or timed in another way. None if the series has one rank
    itself, or no configuration of `found` is like it.
    """
    if (rows["world_size"] == 1).any():
        return None
    first = rows.iloc[0]
    alone = found[found["world_size"] == 1]
    exact = alone[_alike(alone, first, keys)]
    if len(exact):
        return int(exact.index[0])
    like = alone[_alike(alone, first, [name for name in keys if name not in ("interconnect", *declared.timing)])]
    return None if like.empty else int(like["n"].sort_values(kind="stable").index[-1])


def _alike(rows: pd.DataFrame, one: pd.Series, keys: Sequence[str]) -> pd.Series:
    """True for each of `rows` that is equal to `one` in all `keys`; null equals null."""
    equal = pd.Series(True, index=rows.index)
    for name in keys:
        equal &= (rows[name] == one[name]) | (rows[name].isna() & pd.isna(one[name]))
    return equal


def _against_reference(members: pd.DataFrame, found: pd.DataFrame, first: pd.Series) -> pd.DataFrame:
    """Ratios of each member to its reference, whose configuration `first` gives."""
    reference = found.loc[first].set_axis(members.index)
    ratio = ratios_to_reference(throughput_estimates(found), first)
    ideal = members["world_size"] / reference["world_size"]
    return pd.DataFrame(
        {
            "series": members["series"],
            "configuration": members.index,
            "world_size": members["world_size"],
            "reference": first,
            "reference_world_size": reference["world_size"],
            "ideal": ideal,
            "speed_up": ratio["ratio"],
            "speed_up_low": ratio["low"],
            "speed_up_high": ratio["high"],
            "efficiency": ratio["ratio"] / ideal,
            "efficiency_low": ratio["low"] / ideal,
            "efficiency_high": ratio["high"] / ideal,
            "n": members["n"],
            "reference_n": reference["n"],
        }
    ).reset_index(drop=True)


def throughput_estimates(found: pd.DataFrame) -> pd.DataFrame:
    """The throughput columns of `configurations` in the shape that `statistics.ratios` takes."""
    names = {
        "throughput_samples_per_s": "median",
        "throughput_log_mean": "log_mean",
        "throughput_log_variance": "log_variance",
        "throughput_degrees": "degrees",
    }
    return found[list(names)].rename(columns=names)
