"""From trials to configurations and scaling series: what was held constant, speed-up, efficiency, their intervals.

A configuration is a trial without its repeat. A series is a set of configurations that differ only in the number of
ranks (and the nodes that hold them) and, in strong scaling, in the batch per rank that keeps the global batch.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.load.fields import Fields
from analysis.measure.configurations import LAYOUT, RESULT_COLUMNS, throughput_estimates, trial_fields
from analysis.statistics import ratios_to_reference

WEAK, STRONG, NEITHER = "weak", "strong", "neither"


SCALING_COLUMNS = [
    "scaling", "series", "configuration", "world_size", "reference", "reference_world_size", "ideal", "speed_up",
    "speed_up_low", "speed_up_high", "efficiency", "efficiency_low", "efficiency_high", "n", "reference_n",
]  # fmt: skip


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


def speed_up_rows(
    found: pd.DataFrame, fields: Sequence[str], epoch_s: Mapping[Hashable, float], declared: Fields
) -> pd.DataFrame:
    """Speed-up at each batch over the number of ranks, against each baseline on one rank that was measured.

    found: see `scaling.configurations`. fields: those of a trial but repeat. epoch_s: see `batch_curves.epoch_seconds`. declared: what the study says of the
    fields.

    A row for each series of configurations that differ in the number of ranks alone, with the batch per rank held (weak)
    or the global batch held (strong), and for each of its baselines: the same strategy on one rank, and training without
    any (parallel "none"). Columns: the first member's fields, scaling, global_batch, baseline, trial_ids of all members,
    n (fewest repeats), and for each number of ranks k: step_s_k, epoch_s_k (null where the data's length is not known),
    speed_up_k with `_low` and `_high` = throughput / the baseline's (see `statistics.ratios`).
    """
    rows: list[dict[Hashable, Any]] = []
    strong = ["global_batch" if name == "batch_per_gpu" else name for name in fields]
    for label, held in ((WEAK, [*fields]), (STRONG, strong)) if len(found) else ():
        keys = [name for name in held if name not in ("world_size", "nodes")]
        for _, members in found[found["world_size"] > 1].groupby(keys, dropna=False, sort=False):
            larger = members.sort_values(["world_size", "nodes"]).drop_duplicates("world_size")
            strategy = larger.iloc[0].get("parallel", "none")
            for kind in dict.fromkeys([strategy, "none"]):
                wanted = larger.assign(parallel=kind) if "parallel" in found else larger
                base = one_rank(wanted, found, keys, declared)
                if base is not None:
                    row: dict[Hashable, Any] = larger.iloc[0][[*fields, "global_batch"]].to_dict()
                    members = pd.concat([found.loc[[base]], larger])
                    rows.append(row | {"scaling": label, "baseline": kind} | _against_first(members, epoch_s))
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["scaling", "baseline", "trial_ids", "n"])


def _against_first(members: pd.DataFrame, epoch_s: Mapping[Hashable, float]) -> dict[Hashable, Any]:
    """One row's columns for each number of ranks: the configurations `members`, of which the first has one rank."""
    estimates = throughput_estimates(members)
    ratio = ratios_to_reference(estimates, pd.Series(estimates.index[0], index=estimates.index))
    row: dict[Hashable, Any] = {
        "trial_ids": tuple(trial for ids in members["trial_ids"] for trial in ids),
        "n": members["n"].min(),
    }
    for (index, member), (_, against) in zip(members.iterrows(), ratio.iterrows(), strict=True):
        size = int(member["world_size"])
        row |= {f"step_s_{size}": member["step_s"], f"epoch_s_{size}": epoch_s.get(index)}
        row[f"speed_up_{size}"] = against["ratio"]
        row |= {f"speed_up_{size}_{end}": against[end] for end in ("low", "high") if size > 1}
    return row
