"""Compare the values of one field, with all other fields equal, against a reference value."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.compare.accuracy import Accuracy, by_precision
from analysis.measure.configurations import RESULT_COLUMNS, throughput_estimates, trial_fields
from analysis.measure.measures import configuration_of
from analysis.read.fields import Fields
from analysis.statistics import ratios_to_reference

COLUMNS = ["configuration", "reference", "against", "ratio", "ratio_low", "ratio_high", "ratio_more"]


def against_reference(configurations: pd.DataFrame, field: str, order: Sequence[object] = ()) -> pd.DataFrame:
    """Return throughput / that of the reference, one row per configuration that can be compared.

    configurations: see the function of that name. order: values of `field`, preferred reference first; other values
    follow, sorted. Configurations are compared if all other trial fields are equal. The reference is the first value of
    the group. Null values of `field` are omitted. Rows are ordered by group and value.

    Columns: configuration and reference (index into `configurations`), against (the reference's value of `field`),
    ratio with `_low`, `_high` (95 %) and `_more`, see `statistics.ratios_to_reference`; null for the reference.
    """
    if configurations.empty or field not in configurations or configurations[field].nunique() < 2:
        return pd.DataFrame(columns=COLUMNS)
    configurations = configurations.dropna(subset=field)  # trials recorded before the field existed
    other_fields = [name for name in trial_fields(configurations) if name not in (*RESULT_COLUMNS, field)]
    other_values = sorted(
        (value for value in configurations[field].unique() if value not in order),
        key=lambda value: (str(type(value)), value),
    )
    rank = {value: i for i, value in enumerate((*order, *other_values))}
    members = configurations.assign(
        group=configurations.groupby(other_fields, dropna=False, sort=False).ngroup() if other_fields else 0,
        place=configurations[field].map(rank),
    )
    members = members[members[field].groupby(members["group"]).transform("nunique") > 1]
    if members.empty:
        return pd.DataFrame(columns=COLUMNS)
    members = members.sort_values(["group", "place"], kind="stable")
    first = members.index.to_series().groupby(members["group"]).transform("first")
    ratio = ratios_to_reference(throughput_estimates(configurations), first)
    return pd.DataFrame(
        {
            "configuration": members.index,
            "reference": first,
            "against": configurations.loc[first, field].to_numpy(),
            "ratio": ratio["ratio"],
            "ratio_low": ratio["low"],
            "ratio_high": ratio["high"],
            "ratio_more": ratio["more"],
        }
    ).reset_index(drop=True)


def like_headline(configurations: pd.DataFrame, fields: Sequence[str], headline: int | None) -> list[int]:
    """Return the headline configuration and those that differ from it in at most one of `fields`, of the same batch.

    The number of ranks may differ as well. Fields that always vary together count as one. It comes first, then
    the others in the order of configurations.
    """
    if headline is None or headline not in configurations.index:
        return []
    own = configurations.loc[[headline]].iloc[0]
    distinct: list[str] = []
    for name in fields:
        if not any(_vary_together(configurations, name, other) for other in distinct):
            distinct.append(name)
    same_batch = configurations[configurations["batch_per_gpu"] == own["batch_per_gpu"]]
    differing = sum(
        (~((same_batch[name] == own[name]) | (same_batch[name].isna() & pd.isna(own[name])))).astype(int)
        for name in distinct
    )
    alike = same_batch.index[differing <= 1] if distinct else same_batch.index
    return [headline, *(int(index) for index in alike if index != headline)]


def _vary_together(configurations: pd.DataFrame, one: str, other: str) -> bool:
    pairs = configurations[[one, other]].astype(str).drop_duplicates()
    return len(pairs) == pairs[one].nunique() == pairs[other].nunique()


def change_rows(configurations: pd.DataFrame, fields: Fields) -> pd.DataFrame:
    """Return what each compared value brings over its field's reference, on most ranks and there where it is fastest.

    One row per field and value, the largest gain first: field, value and `COLUMNS`. Interconnects are omitted, since
    slow ones are emulated, and so are ratios that are not resolved.
    """
    parts = []
    for field in (*fields.compared_in("own"), *fields.compared_in("settings")):
        rows = against_reference(configurations, field, fields[field].order)
        rows = rows[(rows["configuration"] != rows["reference"]) & ~(rows["ratio_more"].astype(float) > 0)]
        if rows.empty or field == "interconnect":
            continue
        measured = configurations.loc[rows["configuration"], ["world_size", "throughput_samples_per_s"]]
        rows = rows.assign(
            field=field,
            value=configurations.loc[rows["configuration"], field].to_numpy(),
            world_size=measured["world_size"].to_numpy(),
            throughput=measured["throughput_samples_per_s"].to_numpy(),
        ).sort_values(["world_size", "throughput"], ascending=False, kind="stable")
        parts.append(rows.drop_duplicates("value"))
    if not parts:
        return pd.DataFrame(columns=["field", "value", *COLUMNS])
    rows = pd.concat(parts, ignore_index=True)[["field", "value", *COLUMNS]]
    rows[["ratio", "ratio_low", "ratio_high"]] = rows[["ratio", "ratio_low", "ratio_high"]].astype(float)
    return rows.sort_values("ratio", ascending=False, kind="stable", ignore_index=True)


def trained_accuracy(configurations: pd.DataFrame, accuracy: Accuracy | None) -> pd.DataFrame:
    """Return the accuracy of trainings in each configuration's number format; indexed like `configurations`.

    In percent, with interval.
    """
    reached = by_precision(accuracy)
    formats = configurations.get("precision", pd.Series(dtype=object))
    return pd.DataFrame(
        {
            f"trained_percent{end}": 100 * formats.map(reached[f"top1{end}"]).astype(float)
            for end in ("", "_low", "_high")
        }
    )


def loss_summary(configurations: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Summarise the losses per configuration; indexed like `configurations`.

    steps: the losses of `Results`.

    final_loss: mean over all ranks and the last tenth of the plain window's steps (at least one), median over repeats.
    skipped_steps: steps of rank 0 whose loss scale is lower than that of the previous step; torch.amp.GradScaler lowers
    it if gradients are not finite. Null without a loss scale. non_finite_losses: rows with a non-finite loss, which is
    stored as null, in windows that record losses. Null if the study records no loss.
    """
    configuration = configuration_of(configurations)
    has_losses = bool(steps.loc[steps["trial_id"].isin(configuration.index), "loss"].notna().any())
    by_trial = steps.groupby("trial_id", observed=True)
    rows = {name: _trial_losses(part, has_losses) for name, part in by_trial if name in configuration.index}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=_TRIAL_COLUMNS, dtype=float)
    grouped = frame.groupby(configuration.reindex(frame.index))
    result = grouped[["skipped_steps", "non_finite_losses"]].sum(min_count=1)
    result.insert(0, "final_loss", frame["final_loss"].groupby(configuration.reindex(frame.index)).median())
    return result


_FIRST_LOSS_SCALE = 65536.0
"""Loss scale before the first step (the default of torch.amp.GradScaler)."""


_TRIAL_COLUMNS = ["final_loss", "skipped_steps", "non_finite_losses"]


def _trial_losses(steps: pd.DataFrame, has_losses: bool) -> list[float]:
    """Return `_TRIAL_COLUMNS` for one trial. has_losses: some trial of the study records losses."""
    plain = steps[steps["window"] == "plain"]
    first, last = plain["step"].min(), plain["step"].max()
    final = plain.loc[plain["step"] > last - max(1, (last - first + 1) // 10), "loss"].mean(skipna=False)
    scales = steps["loss_scale"].dropna()
    before = scales.shift(fill_value=_FIRST_LOSS_SCALE)
    skipped = (scales < before).sum() if len(scales) else np.nan
    return [final, skipped, steps["non_finite_losses"].sum() if has_losses else np.nan]
