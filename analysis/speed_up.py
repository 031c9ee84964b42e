"""Speed-up of every number of ranks over one, at each batch, in one row per series."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.fields import Fields
from analysis.scaling import STRONG, WEAK, one_rank, throughput_estimates
from analysis.statistics import ratios_to_reference


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
