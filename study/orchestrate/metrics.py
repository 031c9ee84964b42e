"""Prometheus metrics of a running study: its progress, current windows, and the measures of its latest trial.

Ray exports them through its metrics ports and adds `ray_` to each name. Every series has the label `study`; series of a
trial also have `trial`. Ray drops a value about 20 s after it was set, so `repeat` sets current values again every
REPEAT_S. Values of earlier trials are not repeated and disappear. Until then `scaling_study_current` tells which trial
to show: 1 for the latest, 0 for the one before.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd
import pyarrow as pa

from analysis.measure.communication import bucket_rows, step_rows
from analysis.measure.measures import summarise
from analysis.read.schema import PHASES, STATUSES
from study.store.result import TrialResult
from trainables.trial import Trial

PREFIX = "scaling_study"
LEFT = "left"
REPEAT_S = 5.0
"""Half of Ray's reporting interval. Ray keeps a value for two intervals."""
TRIAL_METRICS: Mapping[str, str] = {
    "throughput_samples_per_s": "samples of all ranks per second of the slowest rank",
    "efficiency": "throughput per rank / that of the same configuration on one rank, median so far in this run",
    "step_s": "time per plain step on the slowest rank (s)",
    "rank_window_ratio": "time of the slowest rank / time of the fastest rank",
    **{name: f"time of the phase {name.removesuffix('_s')} per step (s)" for name in PHASES},
    "phases_step_s": "time of a step with timed phases (s)",
    "busy_fraction": "fraction of a step during which the device is busy",
    "peak_memory_bytes": "peak memory allocated on the device of a rank",
    "communication_s": "gradient communication per step (s): median over steps, mean over ranks",
    "exposed_s": "gradient communication after the last local gradient, which lengthens the step (s)",
}
"""Descriptions of a trial's metrics by name. A trial has those that it measured."""

EPOCH_METRICS: Mapping[str, str] = {
    "epoch": "completed epochs of a training",
    "train_loss": "mean training loss of the latest epoch",
    "train_top1": "top-1 training accuracy of the latest epoch",
    "validation_loss": "validation loss after the latest epoch",
    "validation_top1": "top-1 validation accuracy after the latest epoch",
    "learning_rate": "learning rate of the latest step",
}
"""Descriptions of a training trial's metrics while it runs."""

MakeGauge = Callable[..., Any]


class Metrics:
    """Gauges of one study. `make_gauge` is `ray.util.metrics.Gauge` or a function with its signature.

    `counts` has the number of trials by status before the first one runs, including `left`.
    """

    def __init__(self, study_name: str, counts: Mapping[str, int], make_gauge: MakeGauge) -> None:
        self.study_name = study_name
        self.make_gauge = make_gauge
        self.gauges: dict[str, Any] = {}
        self.values: dict[tuple[str, str, str], float] = {}
        self.current: str | None = None
        self.restart(counts)

    def restart(self, counts: Mapping[str, int]) -> None:
        """Publish other counts, for another run of trials."""
        self.counts = dict.fromkeys((*STATUSES, LEFT), 0) | dict(counts)
        for status in self.counts:
            self._publish_count(status)

    def ended(self, trial_id: str, status: str, values: Mapping[str, float]) -> None:
        """Publish the end of a trial. `values` has its measures; those in `TRIAL_METRICS` are published."""
        self.counts[LEFT] -= 1
        self.counts[status] += 1
        self._publish_count(LEFT)
        self._publish_count(status)
        if self.current is not None:
            self._publish_current(self.current, 0)
            self.values = {key: value for key, value in self.values.items() if key[1:] != ("trial", self.current)}
        self.current = trial_id
        self._publish_current(trial_id, 1)
        for name in TRIAL_METRICS.keys() & values.keys():
            self._publish(name, TRIAL_METRICS[name], "trial", trial_id, values[name])

    def epoch_ended(self, trial_id: str, row: Mapping[str, float | None]) -> None:
        """Publish an epoch of a training trial from its row of epochs.parquet."""
        for name, description in EPOCH_METRICS.items():
            if (value := row.get(name)) is not None:
                self._publish(name, description, "trial", trial_id, float(value))

    def running(self, windows: Iterable[str]) -> None:
        """Publish how many running trials are in each window. Windows without one become 0 and disappear."""
        found = Counter(windows)
        earlier = {key for key in self.values if key[:2] == ("window", "window")}
        for window in {window for _, _, window in earlier} | found.keys():
            self._publish("window", "running trials by their current window", "window", window, found[window])
            if not found[window]:
                del self.values["window", "window", window]

    def repeat(self) -> None:
        """Set every current value again."""
        for (name, tag, tag_value), value in self.values.items():
            self.gauges[name].set(value, tags={"study": self.study_name, tag: tag_value})

    def _publish_count(self, status: str) -> None:
        self._publish(
            "trials", "trials of the study by status; left: not yet run", "status", status, self.counts[status]
        )

    def _publish_current(self, trial_id: str, value: int) -> None:
        self._publish("current", "1 for the trial that ended last", "trial", trial_id, value)

    def _publish(self, name: str, description: str, tag: str, tag_value: str, value: float) -> None:
        if name not in self.gauges:
            self.gauges[name] = self.make_gauge(f"{PREFIX}_{name}", description=description, tag_keys=("study", tag))
        self.values[name, tag, tag_value] = value
        self.gauges[name].set(value, tags={"study": self.study_name, tag: tag_value})


class Efficiencies:
    """Efficiency of the trials of one run, relative to the trials on one rank that ended before."""

    def __init__(self) -> None:
        self._on_one_rank: dict[str, list[float]] = {}

    def of(self, trial: Trial, throughput_samples_per_s: float | None) -> float | None:
        """Return the throughput per rank over that of the same configuration on one rank; None if it is unknown."""
        if throughput_samples_per_s is None or trial.epochs:
            return None
        rates = self._on_one_rank.setdefault(_configuration(trial), [])
        if trial.processes == 1:
            rates.append(throughput_samples_per_s)
        return throughput_samples_per_s / trial.processes / median(rates) if rates else None


_TRACED = {"collectives_s": "communication_s", "exposed_collectives_s": "exposed_s"}
"""measures by the column of the steps"""


def _configuration(trial: Trial) -> str:
    """Return the fields that trials of one weak-scaling series share."""
    return json.dumps(trial.model_dump(exclude={"world_size", "nodes", "repeat"}), sort_keys=True)


def numbers(result: TrialResult) -> dict[str, float]:
    """Return the measures of a trial that are not null.

    With buckets or traced steps, `communication_s` and `exposed_s` are among them.
    For a training trial: its last epoch, and samples of all epochs per second of training.
    """
    if result.epochs is not None:
        last = result.epochs.slice(result.epochs.num_rows - 1).to_pylist()[0]
        last |= {"throughput_samples_per_s": last["samples"] / last["train_s"]}
        return {name: value for name, value in last.items() if value is not None}
    if result.steps is None:
        return {}
    measures = {name: value for name, value in summarise(result.steps.to_pandas()).items() if value is not None}
    if traced := _traced(result.steps):
        return measures | traced
    if result.buckets is not None and result.buckets.num_rows:
        measures |= _communication(result.trial, result.buckets, result.steps)
    return measures


def _traced(steps: pa.Table) -> dict[str, float]:
    """Return the median over traced steps per rank, averaged over ranks. Empty without them."""
    rows = steps.select(["rank", *_TRACED]).to_pandas().dropna().rename(columns=_TRACED)
    means = rows.groupby("rank").median().mean()
    return {str(name): float(value) for name, value in means.dropna().items()}


def _communication(trial: Trial, buckets: pa.Table, steps: pa.Table) -> dict[str, float]:
    """Return the median over steps per rank, averaged over ranks."""
    key = {"trial_id": trial.trial_id}
    trials = pd.DataFrame([key | {"device": trial.device, "world_size": trial.world_size}])
    rows = step_rows(bucket_rows(buckets.to_pandas().assign(**key), steps.to_pandas().assign(**key), trials))
    means = rows.groupby("rank")[["communication_s", "exposed_s"]].median().mean()
    return {str(name): float(value) for name, value in means.dropna().items()}


def counts(statuses: Mapping[str, str], left: Sequence[str]) -> dict[str, int]:
    """Return the number of trials per status before a run of those with the ids `left`."""
    to_run = set(left)
    return Counter(status for trial_id, status in statuses.items() if trial_id not in to_run) | Counter(
        {LEFT: len(left)}
    )
