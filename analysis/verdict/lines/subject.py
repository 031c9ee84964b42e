"""Choose the configurations that the card is about."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.compare.scaling import STRONG, WEAK, alike
from analysis.measure.configurations import LAYOUT, trial_fields
from analysis.study import Analysis, workload_label

LONGEST_WORKLOAD = 36
"""Maximum characters of a workload's name on the card; longer ones are cut."""


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
    """Return one subject per workload, the one that scales worst first; see `Analysis.headlines` for the rule."""
    configurations, found = analysis.configurations, []
    labels = shortened([workload_label(analysis, headline) for headline in analysis.headlines])
    for headline, label in zip(analysis.headlines, labels, strict=True):
        row = headline.scaling
        strong, strong_batch = (None, float("nan"))
        if row is not None and row["scaling"] == WEAK:
            strong, strong_batch = _strong_alike(analysis, row)
        index = headline.configuration
        subject = Subject(index, _row(configurations, index), headline.workload, label, row, strong, strong_batch)
        found.append(subject)
    return found


def subject_of(analysis: Analysis, trial_ids: Collection[str]) -> list[Subject]:
    """Return the configuration of these trials as the only subject; empty if none of them is done."""
    configurations = analysis.configurations
    found = [int(str(index)) for index, ids in configurations["trial_ids"].items() if {*ids} & {*trial_ids}]
    return [Subject(index, _row(configurations, index), {}, "", None, None) for index in found[:1]]


def _row(frame: pd.DataFrame, index: int) -> pd.Series:
    return frame.loc[[index]].iloc[0]


def label_before(subject: Subject) -> str:
    """Return the workload as the start of a line; empty if the study has one workload."""
    return f"{subject.label}: " if subject.label else ""


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
    rows = rows[alike(of_rows, subject, fixed).to_numpy()]
    if rows.empty:
        return None, float("nan")
    batches = rows["configuration"].map(configurations["global_batch"]).astype(float)
    return rows.iloc[int(batches.to_numpy().argmax())], float(batches.max())


def shortened(labels: Sequence[str]) -> list[str]:
    """Return labels of at most `LONGEST_WORKLOAD` characters, without the words that all begin with if need be."""
    short = [_cut(label) for label in labels]
    if short == list(labels):
        return short
    words = [label.split(" ") for label in labels]
    shared = len(os.path.commonprefix(words))
    while shared and words[0][shared - 1].startswith("-"):  # an argument whose values differ
        shared -= 1
    if not shared:
        return short
    return [_cut(" ".join(["…", *own[shared:]]) if own[shared:] else " ".join(own)) for own in words]


def _cut(label: str) -> str:
    return label if len(label) <= LONGEST_WORKLOAD else f"{label[: LONGEST_WORKLOAD - 1]}…"
