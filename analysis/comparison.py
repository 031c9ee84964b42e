"""What one field changes where all others are equal: each of its values against a reference, with an interval."""

from collections.abc import Sequence

import pandas as pd

from analysis.scaling import RESULT_COLUMNS, throughput_estimates, trial_fields
from analysis.statistics import ratios

COLUMNS = ["configuration", "reference", "against", "ratio", "ratio_low", "ratio_high"]


def against_reference(found: pd.DataFrame, field: str, order: Sequence[object] = ()) -> pd.DataFrame:
    """Throughput of each configuration / that of the reference, a row for each configuration that has something to compare with.

    found: see `scaling.configurations`. order: values of `field` from the one that others are held against, if it was
    measured, to the last; values not in it follow, sorted. Configurations are compared where every field of a trial but
    this one is equal; a group's first value is its reference. Null values of `field` are left out. Rows lie group by group, in that order.

    Columns: configuration and reference (index into `found`), against (the reference's value of `field`), ratio without
    unit with `_low` and `_high`: 95 %, Welch's t on logarithms (see `statistics.ratios`), null for the reference itself.
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
    ratio = ratios(throughput_estimates(members), throughput_estimates(found.loc[first]).set_axis(members.index))
    ratio.loc[first == members.index, ["low", "high"]] = float("nan")
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
