"""Choose the configurations that the card is about."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.compare.best import best_configurations
from analysis.compare.scaling import STRONG, WEAK
from analysis.measure.configurations import LAYOUT, trial_fields
from analysis.study import Analysis, study_ranks
from analysis.text import configuration_label

LONGEST_WORKLOAD = 36
"""Maximum characters of a workload's name on the card; longer ones are cut."""


MOST_WORKLOADS = 3
"""Maximum workloads that the card lists individually."""


@dataclass(frozen=True)
class Subject:
    """The configuration that stands for a workload.

    configuration: index of `configurations`. row: its row.
    workload: values of the workload fields that vary in the study. label: the same as text; empty if there is only one.
    scaling: its row of `Analysis.scaling` against fewer ranks with the same batch per rank, else with the same global
    batch; None if no fewer ranks were measured.
    strong: the row with the same global batch of a configuration like it, on as many ranks; None if there is none or if
    it is `scaling`. strong_batch: its global batch.
    """

    configuration: int
    row: pd.Series
    workload: Mapping[str, Any]
    label: str
    scaling: pd.Series | None
    strong: pd.Series | None
    strong_batch: float = float("nan")


def subjects(analysis: Analysis) -> list[Subject]:
    """Return one subject per workload, the one that scales worst first.

    The rule: of all configurations that can be compared with fewer ranks, those on the largest number of ranks; of
    these, the one with the highest throughput. In a study of one size, the highest throughput alone decides. Emulated
    interconnects, and throughputs and efficiencies that are not resolved, count only if there is nothing else. A study
    at a constant global batch has no other comparison, so the card then answers its question.
    """
    configurations = analysis.configurations
    if configurations.empty:
        return []
    found = []
    for best in best_configurations(configurations, analysis.axes, analysis.fields):
        members = _members(analysis, best.workload)
        rows = analysis.scaling[(analysis.scaling["ideal"] > 1) & analysis.scaling["configuration"].isin(members.index)]
        label = _short(configuration_label(best.workload, best.workload, study_ranks(analysis)))
        if rows.empty:
            found.append(Subject(best.best, _row(configurations, best.best), best.workload, label, None, None))
            continue
        row = _largest(rows, configurations)
        strong, strong_batch = _strong_alike(analysis, row) if row["scaling"] == WEAK else (None, float("nan"))
        index = int(row["configuration"])
        found.append(Subject(index, _row(configurations, index), best.workload, label, row, strong, strong_batch))
    return sorted(found, key=_order)


def _row(frame: pd.DataFrame, index: int) -> pd.Series:
    return frame.loc[[index]].iloc[0]


def _order(subject: Subject) -> tuple[int, float]:
    """Sort subjects with a resolved efficiency first, the lowest one first; then the others."""
    if subject.scaling is None:
        return 2, 0.0
    return int(subject.scaling["efficiency_more"] > 0), float(subject.scaling["efficiency"])


def label_before(subject: Subject) -> str:
    """Return the workload as the start of a line; empty if the study has one workload."""
    return f"{subject.label}: " if subject.label else ""


def _members(analysis: Analysis, workload: Mapping[str, Any]) -> pd.DataFrame:
    """Return the configurations of a workload, without emulated interconnects if there are others."""
    rows = analysis.configurations
    for name, value in workload.items():
        rows = rows[(rows[name] == value) | (rows[name].isna() & pd.isna(value))]
    if "interconnect" in rows:
        real = rows["interconnect"].isna() | (rows["interconnect"] == "auto")
        rows = rows[real] if real.any() else rows
    return rows


def _largest(rows: pd.DataFrame, configurations: pd.DataFrame) -> pd.Series:
    """Return the scaling row on most ranks with the highest throughput; weak scaling before strong."""
    rows = rows[rows["world_size"] == rows["world_size"].max()]
    throughput = rows["configuration"].map(configurations["throughput_samples_per_s"]).astype(float)
    is_wide = rows["configuration"].map(configurations["throughput_samples_per_s_more"]).astype(float) > 0
    ordered = rows.assign(
        is_wide=is_wide | (rows["efficiency_more"] > 0), throughput=throughput, is_strong=rows["scaling"] == STRONG
    ).sort_values(["is_wide", "throughput", "is_strong"], ascending=[True, False, True], kind="stable")
    return ordered.iloc[0][rows.columns]


def _strong_alike(analysis: Analysis, weak: pd.Series) -> tuple[pd.Series | None, float]:
    """Return the strong-scaling row on as many ranks that differs from the subject in the batch only, and its batch.

    Of several, the one with the largest global batch.
    """
    configurations = analysis.configurations
    rows = analysis.scaling[
        (analysis.scaling["scaling"] == STRONG)
        & (analysis.scaling["ideal"] > 1)
        & (analysis.scaling["world_size"] == weak["world_size"])
    ]
    subject = _row(configurations, int(weak["configuration"]))
    fixed = [name for name in analysis.axes if name in trial_fields(configurations)]
    fixed = [name for name in fixed if name not in ("batch_per_gpu", *LAYOUT)]
    of_rows = configurations.loc[rows["configuration"].astype(int)]
    alike = pd.Series(True, index=of_rows.index)
    for name in fixed:
        alike &= (of_rows[name] == subject[name]) | (of_rows[name].isna() & pd.isna(subject[name]))
    rows = rows[alike.to_numpy()]
    if rows.empty:
        return None, float("nan")
    batches = rows["configuration"].map(configurations["global_batch"]).astype(float)
    return rows.iloc[int(batches.to_numpy().argmax())], float(batches.max())


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_WORKLOAD else f"{label[: LONGEST_WORKLOAD - 1]}…"
