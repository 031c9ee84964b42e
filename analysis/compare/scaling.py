"""Form scaling series from configurations, with speed-up, efficiency and their intervals.

A configuration is a trial without its repeat. A series is a set of configurations that differ only in the number of
ranks (and nodes) and, in strong scaling, in the batch per rank or the batches accumulated, so that the global batch is
constant.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.measure.configurations import LAYOUT, RESULT_COLUMNS, throughput_estimates, trial_fields
from analysis.read.fields import Fields
from analysis.statistics import ratios_to_reference
from analysis.two_way import Array

WEAK, STRONG, NEITHER = "weak", "strong", "neither"
PLAIN = "none"
"""the strategy of training without any wrapper, on one rank"""

TRACED = "profile_ranks"
"""the field that only adds a trace after the timed windows"""

SCALING_COLUMNS = [
    "scaling", "series", "configuration", "world_size", "reference", "reference_world_size", "ideal", "speed_up",
    "speed_up_low", "speed_up_high", "speed_up_more", "efficiency", "efficiency_low", "efficiency_high",
    "efficiency_more", "plain_efficiency", "plain_efficiency_low", "plain_efficiency_high", "plain_efficiency_more",
    "n", "reference_n",
]  # fmt: skip


def scaling_rows(configurations: pd.DataFrame, declared: Fields) -> pd.DataFrame:
    """Return speed-up and efficiency of every configuration, one row per series that it belongs to.

    Columns: scaling ("weak": constant batch per rank; "strong": constant global batch; "neither": no other number of
    ranks to compare with), series (number), configuration (index into `configurations`), world_size, reference
    (configuration), reference_world_size, ideal (speed-up), speed_up and efficiency with `_low`, `_high` and `_more`
    (see `statistics.ratios`), plain_efficiency with the same, n, reference_n.

    A series without one rank uses the configuration of `one_rank`, if there is one, as reference; it adds no row.
    N₀ is the smallest world size of the series, including such a reference, and thr its throughput:
    speed-up = thr(N) / thr(N₀), ideal = N / N₀, efficiency = thr(N) N₀ / (thr(N₀) N). For a constant global batch,
    efficiency is T(N₀) N₀ / (T(N) N); for a constant batch per rank, T(N₀) / T(N). The reference itself is 1 by
    definition and has no interval. plain_efficiency: throughput / (N times that of plain training on one rank, without
    any strategy); null without such a configuration, and for series of plain training.

    Configurations of `traced_again` are no series of their own and have no row.
    """
    configurations = configurations[~traced_again(configurations)]
    shared = _telling(configurations, [name for name in _fields(configurations) if name not in LAYOUT])
    constant_fields = [
        (WEAK, shared),
        (STRONG, [*(n for n in shared if n != "batch_per_gpu"), "global_batch"]),
        (STRONG, [*(n for n in shared if n != "accumulation_steps"), "global_batch"]),
    ]
    parts, first_series = [], 0
    for label, keys in constant_fields:
        if configurations.empty:
            break
        members = configurations.assign(series=configurations.groupby(keys, dropna=False, sort=False).ngroup())
        members = members.sort_values(["series", *LAYOUT], kind="stable")
        by_series = members.groupby("series")
        first = members.index.to_series().groupby(members["series"]).transform("first")
        starts = members.drop_duplicates("series")
        starts = starts[starts["world_size"] > 1]
        external_reference = dict(zip(starts["series"], one_ranks(starts, configurations, keys, declared), strict=True))
        external_reference = {number: single for number, single in external_reference.items() if single is not None}
        reference = members["series"].map(external_reference).fillna(first).astype(int)
        several = (by_series["world_size"].transform("nunique") > 1) | members["series"].isin(list(external_reference))
        part = _against_reference(members[several], configurations, reference[several])
        part = part.join(_against_plain(members[several], configurations, keys, declared), on="configuration")
        part["series"] = part.groupby("series", sort=False).ngroup() + first_series
        first_series += part["series"].nunique()
        parts.append(part.assign(scaling=label))
    covered: Iterable[Any] = pd.concat(parts)["configuration"].unique() if parts else []
    unpaired = configurations[~configurations.index.isin(covered)]
    parts.append(
        pd.DataFrame(
            {
                "configuration": unpaired.index,
                "world_size": unpaired["world_size"].to_numpy(),
                "n": unpaired["n"].to_numpy(),
            }
        ).assign(scaling=NEITHER)
    )
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True).reindex(columns=SCALING_COLUMNS)


def _telling(configurations: pd.DataFrame, fields: Sequence[str]) -> list[str]:
    """Return the fields that can tell series apart: comparing a hundred equal ones takes most of the time.

    The strategy is one of them even if all are equal, as it is compared with that of plain training.
    """
    telling = [name for name in fields if name == "parallel" or configurations[name].nunique(dropna=False) > 1]
    return telling or list(fields[:1])


def traced_again(configurations: pd.DataFrame) -> "pd.Series[bool]":
    """Return which configurations repeat one that has no trace, and differ from it only in the traced ranks."""
    if TRACED not in configurations:
        return pd.Series(False, index=configurations.index)
    others = [name for name in _fields(configurations) if name != TRACED]
    is_traced = configurations[TRACED].fillna("") != ""
    alike = configurations.groupby(others, dropna=False, sort=False).ngroup()
    return is_traced & alike.isin(alike[~is_traced])


def _fields(configurations: pd.DataFrame) -> list[str]:
    """Return the columns that are fields of a trial."""
    return [name for name in trial_fields(configurations) if name not in RESULT_COLUMNS]


def one_rank(rows: pd.DataFrame, configurations: pd.DataFrame, keys: Sequence[str], declared: Fields) -> int | None:
    """Return the configuration on one rank that a series lacks.

    rows: the series, whose configurations are equal in `keys`. Preferred is a configuration equal in all of them, then
    one that differs in the interconnect, which one rank does not use, or in its timing. None if the series includes one
    rank, or if there is no such configuration.
    """
    if (rows["world_size"] == 1).any():
        return None
    return one_ranks(rows.head(1), configurations, keys, declared)[0]


def one_ranks(
    starts: pd.DataFrame, configurations: pd.DataFrame, keys: Sequence[str], declared: Fields
) -> list[int | None]:
    """Return what `one_rank` does for several series at once. starts: one configuration of each."""
    is_single = configurations["world_size"] == 1
    if starts.empty or not is_single.any():
        return [None] * len(starts)
    columns = {name: _codes(starts[name], configurations[name][is_single]) for name in keys}
    singles = configurations["n"][is_single]
    most_repeats = np.argsort(singles.to_numpy(), kind="stable")[::-1]
    anyhow = [name for name in keys if name not in ("interconnect", *declared.timing)]
    result: list[int | None] = []
    for row in range(len(starts)):
        exact = _equal(columns, keys, row, len(starts))
        similar = _equal(columns, anyhow, row, len(starts))[most_repeats]
        if exact.any():
            result.append(int(singles.index[int(exact.argmax())]))
        else:
            result.append(int(singles.index[int(most_repeats[similar.argmax()])]) if similar.any() else None)
    return result


def _codes(first: pd.Series, second: pd.Series) -> Array:
    """Return a number per value of two columns, the same for equal values; null equals null."""
    values = np.concatenate([first.to_numpy(dtype=object), second.to_numpy(dtype=object)])
    return pd.factorize(values)[0]


def _equal(columns: Mapping[str, Array], names: Sequence[str], row: int, others_from: int) -> Array:
    """Return which of the rows from `others_from` on equal `row` in these columns."""
    result = np.ones(len(next(iter(columns.values()))) - others_from, dtype=bool)
    for name in names:
        result &= columns[name][others_from:] == columns[name][row]
    return result


def alike(rows: pd.DataFrame, one: Mapping[str, Any] | pd.Series, names: Sequence[str]) -> "pd.Series[bool]":
    """Return which of `rows` equal `one` in all of these columns; null equals null."""
    wanted = [(one[name], pd.isna(one[name])) for name in names]

    def equals(row: Iterable[Any]) -> bool:  # a hundred fields of few rows: faster than column by column
        return all(
            pd.isna(value) if is_null else not pd.isna(value) and value == wish
            for value, (wish, is_null) in zip(row, wanted, strict=True)
        )

    return pd.Series(list(map(equals, rows[list(names)].to_numpy(dtype=object))), rows.index, bool)


def _against_reference(members: pd.DataFrame, configurations: pd.DataFrame, first: pd.Series) -> pd.DataFrame:
    """Return the ratios of each member to its reference configuration in `first`."""
    reference = configurations.loc[first].set_axis(members.index)
    ratio = ratios_to_reference(throughput_estimates(configurations), first)
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
            "speed_up_more": ratio["more"],
            "efficiency": ratio["ratio"] / ideal,
            "efficiency_low": ratio["low"] / ideal,
            "efficiency_high": ratio["high"] / ideal,
            "efficiency_more": ratio["more"],
            "n": members["n"],
            "reference_n": reference["n"],
        }
    ).reset_index(drop=True)


def _against_plain(
    members: pd.DataFrame, configurations: pd.DataFrame, keys: Sequence[str], declared: Fields
) -> pd.DataFrame:
    """Return plain_efficiency of the members of each series, see `scaling_rows`; indexed by configuration."""
    plain: dict[Hashable, int] = {}
    if "parallel" in members:
        several = members[(members["world_size"] > 1) & (members["parallel"] != PLAIN)]
        starts = several.drop_duplicates("series").assign(parallel=PLAIN)
        singles = dict(zip(starts["series"], one_ranks(starts, configurations, keys, declared), strict=True))
        of_member = {index: singles.get(number) for index, number in members["series"].items()}
        plain = {index: single for index, single in of_member.items() if single is not None}
    reference = pd.Series(plain, dtype="int64")
    ratio = ratios_to_reference(throughput_estimates(configurations), reference)
    ranks = members["world_size"].reindex(reference.index).astype(float)
    return pd.DataFrame(
        {
            "plain_efficiency": ratio["ratio"] / ranks,
            "plain_efficiency_low": ratio["low"] / ranks,
            "plain_efficiency_high": ratio["high"] / ranks,
            "plain_efficiency_more": ratio["more"],
        }
    )


def speed_up_rows(
    configurations: pd.DataFrame, fields: Sequence[str], epoch_s: Mapping[Hashable, float], declared: Fields
) -> pd.DataFrame:
    """Return the speed-up over the number of ranks, per batch and baseline on one rank.

    configurations: see the function of that name. fields: of a trial, without repeat. epoch_s: see
    `batch_size.epoch_seconds`. declared: declared fields of the study.

    There is one row per baseline of each series of configurations that differ only in the number of ranks, at a
    constant batch per rank (weak) or global batch (strong). Baselines on one rank are training without any strategy
    (parallel "none"), and the same strategy. Columns: the fields of the first member, scaling, global_batch, baseline,
    trial_ids of all members, n (fewest repeats), and for each number of ranks k: step_s_k, epoch_s_k (null if the size
    of the data set is unknown) and `_more` of both, speed_up_k = throughput / the baseline's, with `_low`, `_high` and
    `_more` (see `statistics.ratios`).
    """
    configurations = configurations[~traced_again(configurations)]
    rows: list[dict[Hashable, Any]] = []
    strong = ["global_batch" if name == "batch_per_gpu" else name for name in fields]
    for label, constant_fields in ((WEAK, [*fields]), (STRONG, strong)) if len(configurations) else ():
        keys = [name for name in constant_fields if name not in ("world_size", "nodes")]
        for _, members in configurations[configurations["world_size"] > 1].groupby(keys, dropna=False, sort=False):
            several_ranks = members.sort_values(["world_size", "nodes"]).drop_duplicates("world_size")
            strategy = several_ranks.iloc[0].get("parallel", "none")
            for baseline in dict.fromkeys([PLAIN, strategy]):
                like_baseline = (
                    several_ranks.assign(parallel=baseline) if "parallel" in configurations else several_ranks
                )
                baseline_index = one_rank(like_baseline, configurations, keys, declared)
                if baseline_index is not None:
                    row: dict[Hashable, Any] = several_ranks.iloc[0][[*fields, "global_batch"]].to_dict()
                    members = pd.concat([configurations.loc[[baseline_index]], several_ranks])
                    rows.append(row | {"scaling": label, "baseline": baseline} | _against_first(members, epoch_s))
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["scaling", "baseline", "trial_ids", "n"])


def _against_first(members: pd.DataFrame, epoch_s: Mapping[Hashable, float]) -> dict[Hashable, Any]:
    """Return the columns of one row per number of ranks. The first of `members` has one rank."""
    estimates = throughput_estimates(members)
    ratio = ratios_to_reference(estimates, pd.Series(estimates.index[0], index=estimates.index))
    row: dict[Hashable, Any] = {
        "trial_ids": tuple(trial for ids in members["trial_ids"] for trial in ids),
        "n": members["n"].min(),
    }
    for (index, member), (_, against) in zip(members.iterrows(), ratio.iterrows(), strict=True):
        size = int(member["world_size"])
        row |= {f"step_s_{size}": member["step_s"], f"epoch_s_{size}": epoch_s.get(index)}
        row |= {f"{name}_{size}_more": member["step_s_more"] for name in ("step_s", "epoch_s")}
        row[f"speed_up_{size}"] = against["ratio"]
        row |= {f"speed_up_{size}_{end}": against[end] for end in ("low", "high", "more") if size > 1}
    return row
