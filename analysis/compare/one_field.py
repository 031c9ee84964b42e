"""What one field changes where all others are equal: each of its values against a reference, with an interval."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.compare.accuracy import Accuracy, by_precision
from analysis.measure.configurations import RESULT_COLUMNS, throughput_estimates, trial_fields
from analysis.measure.measures import configuration_of
from analysis.statistics import ratios_to_reference

COLUMNS = ["configuration", "reference", "against", "ratio", "ratio_low", "ratio_high"]


def against_reference(found: pd.DataFrame, field: str, order: Sequence[object] = ()) -> pd.DataFrame:
    """Throughput of each configuration / that of the reference, a row for each configuration that has something to compare with.

    found: see `scaling.configurations`. order: values of `field` from the one that others are held against, if it was
    measured, to the last; values not in it follow, sorted. Configurations are compared where every field of a trial but
    this one is equal; a group's first value is its reference. Null values of `field` are left out. Rows lie group by group, in that order.

    Columns: configuration and reference (index into `found`), against (the reference's value of `field`), ratio without
    unit with `_low` and `_high`: 95 %, Welch's t on logarithms (see `statistics.ratios_to_reference`), null for the reference itself.
    """
    if found.empty or field not in found or found[field].nunique() < 2:
        return pd.DataFrame(columns=COLUMNS)
    found = found.dropna(subset=field)  # trials older than the field
    others = [name for name in trial_fields(found) if name not in (*RESULT_COLUMNS, field)]
    rest = sorted(
        (value for value in found[field].unique() if value not in order), key=lambda value: (str(type(value)), value)
    )
    place = {value: i for i, value in enumerate((*order, *rest))}
    members = found.assign(
        group=found.groupby(others, dropna=False, sort=False).ngroup() if others else 0, place=found[field].map(place)
    )
    members = members[members[field].groupby(members["group"]).transform("nunique") > 1]
    if members.empty:
        return pd.DataFrame(columns=COLUMNS)
    members = members.sort_values(["group", "place"], kind="stable")
    first = members.index.to_series().groupby(members["group"]).transform("first")
    ratio = ratios_to_reference(throughput_estimates(found), first)
    return pd.DataFrame(
        {
            "configuration": members.index,
            "reference": first,
            "against": found.loc[first, field].to_numpy(),
            "ratio": ratio["ratio"],
            "ratio_low": ratio["low"],
            "ratio_high": ratio["high"],
        }
    ).reset_index(drop=True)


def trained(found: pd.DataFrame, accuracy: Accuracy | None) -> pd.DataFrame:
    """What trainings in a configuration's number format reached, in percent with interval; indexed like `found`."""
    reached = by_precision(accuracy)
    formats = found.get("precision", pd.Series(dtype=object))
    return pd.DataFrame(
        {
            f"trained_percent{end}": 100 * formats.map(reached[f"top1{end}"]).astype(float)
            for end in ("", "_low", "_high")
        }
    )


def losses(found: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """What a configuration's losses say, indexed like `found`.

    steps: the losses of `Results`.

    final_loss: mean over all ranks and the last tenth of the plain window's steps (at least one), median over repeats.
    skipped_steps: steps of rank 0 whose loss scale is lower than that of the step before, which is what
    torch.amp.GradScaler does where gradients are not finite; null without a loss scale. unfinite_losses: rows without a
    loss in windows that note one (a loss that is not finite is kept as null); null where no step of the study has a loss.
    """
    configuration = configuration_of(found)
    noted = bool(steps.loc[steps["trial_id"].isin(configuration.index), "loss"].notna().any())
    each = steps.groupby("trial_id", observed=True)
    rows = {name: _of_trial(part, noted) for name, part in each if name in configuration.index}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=_OF_TRIAL, dtype=float)
    grouped = frame.groupby(configuration.reindex(frame.index))
    result = grouped[["skipped_steps", "unfinite_losses"]].sum(min_count=1)
    result.insert(0, "final_loss", frame["final_loss"].groupby(configuration.reindex(frame.index)).median())
    return result


_FIRST_LOSS_SCALE = 65536.0
"""before the first step, and kept with each after it (torch.amp.GradScaler's own)"""


_OF_TRIAL = ["final_loss", "skipped_steps", "unfinite_losses"]


def _of_trial(steps: pd.DataFrame, noted: bool) -> list[float]:
    """`_OF_TRIAL` from the losses of one trial; `noted`: some trial of the study has a loss."""
    plain = steps[steps["window"] == "plain"]
    first, last = plain["step"].min(), plain["step"].max()
    final = plain.loc[plain["step"] > last - max(1, (last - first + 1) // 10), "loss"].mean(skipna=False)
    scales = steps["loss_scale"].dropna()
    before = scales.shift(fill_value=_FIRST_LOSS_SCALE)
    skipped = (scales < before).sum() if len(scales) else np.nan
    return [final, skipped, steps["unfinite_losses"].sum() if noted else np.nan]
