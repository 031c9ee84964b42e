"""The best configuration for a goal and the next, among those that are alternatives to each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.load.fields import Fields
from analysis.measure.configurations import throughput_estimates
from analysis.statistics import ratios_to_reference

MOST_WORKS = 3
"""kinds of work whose best configurations are named one by one"""


@dataclass(frozen=True)
class Contest:
    """Configurations that do the same work (indices of `scaling.configurations`).

    work: its values of those fields of kind workload in which a study's configurations differ. first, second: the best and the
    next that differs in more than how it was timed; second is None where there is none. ratio, low, high: first's value /
    second's, with its 95 % interval (Welch's t on logarithms; NaN for one repeat).
    """

    work: Mapping[str, Any]
    first: int
    second: int | None
    ratio: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool | None:
        """Whether the two may be equal; None where one repeat cannot tell."""
        return None if pd.isna(self.low) else bool(self.low <= 1 <= self.high)


def contests(found: pd.DataFrame, axes: Sequence[str], fields: Fields, scale: pd.Series | None = None) -> list[Contest]:
    """One contest for each kind of work, in the order of configurations; none where none was measured.

    found: see `scaling.configurations`. axes: fields that vary among them. fields: what the study says of them. scale: what a configuration's throughput is multiplied by to give the value that counts, indexed like
    `found`; left out: 1. Emulated interconnects take part only where nothing else was measured, for
    nobody would choose one.
    """
    scale = pd.Series(1.0, index=found.index) if scale is None else scale
    if "interconnect" in found:
        chosen = found["interconnect"].isna() | (found["interconnect"] == "auto")
        found = found[chosen] if chosen.any() else found
    work = [name for name in fields.of_kind("workload") if name in axes]
    parts = found.groupby(work, dropna=False, sort=False) if work else [((), found)]
    telling = [name for name in axes if name not in fields.timing]
    return [_contest(telling, dict(zip(work, key, strict=True)), rows, scale) for key, rows in parts]


def _contest(telling: list[str], work: Mapping[str, Any], rows: pd.DataFrame, scale: pd.Series) -> Contest:
    value = (rows["throughput_samples_per_s"] * scale).reindex(rows.index).sort_values(ascending=False)
    first = int(value.index[0])
    values = rows[telling].astype(object).where(rows[telling].notna(), None)
    alike = [tuple(row) == tuple(values.loc[first]) for row in values.to_numpy()]
    others = value.drop(rows.index[alike])
    if others.empty:
        return Contest(work, first, None, float("nan"), float("nan"), float("nan"))
    second = int(others.index[0])
    estimates = throughput_estimates(rows).assign(log_mean=lambda frame: frame["log_mean"] + np.log(scale))
    between = ratios_to_reference(estimates, pd.Series({first: second})).iloc[0]
    ratio = float(value[first] / value[second])
    return Contest(work, first, second, ratio, float(between["low"]), float(between["high"]))
