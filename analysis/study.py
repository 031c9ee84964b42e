"""Analyse a study: `analyse` computes everything that tables, figures, sentences and predictions need."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.checks.finding import Finding, check_data
from analysis.checks.steps import findings
from analysis.compare.accuracy import Accuracy, accuracy
from analysis.compare.batch_size import batch_curve, epoch_seconds
from analysis.compare.best import MAX_LISTED_WORKLOADS, Headline, headlines
from analysis.compare.bottleneck import gain_rows, regions, removable
from analysis.compare.causes import lost_ranks
from analysis.compare.communication import Communication, communication
from analysis.compare.ladder import ladder_rows
from analysis.compare.one_field import change_rows
from analysis.compare.scaling import scaling_rows, speed_up_rows
from analysis.compare.steps import loss_rows, timeline_rows
from analysis.measure.configurations import configurations, derived_lengths, rows_with, trial_fields
from analysis.measure.measures import summaries
from analysis.read.environment import by_environment, comparable_fingerprints, difference
from analysis.read.fields import Fields
from analysis.read.results import Results
from analysis.read.study_record import StudyRecord
from analysis.read.unread import unread_axes, with_merged_axes
from analysis.text import RankNouns, configuration_label, join, sizes_to_measure, with_short_arguments


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything computed from the trials of one environment; the input of all tables, figures and sentences.

    results: the loaded trials.
    configurations: one row per measured configuration, see `measure.configurations`.
    scaling: see `compare.scaling.scaling_rows`.
    axes: fields that vary among configurations, or among training trials if nothing else is done.
    fixed: the other fields, with their value.
    environment: the fingerprint that all done trials share (see `load.environment.fingerprint`); empty if none is done.
    measured: one row per done trial, see `measure.measures.summaries`.
    communication: see `compare.communication.Communication`.
    findings: results of the data checks, see `checks.steps.CHECKS`.
    accuracy: of trials that train to an accuracy (see `compare.accuracy.Accuracy`); None if there are none. They have
        no plain window and appear in none of the other attributes.
    unread: values of the fields that vary although the workload never reads them, by field, see `read.unread`.
    """

    results: Results
    configurations: pd.DataFrame
    scaling: pd.DataFrame
    axes: tuple[str, ...]
    fixed: dict[str, Any]
    environment: dict[str, str]
    measured: pd.DataFrame
    communication: Communication
    findings: tuple[Finding, ...]
    accuracy: Accuracy | None
    unread: Mapping[str, tuple[Any, ...]]

    @property
    def fields(self) -> Fields:
        """Return the study's declaration of its trial fields."""
        return self.results.fields

    @cached_property
    def record(self) -> StudyRecord:
        return StudyRecord.of(self.results.study)

    @cached_property
    def batch_curve(self) -> pd.DataFrame:
        """See `compare.batch_size.batch_curve`."""
        return batch_curve(self.results.trials, self.configurations)

    @cached_property
    def epoch_s(self) -> dict[Hashable, float]:
        """See `compare.batch_size.epoch_seconds`."""
        return epoch_seconds(self.configurations, self.measured)

    @cached_property
    def speed_ups(self) -> pd.DataFrame:
        """See `compare.scaling.speed_up_rows`."""
        return speed_up_rows(self.configurations, [*self.axes, *self.fixed], self.epoch_s, self.fields)

    @cached_property
    def ladder(self) -> pd.DataFrame:
        """See `compare.ladder.ladder_rows`."""
        return ladder_rows(self.record, self.measured, self.accuracy)

    @cached_property
    def headlines(self) -> list[Headline]:
        """See `compare.best.headlines`. If they are many and none scales, those with most to gain come first."""
        found = headlines(self.configurations, self.scaling, self.axes, self.fields)
        if len(found) <= MAX_LISTED_WORKLOADS or any(headline.scaling is not None for headline in found):
            return found
        most = removable(self.regions).max(axis=1)
        return sorted(found, key=lambda headline: -most[headline.configuration])

    @property
    def headline(self) -> int | None:
        """Return the configuration that the study's answer is about; None if no timed trial is done."""
        return self.headlines[0].configuration if self.headlines else None

    @property
    def headline_row(self) -> pd.Series:
        """Return the headline's row of `configurations`. There must be a headline."""
        return self.configurations.loc[[self.headline]].iloc[0]

    @property
    def headline_regions(self) -> pd.Series:
        """Return the headline's row of `regions`. There must be a headline."""
        return self.regions.loc[[self.headline]].iloc[0]

    @cached_property
    def lost_ranks(self) -> dict[str, float]:
        """Return the ranks lost by the headline configuration, see `compare.causes.lost_ranks`.

        Empty if its efficiency is not resolved.
        """
        row = self.headlines[0].scaling if self.headlines else None
        if row is not None and row["efficiency_more"] > 0:
            return {}
        return lost_ranks(row, self.communication.exposed, self.configurations)

    @cached_property
    def changes(self) -> pd.DataFrame:
        """Return what changes gain with the headline's workload, see `compare.one_field.change_rows`."""
        workload = self.headlines[0].shown if self.headlines else {}
        return change_rows(rows_with(self.configurations, workload), self.fields)

    @cached_property
    def regions(self) -> pd.DataFrame:
        """See `compare.bottleneck.regions`."""
        return regions(self.configurations, self.communication)

    @cached_property
    def gains(self) -> pd.DataFrame:
        """See `compare.bottleneck.gain_rows`."""
        improvement = self.record.improvement
        return gain_rows(self.regions, self.changes, self.configurations, self.headline, study_ranks(self), improvement)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """See `compare.steps.timeline_rows`."""
        return timeline_rows(self.results, self.configurations, self.communication.exposed)

    @cached_property
    def loss_curves(self) -> pd.DataFrame:
        """See `compare.steps.loss_rows`."""
        return loss_rows(self.configurations, self.results.losses)


def analyses(results: Results) -> list[Analysis]:
    """Analyse each environment separately, the one with most done trials first.

    Raises ValueError naming a missing column.
    """
    return [analyse(part) for part in by_environment(results)]


def analyse(results: Results) -> Analysis:
    """Analyse trials that ran under one environment.

    Trials that differ only in fields that their workload never reads count as repeats, see `read.unread`.
    Raises ValueError naming a missing column, or the difference if done trials ran under several environments.
    """
    unread = unread_axes(results.trials)
    results = with_merged_axes(results)
    measured = summaries(results.trials, results.windows)
    measured = measured.drop(columns=derived_lengths(measured))
    environments = list(comparable_fingerprints(measured).values())
    environment = environments[0] if environments else {}
    if other := next((other for other in environments if other != environment), None):
        raise ValueError(f"these trials ran under different environments: {difference(other, environment)}")
    fields = trial_fields(measured)
    configured = configurations(measured)
    trained = accuracy(results)
    rows = trained.runs if trained and configured.empty else configured
    axes = tuple(name for name in fields if name != "repeat" and rows[name].nunique(dropna=False) > 1)
    fixed = {name: rows[name].iloc[0] for name in fields if name not in (*axes, "repeat")} if len(rows) else {}
    scaling = scaling_rows(configured, results.fields)
    breakdown = communication(results, configured, scaling)
    checked = findings(check_data(configured, measured, results.shapes, results.windows))
    return Analysis(
        results, configured, scaling, axes, fixed, environment, measured, breakdown, tuple(checked), trained, unread
    )


def study_ranks(analysis: Analysis) -> RankNouns:
    """Return what this study's ranks are called, with the labels of its fields."""
    trials = analysis.results.trials
    return RankNouns.of(trials["device"].dropna() if "device" in trials else (), analysis.results.fields.labels)


def how_to_measure_scaling(analysis: Analysis, largest: int) -> str:
    """Say what a study lacks in which `largest` is the only number of ranks, or the largest: sizes, or done trials."""
    trials = analysis.results.trials
    done = set(trials.loc[trials["status"] == "done", "world_size"])
    if failed := sorted({int(size) for size in trials["world_size"].dropna()} - done):
        sizes = join([str(size) for size in failed], "or")
        return f"no trial on {sizes} {study_ranks(analysis)[failed != [1]]} is done"
    return f"add --gpus {sizes_to_measure(largest)}"


def workload_label(analysis: Analysis, headline: Headline) -> str:
    """Return the label of a headline's workload; empty if the study has one workload."""
    row = analysis.configurations.loc[[headline.configuration]].iloc[0]
    return configuration_label(
        with_short_arguments(analysis.configurations, row), headline.shown, study_ranks(analysis)
    )
