"""Read the finished trials of a search from its results folder."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from analysis.measure.configurations import tokens_per_sample
from analysis.measure.measures import summaries
from analysis.measure.training import reached_target, training_runs
from analysis.read.results import Results, load_reduced
from analysis.study import analyses
from analysis.text import number
from study.errors import counted
from study.improve.evidence import Evidence, Run

TARGET_NOT_REACHED = "target_not_reached"
"""Status of a training that ended before its target accuracy."""

Shares = tuple[Mapping[str, float], str | None]


@dataclass
class Observer:
    """Reads the results folder `out` again and again. Shares of finished trials are computed once."""

    out: str
    shares: dict[tuple[str, ...], Shares] = field(default_factory=dict)
    results: Results | None = None

    def evidence(self) -> Evidence:
        """Return what the trials that have ended by now show. Raises ResultsError if the folder cannot be read."""
        self.results = results = load_reduced(self.out)
        measured = summaries(results.trials, results.windows) if len(results.trials) else pd.DataFrame()
        throughput: dict[str, float] = {}
        if len(measured):
            throughput = dict(measured.set_index("trial_id")["throughput_samples_per_s"].dropna().items())  # type: ignore[arg-type]
        trainings = training_runs(results.trials, results.epochs)
        reached: dict[str, float] = {}
        if len(trainings):
            throughput |= dict(trainings.set_index("trial_id")["throughput_samples_per_s"].items())  # type: ignore[arg-type]
            reached = dict(reached_target(results.epochs, trainings, None)["time_to_target_s"].items())  # type: ignore[arg-type]
        short = {} if trainings.empty else _short_of_target(results.epochs, trainings, reached)
        runs, groups = {}, set()
        for _, row in results.trials.sort_values("started_at").iterrows():
            begins_at = started_at = float(row["started_at"])
            if row["worker_group"] not in groups:
                begins_at = min(started_at, row["environment"].get("group", {}).get("asked_at", started_at))
            groups.add(row["worker_group"])
            name, start_s, duration_s = row["trial_id"], started_at - begins_at, float(row["duration_s"])
            runs[name] = Run(
                name,
                TARGET_NOT_REACHED if name in short else row["status"],
                throughput.get(name),
                begins_at,
                start_s + duration_s,
                short.get(name) or row["reason"] or "",
                start_s,
                reached.get(name),
            )
        return Evidence(runs, self._shares, self._losses)

    def tokens_per_sample(self, trial_id: str) -> float | None:
        """Return the tokens per sample of a trial; None if unknown."""
        assert self.results is not None
        rows = self.results.trials[self.results.trials["trial_id"] == trial_id]
        return tokens_per_sample(rows.iloc[0]["environment"]) if len(rows) else None

    def _shares(self, trial_ids: tuple[str, ...]) -> Shares:
        if trial_ids not in self.shares:
            assert self.results is not None
            rows = analyses(_of_trials(self.results, trial_ids))[0].regions
            self.shares[trial_ids] = _first(rows)
        return self.shares[trial_ids]

    def _losses(self, trial_id: str) -> Sequence[float]:
        assert self.results is not None
        rows = self.results.trials[self.results.trials["trial_id"] == trial_id]
        ranks = [rank.get("probe") for rank in rows.iloc[0]["environment"].get("ranks", ())] if len(rows) else []
        if any(ranks):
            return _mean_losses([probe.get("losses") or [] for probe in ranks if probe])
        losses = self.results.losses
        return losses.loc[losses["trial_id"] == trial_id, "loss"].astype(float).tolist()


def _mean_losses(ranks: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the mean over ranks of each step's loss in a user's own code; NaN if one is not finite."""
    return [math.nan if None in values else float(np.mean(values)) for values in zip(*ranks, strict=False)]


def _short_of_target(epochs: pd.DataFrame, trainings: pd.DataFrame, reached: Mapping[str, float]) -> dict[str, str]:
    """Return by trial id why trainings have no time to their target accuracy."""
    best = epochs.groupby("trial_id", observed=True)["validation_top1"].max()
    return {
        row["trial_id"]: f"best accuracy {number(float(best[row['trial_id']]), 3)} in "
        f"{counted(int(row['epochs']), 'epoch')}, target {row['target_accuracy']:g}"
        for _, row in trainings.iterrows()
        if row["trial_id"] not in reached and row["target_accuracy"] == row["target_accuracy"]
    }


def _first(rows: pd.DataFrame) -> Shares:
    if rows.empty:
        return {}, None
    row = rows.iloc[0]
    bound = row["bound"]
    return {name: float(row[name]) for name in rows.columns if name != "bound"}, bound if isinstance(
        bound, str
    ) else None


def _of_trials(results: Results, trial_ids: Sequence[str]) -> Results:
    """Return the results of these trials only."""
    frames: dict[str, Any] = {
        entry.name: frame[frame["trial_id"].isin(list(trial_ids))].reset_index(drop=True)
        for entry in dataclasses.fields(results)
        if isinstance(frame := getattr(results, entry.name), pd.DataFrame)
    }
    return dataclasses.replace(results, **frames)
