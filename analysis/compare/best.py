"""Find the best configuration for a goal, and the runner-up, among configurations of the same workload."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.compare.scaling import STRONG, alike
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
    configurations = without_emulated(configurations)
    workload = [name for name in fields.of_kind("workload") if name in axes]
    parts = configurations.groupby(workload, dropna=False, sort=False) if workload else [((), configurations)]
    distinguishing = [name for name in axes if name not in fields.timing]
    return [
        _best_configuration(distinguishing, dict(zip(workload, key, strict=True)), rows, scale) for key, rows in parts
    ]


@dataclass(frozen=True)
class Headline:
    """The configuration that stands for a workload (index of `configurations.configurations`).

    workload: values of the workload fields that vary in the study. shown: those that have an effect, for labels.
    scaling: its row of `scaling.scaling_rows` against fewer ranks with the same batch per rank, else with the same
    global batch; None if no fewer ranks were measured.
    """

    configuration: int
    workload: Mapping[str, Any]
    shown: Mapping[str, Any]
    scaling: pd.Series | None


def headlines(
    configurations: pd.DataFrame, scaling: pd.DataFrame, axes: Sequence[str], fields: Fields
) -> list[Headline]:
    """Return one headline per workload, the one that scales worst first.

    The rule: of all configurations that can be compared with fewer ranks, those on the largest number of ranks; of
    these, the one with the highest throughput. In a study of one size, the highest throughput alone decides. Emulated
    interconnects, and throughputs and efficiencies that are not resolved, count only if there is nothing else. A study
    at a constant global batch has no other comparison, so its answer is about that.
    """
    if configurations.empty:
        return []
    found = []
    for best in best_configurations(configurations, axes, fields):
        members = _members(configurations, best.workload)
        rows = scaling[(scaling["ideal"] > 1) & scaling["configuration"].isin(members.index)]
        trial = members.iloc[0].to_dict()
        shown = {name: best.workload[name] for name in fields.with_effect(best.workload, trial)}
        if rows.empty:
            found.append(Headline(best.best, best.workload, shown, None))
            continue
        row = _largest(rows, configurations)
        found.append(Headline(int(row["configuration"]), best.workload, shown, row))
    return sorted(found, key=_order)


def _order(headline: Headline) -> tuple[int, float]:
    """Sort headlines with a resolved efficiency first, the lowest one first; then the others."""
    if headline.scaling is None:
        return 2, 0.0
    return int(headline.scaling["efficiency_more"] > 0), float(headline.scaling["efficiency"])


def _members(configurations: pd.DataFrame, workload: Mapping[str, Any]) -> pd.DataFrame:
    """Return the configurations of a workload, without emulated interconnects if there are others."""
    return without_emulated(configurations[alike(configurations, workload, list(workload))])


def without_emulated(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows on the default interconnect, if there are any: others are emulated."""
    if "interconnect" not in rows:
        return rows
    real = rows["interconnect"].isna() | (rows["interconnect"] == "auto")
    return rows[real] if real.any() else rows


def _largest(rows: pd.DataFrame, configurations: pd.DataFrame) -> pd.Series:
    """Return the scaling row on most ranks with the highest throughput; weak scaling before strong."""
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    throughput = rows["configuration"].map(configurations["throughput_samples_per_s"]).astype(float)
    is_wide = rows["configuration"].map(configurations["throughput_samples_per_s_more"]).astype(float) > 0
    ordered = rows.assign(
        is_wide=is_wide | (rows["efficiency_more"] > 0), throughput=throughput, is_strong=rows["scaling"] == STRONG
    ).sort_values(["is_wide", "throughput", "is_strong"], ascending=[True, False, True], kind="stable")
    return ordered.iloc[0][rows.columns]


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
