"""Find the best configuration for a goal, and the runner-up, among configurations of the same workload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG, WEAK
from analysis.measure.configurations import throughput_estimates
from analysis.read.fields import Fields
from analysis.statistics import ratios_to_reference

MAX_LISTED_WORKLOADS = 3
"""Largest number of workloads whose best configurations are listed individually."""


@dataclass(frozen=True)
class BestConfiguration:
    """The best configuration of a workload, and the runner-up (indices of `configurations.configurations`).

    workload: its values of the workload fields that vary in the study. runner_up: the next configuration that differs
    in more than its timing; None if there is none. A value that is not resolved (see `statistics.intervals`) only
    counts if no other is. ratio, low, high, more: value of the best / the runner-up's, see `statistics.ratios`.
    """

    workload: Mapping[str, Any]
    best: int
    runner_up: int | None
    ratio: float
    low: float
    high: float
    more: float

    @property
    def within_noise(self) -> bool | None:
        """Return True if the two are not significantly different; None for a single repeat."""
        return None if pd.isna(self.low) else bool(self.low <= 1 <= self.high)


def best_configurations(
    configurations: pd.DataFrame, axes: Sequence[str], fields: Fields, scale: pd.Series | None = None
) -> list[BestConfiguration]:
    """Return the best configuration per workload, in the order of configurations; empty without measurements.

    configurations: see the function of that name. axes: fields that vary among them. fields: declared fields of the
    study. scale: factor from throughput to the value to maximise, indexed like `configurations` (default: 1). Emulated
    interconnects only count if nothing else was measured, since nobody would choose one.
    """
    scale = pd.Series(1.0, index=configurations.index) if scale is None else scale
    if "interconnect" in configurations:
        real = configurations["interconnect"].isna() | (configurations["interconnect"] == "auto")
        configurations = configurations[real] if real.any() else configurations
    workload = [name for name in fields.of_kind("workload") if name in axes]
    parts = configurations.groupby(workload, dropna=False, sort=False) if workload else [((), configurations)]
    distinguishing = [name for name in axes if name not in fields.timing]
    return [
        _best_configuration(distinguishing, dict(zip(workload, key, strict=True)), rows, scale) for key, rows in parts
    ]


def headline(configurations: pd.DataFrame, scaling: pd.DataFrame, axes: Sequence[str], fields: Fields) -> int | None:
    """Return the configuration that a study's answer is about (index of `configurations`); None without measurements.

    It is the fastest on most ranks: of those in weak scaling if there are any, else in strong scaling, else of all. Of
    several workloads, it is the one that scales worst.
    """
    if configurations.empty:
        return None
    efficiency: dict[int, float] = {}
    chosen = configurations
    for kind in (WEAK, STRONG):
        rows = scaling[(scaling["scaling"] == kind) & (scaling["ideal"] > 1)]
        if len(rows):
            efficiency = dict(zip(rows["configuration"].astype(int), rows["efficiency"].astype(float), strict=True))
            chosen = configurations.loc[list(efficiency)]
            break
    best = []
    for workload in best_configurations(chosen, axes, fields):
        rows = chosen
        for name, value in workload.workload.items():
            rows = rows[(rows[name] == value) | (rows[name].isna() & pd.isna(value))]
        rows = rows[rows["world_size"] == rows["world_size"].max()]
        best += [found.best for found in best_configurations(rows, axes, fields)]
    return min(best, key=lambda index: efficiency.get(index, 1.0))


def _best_configuration(
    distinguishing: list[str], workload: Mapping[str, Any], rows: pd.DataFrame, scale: pd.Series
) -> BestConfiguration:
    value = (rows["throughput_samples_per_s"] * scale).reindex(rows.index).sort_values(ascending=False)
    is_wide = rows["throughput_samples_per_s_more"].reindex(value.index) > 0
    value = pd.concat([value[~is_wide], value[is_wide]])
    best = int(value.index[0])
    values = rows[distinguishing].astype(object).where(rows[distinguishing].notna(), None)
    same_as_best = [tuple(row) == tuple(values.loc[best]) for row in values.to_numpy()]
    others = value.drop(rows.index[same_as_best])
    if others.empty:
        return BestConfiguration(workload, best, None, *[float("nan")] * 4)
    runner_up = int(others.index[0])
    estimates = throughput_estimates(rows).assign(log_mean=lambda frame: frame["log_mean"] + np.log(scale))
    comparison = ratios_to_reference(estimates, pd.Series({best: runner_up})).iloc[0]
    ratio, low, high, more = (float(comparison[name]) for name in ("ratio", "low", "high", "more"))
    return BestConfiguration(workload, best, runner_up, ratio, low, high, more)
