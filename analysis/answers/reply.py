"""What a function that answers a question returns, and how numbers appear in its sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from analysis.measure.configurations import RESULT_COLUMNS, rows_with, throughput_estimates, trial_fields
from analysis.statistics import ratios_to_reference
from analysis.study import Analysis, study_ranks
from analysis.text import interval_decimals, not_resolved, number, percent, value_label

MS = 1e3


@dataclass(frozen=True)
class Reply:
    """An answer.

    numbers: what the text states, by name, in base units. reason: the measured reason in one word, such as "host";
    empty if the question has none.
    """

    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Missing:
    """Results cannot answer. why: clause after "because". options: arguments of `run` that would measure it.

    known: sentences about what the results do show. command: replaces `python -m study.scaling run STUDY`.
    """

    why: str
    options: str = ""
    known: str = ""
    command: str = ""


NEAR = 0.05
"""Loss of throughput that counts as equally fast."""

SAME_POINTS = 2.0
"""An interval of a difference in accuracy that holds 0 shows equal accuracy only if it is narrower than this."""


def size_of(analysis: Analysis, row: pd.Series) -> str:
    """Return the number of ranks of a row, as in "4 GPUs"."""
    return value_label("world_size", int(row["world_size"]), study_ranks(analysis))


def repeats(n: float) -> str:
    return "1 repeat" if n == 1 else f"{number(n, 0)} repeats"


def measured(row: pd.Series, name: str, decimals: int, scale: float = 1.0, unit: str = "") -> str:
    """Return a value with its unit and 95 % interval; without an interval, the number of repeats is in brackets."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if row.get(f"{name}_more", 0.0) > 0:
        return not_resolved(row[f"{name}_more"])
    if pd.isna(low) or pd.isna(high):
        shown = f"{number(scale * value, decimals)}{unit}"
        return f"{shown} ({repeats(row['n'])})" if pd.notna(row.get("n")) else shown
    decimals = interval_decimals(scale * low, scale * high, decimals)
    return (
        f"{number(scale * value, decimals)}{unit} [{number(scale * low, decimals)}, {number(scale * high, decimals)}]"
    )


def share(row: pd.Series, name: str, decimals: int, instead: str) -> str:
    """Return a share as `78.2 % [77.9, 78.5]`, or `78.2 % (reason)` without an interval."""
    low, high = (row[f"{name}_{end}"] for end in ("low", "high"))
    ends = instead if pd.isna(low) or pd.isna(high) else ""
    decimals = decimals if ends else interval_decimals(100 * low, 100 * high, decimals)
    shown = f"({ends})" if ends else f"[{number(100 * low, decimals)}, {number(100 * high, decimals)}]"
    return f"{percent(row[name], decimals)} {shown}"


def ms(seconds: float, decimals: int = 1) -> str:
    """Return seconds as milliseconds; a positive time that rounds to 0 is "less than 0.1 ms"."""
    least = 10**-decimals
    if 0 < MS * seconds < least:
        return f"less than {number(least, decimals)} ms"
    return f"{number(MS * seconds, decimals)} ms"


def times(value: float) -> str:
    return f"{number(value, 2)}x"


def span(values: pd.Series, decimals: int = 2, scale: float = 1.0, unit: str = "") -> str:
    """Return the median of several values with their range, or the value if there is one."""
    values = values.astype(float).dropna() * scale
    middle = f"{number(values.median(), decimals)}{unit}"
    if len(values) < 2:
        return middle
    ends = f"{number(values.min(), decimals)} to {number(values.max(), decimals)}{unit}"
    return f"{middle} (median of {len(values)}; {ends})"


def points(value: float) -> str:
    return percent(value, 1)


def pairs(analysis: Analysis, numerator: Mapping[str, object], denominator: Mapping[str, object]) -> pd.DataFrame:
    """Return throughput ratios of configurations that differ only in the given fields.

    Columns: configuration, reference, ratio with `_low`, `_high` and `_more`, and n (fewest repeats of the two).
    """
    rows = analysis.configurations
    names = [*numerator]
    if rows.empty or not set(names) <= set(rows):
        return pd.DataFrame(columns=["configuration", "reference", "ratio", "ratio_low", "ratio_high", "ratio_more"])
    rest = [name for name in trial_fields(rows) if name not in (*RESULT_COLUMNS, *names)]
    keyed = rows.assign(key=rows.groupby(rest, dropna=False, sort=False).ngroup())
    first = rows_with(keyed, denominator).drop_duplicates("key").reset_index().set_index("key")["configuration"]
    second = rows_with(keyed, numerator)
    second = second[second["key"].isin(first.index)]
    reference = second["key"].map(first).astype(int)
    ratio = ratios_to_reference(throughput_estimates(rows), reference)
    return pd.DataFrame(
        {
            "configuration": second.index,
            "reference": reference.to_numpy(),
            "n": pd.concat([second["n"], reference.map(rows["n"])], axis=1).min(axis=1).to_numpy(),
            **{f"ratio{end}": ratio[name].to_numpy() for end, name in _ENDS.items()},
        }
    )


_ENDS = {"": "ratio", "_low": "low", "_high": "high", "_more": "more"}


def preferred(rows: pd.DataFrame, name: str, order: Sequence[object]) -> pd.DataFrame:
    """Return the rows with the first value of `order` that occurs; all rows if none does."""
    for value in order:
        if name in rows and (rows[name] == value).any():
            return rows[rows[name] == value]
    return rows


def highest(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return the first row with the largest value of a column; null values do not count."""
    return rows.iloc[int(np.nanargmax(rows[name].to_numpy(dtype=float, na_value=np.nan)))]


def lowest(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return the first row with the smallest value of a column; null values do not count."""
    return rows.iloc[int(np.nanargmin(rows[name].to_numpy(dtype=float, na_value=np.nan)))]
