"""Tables by batch size: efficiency on one rank up to the end of its memory, and speed-up at each batch on more ranks."""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import pandas as pd

from analysis.columns import GIB, N_COLUMN, axis_columns, study_ranks
from analysis.environments import used_gpus
from analysis.formatting import decimals_for, field_label, value_label
from analysis.measures import configuration_of
from analysis.scaling import STRONG, WEAK, Analysis, one_rank, throughput_estimates, trial_fields
from analysis.statistics import ratios
from analysis.table import Column, Table

_MEASURED, _OUT_OF_MEMORY, _PRUNED = "measured", "out of memory", "not tried: a smaller batch ran out of memory"


def batch_curve(analysis: Analysis) -> pd.DataFrame:
    """Every batch size that was tried on one rank: a row for each configuration, measured or not, series by series.

    Columns: the fields of a trial, series (configurations that differ in the batch alone), configuration (index into
    `Analysis.configurations`, null where none was measured), outcome, the configuration's throughput with interval, n,
    trial_ids and peak_memory_bytes, memory_share (of the smallest GPU's memory), sample_s (1 / throughput), relative
    (throughput / the best of the series). Series with a single batch are left out.
    """
    trials, found = analysis.results.trials, analysis.configurations
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


def batch_size(analysis: Analysis) -> Table:
    """Throughput of one rank over its batch, to the end of memory."""
    frame = batch_curve(analysis)
    one, _ = study_ranks(analysis)
    axes = [
        Column(column.name, column.header, decimals=0 if column.name == "batch_per_gpu" else column.decimals)
        for column in axis_columns(analysis, last=("batch_per_gpu",), without=("world_size", "nodes"))
    ]
    return Table(
        f"Batch size on one {one}",
        (
            *axes,
            Column("throughput_samples_per_s", "throughput (samples/s)", "median of the repeats [95 % interval].", interval=True),
            Column("sample_s", "time per sample (µs)", "1 / throughput.", 1e6),
            Column("relative", "of the best (%)", "throughput / the highest of these batches.", 1e2, 1),
            Column("peak_memory_bytes", "peak memory (GiB)", f"allocated at most, in brackets the share of the {one}'s memory; 1 GiB = 2³⁰ bytes.", 1 / GIB, 2, share="memory_share", optional=True),
            Column("outcome", "outcome", "the largest batch that fits is known only where a larger one ran out of memory."),
            N_COLUMN,
        ),
        frame,
        blocks=("series",),
    )  # fmt: skip


@lru_cache(maxsize=8)
def speed_up_rows(analysis: Analysis) -> pd.DataFrame:
    """Speed-up at each batch over the number of ranks, against each baseline on one rank that was measured.

    A row for each series of configurations that differ in the number of ranks alone, with the batch per rank held (weak)
    or the global batch held (strong), and for each of its baselines: the same strategy on one rank, and training without
    any (parallel "none"). Columns: the first member's fields, scaling, global_batch, baseline, trial_ids of all members,
    n (fewest repeats), and for each number of ranks k: step_s_k, epoch_s_k (null where the data's length is not known),
    speed_up_k with `_low` and `_high` = throughput / the baseline's (see `statistics.ratios`).
    """
    found = analysis.configurations
    fields = [*analysis.axes, *analysis.fixed]
    epoch_s = epoch_seconds(analysis)
    rows: list[dict[Hashable, Any]] = []
    strong = ["global_batch" if name == "batch_per_gpu" else name for name in fields]
    for label, held in ((WEAK, fields), (STRONG, strong)) if len(found) else ():
        keys = [name for name in held if name not in ("world_size", "nodes")]
        for _, members in found[found["world_size"] > 1].groupby(keys, dropna=False, sort=False):
            larger = members.sort_values(["world_size", "nodes"]).drop_duplicates("world_size")
            strategy = larger.iloc[0].get("parallel", "none")
            for kind in dict.fromkeys([strategy, "none"]):
                wanted = larger.assign(parallel=kind) if "parallel" in found else larger
                base = _on_one_rank(wanted, found, keys)
                if base is not None:
                    row: dict[Hashable, Any] = larger.iloc[0][[*fields, "global_batch"]].to_dict()
                    members = pd.concat([found.loc[[base]], larger])
                    rows.append(row | {"scaling": label, "baseline": kind} | _against_first(members, epoch_s))
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["scaling", "baseline", "trial_ids", "n"])


def _on_one_rank(larger: pd.DataFrame, found: pd.DataFrame, keys: list[str]) -> int | None:
    """The configuration on one rank that is alike in all `keys`, else that of `one_rank`, which scaling tables borrow too."""
    wanted = larger.iloc[0][keys]
    alone = found[found["world_size"] == 1]
    own = alone[((alone[keys] == wanted) | (alone[keys].isna() & wanted.isna())).all(axis=1)]
    return int(own.index[0]) if len(own) else one_rank(larger, found, keys)


def _against_first(members: pd.DataFrame, epoch_s: dict[Hashable, float]) -> dict[Hashable, Any]:
    """One row's columns for each number of ranks: the configurations `members`, of which the first has one rank."""
    estimates = throughput_estimates(members)
    ratio = ratios(estimates, estimates.iloc[[0] * len(estimates)].set_axis(estimates.index))
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


def epoch_seconds(analysis: Analysis) -> dict[Hashable, float]:
    """Seconds that one pass over the data takes, by configuration, where ranks noted how many samples there are."""
    samples = {
        trial_id: ranks[0].get("dataset_samples")
        for trial_id, environment in zip(analysis.measured["trial_id"], analysis.measured["environment"], strict=True)
        if (ranks := environment.get("ranks"))
    }
    found = analysis.configurations
    return {
        index: count / throughput
        for index, ids, throughput in zip(
            found.index, found["trial_ids"], found["throughput_samples_per_s"], strict=True
        )
        if (count := samples.get(ids[0]))
    }


def speed_up_weak_table(analysis: Analysis) -> Table:
    """Speed-up at each batch per rank, in a column for each number of ranks."""
    return _speed_up_table(analysis, WEAK)


def speed_up_strong_table(analysis: Analysis) -> Table:
    """Speed-up at each global batch, in a column for each number of ranks."""
    return _speed_up_table(analysis, STRONG)


_HELD = {
    "batch_per_gpu": "samples that each rank takes in one step.",
    "global_batch": "samples that all ranks take in one step.",
}


def _speed_up_table(analysis: Analysis, label: str) -> Table:
    rows = speed_up_rows(analysis)
    frame = rows[rows["scaling"] == label]
    ranks = study_ranks(analysis)
    sizes = [size for size in sorted(set(analysis.configurations["world_size"])) if f"step_s_{size}" in frame]
    sizes = [size for size in sizes if frame[f"step_s_{size}"].notna().any()]
    batch = "batch_per_gpu" if label == WEAK else "global_batch"
    axes = axis_columns(analysis, last=(), without=("world_size", "nodes", "batch_per_gpu"))
    by_epoch = any(frame[f"epoch_s_{size}"].notna().any() for size in sizes)
    kind, unit, scale, what = (
        ("epoch_s", "s", 1.0, "one pass over the data.")
        if by_epoch
        else ("step_s", "ms", 1e3, "a plain step, without instruments.")
    )
    decimals = decimals_for(
        pd.Series(scale * frame[[f"{kind}_{size}" for size in sizes]].to_numpy(dtype=float).ravel())
    )
    gain = f"throughput (samples of all {ranks[1]} a second) / that of the baseline [95 % interval]."
    measured = []
    for size in sizes:
        name = value_label("world_size", size, ranks)
        measured.append(Column(f"{kind}_{size}", f"{name} ({unit})", what, scale, decimals))
        measured.append(Column(f"speed_up_{size}", f"speed-up on {size}", gain, decimals=2, interval=size > 1))
    frame = (
        frame.sort_values([*(column.name for column in axes if column.name in frame), batch, "baseline"], kind="stable")
        if len(frame)
        else frame
    )
    held = f"batch per {ranks[0]}" if label == WEAK else "global batch"
    columns = [*(column.name for column in axes), batch, "baseline", "trial_ids", "n"]
    return Table(
        f"Speed-up at each {held} ({label} scaling)",
        (
            *axes,
            Column(batch, field_label(batch, ranks), _HELD[batch], decimals=0),
            Column("baseline", "baseline", f"what the one {ranks[0]} of the comparison runs: the strategy itself, or none, plain training "
                   "without any wrapper.", optional=True),
            *measured,
            N_COLUMN,
        ),
        frame.reindex(columns=list(dict.fromkeys([*columns, *frame.columns]))),
        f"Where one {ranks[0]} was not measured with all of a row's fields, the row borrows that over another interconnect, which one "
        f"{ranks[0]} does not use, or that was timed otherwise. n: the fewest repeats of any of a row's cells.",
        blocks=tuple(column.name for column in axes),
    )  # fmt: skip
