"""A study's trials of one environment, computed: what tables, figures, sentences and predictions are made from."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from analysis.checks.finding import Finding, data
from analysis.checks.steps import findings
from analysis.compare.accuracy import Accuracy, accuracy
from analysis.compare.batch_size import batch_curve, epoch_seconds
from analysis.compare.communication import Communication, communication
from analysis.compare.ladder import ladder_rows
from analysis.compare.scaling import scaling_rows, speed_up_rows
from analysis.compare.steps import loss_rows, timeline_rows
from analysis.load.environment import by_environment, comparable_fingerprints, difference
from analysis.load.fields import Fields
from analysis.load.results import Results
from analysis.load.study_record import StudyRecord
from analysis.measure.configurations import configurations, derived_lengths, trial_fields
from analysis.measure.measures import summaries
from analysis.text import rank_noun


@dataclass(frozen=True, eq=False)
class Analysis:
    """The trials of one environment, computed: what every table, figure and sentence of the report is made from.

    results: these trials as measured. configurations: see `configurations`. scaling: see `scaling_rows`. axes: fields
    that vary among configurations, or among trainings where nothing else is done. fixed: fields that do not, with their value. environment: the fingerprint that all
    done trials share (see `environments.fingerprint`); empty where no trial is done. measured: a row a done trial, see
    `measures.summaries`. communication: see `communication.Communication`. findings: what `checks.CHECKS` found. accuracy: of trials that were
    trained to an accuracy (see `accuracy.Accuracy`), which have no plain window and are in none of the others; None
    where there are none.
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

    @property
    def fields(self) -> Fields:
        """What the study says of the fields of its trials."""
        return self.results.fields

    @cached_property
    def record(self) -> StudyRecord:
        return StudyRecord.of(self.results.study)

    @cached_property
    def batch_curve(self) -> pd.DataFrame:
        """See `batch_curves.batch_curve`."""
        return batch_curve(self.results.trials, self.configurations)

    @cached_property
    def epoch_s(self) -> dict[Hashable, float]:
        """See `batch_curves.epoch_seconds`."""
        return epoch_seconds(self.configurations, self.measured)

    @cached_property
    def speed_ups(self) -> pd.DataFrame:
        """See `speed_up.speed_up_rows`."""
        return speed_up_rows(self.configurations, [*self.axes, *self.fixed], self.epoch_s, self.fields)

    @cached_property
    def ladder(self) -> pd.DataFrame:
        """See `ladder.ladder_rows`."""
        return ladder_rows(self.record, self.measured, self.accuracy)

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """See `step_rows.timeline_rows`."""
        return timeline_rows(self.results, self.configurations, self.communication.exposed)

    @cached_property
    def loss_curves(self) -> pd.DataFrame:
        """See `step_rows.loss_rows`."""
        return loss_rows(self.configurations, self.results.losses)


def analyses(results: Results) -> list[Analysis]:
    """An analysis of each environment, that with most done trials first. Raises ValueError naming a missing column."""
    return [analyse(part) for part in by_environment(results)]


def analyse(results: Results) -> Analysis:
    """Everything that the report compares, of trials that ran under one environment.

    Raises ValueError naming a column that a frame lacks, or saying what differs where done trials ran under several.
    """
    rows = summaries(results.trials, results.windows)
    rows = rows.drop(columns=derived_lengths(rows))
    seen = list(comparable_fingerprints(rows).values())
    environment = seen[0] if seen else {}
    if unlike := next((other for other in seen if other != environment), None):
        raise ValueError(f"these trials ran under unlike environments: {difference(unlike, environment)}")
    fields = trial_fields(rows)
    found = configurations(rows)
    trained = accuracy(results)
    shown = trained.runs if trained and found.empty else found
    varying = tuple(name for name in fields if name != "repeat" and shown[name].nunique(dropna=False) > 1)
    fixed = {name: shown[name].iloc[0] for name in fields if name not in (*varying, "repeat")} if len(shown) else {}
    scaling = scaling_rows(found, results.fields)
    traffic = communication(results, found, scaling)
    odd = findings(data(found, rows, results.shapes, results.windows))
    return Analysis(results, found, scaling, varying, fixed, environment, rows, traffic, tuple(odd), trained)


def study_ranks(analysis: Analysis) -> tuple[str, str]:
    """What this study's ranks are called, one and several."""
    trials = analysis.results.trials
    return rank_noun(trials["device"].dropna() if "device" in trials else ())
