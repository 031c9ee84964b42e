"""What a study tells Prometheus through Ray's metrics ports, while it runs: its progress, and the numbers of its latest trial.

Ray puts `ray_` before each name. Every series has the label `study`; those of a trial also `trial`. Ray exports a value that
was set once, and forgets it some 20 s later; so `repeat` sets again what still holds, every REPEAT_S. What is known of a trial
that is no longer the latest is not repeated and goes, and until then `scaling_study_current`, 1 for the latest trial and 0 for
the one before, tells which to show.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa

from analysis.load.schema import PHASES, STATUSES
from analysis.measure.communication import bucket_rows, step_rows
from analysis.measure.measures import summarise
from study.store.store import TrialResult
from trainables.trial import Trial

PREFIX = "scaling_study"
LEFT = "left"
REPEAT_S = 5.0
"""half of Ray's interval of reports, twice of which is what Ray keeps a value for"""
OF_TRIAL: Mapping[str, str] = {
    "throughput_samples_per_s": "samples of all ranks per second of the slowest",
    "step_s": "seconds of a plain step on the slowest rank",
    "rank_window_ratio": "slowest rank's time / fastest rank's",
    **{name: f"median seconds of the phase {name.removesuffix('_s')} of a step" for name in PHASES},
    "phases_step_s": "median seconds of a step whose phases were timed",
    "busy_fraction": "share of a step for which the device has work",
    "peak_memory_bytes": "most memory allocated on a rank's device",
    "communication_s": "seconds of a step with gradient communication, median over steps, mean over ranks",
    "exposed_s": "those of them after the last local gradient, which lengthen the step",
}
"""numbers of a trial by name; a trial has those that it measured"""

OF_EPOCH: Mapping[str, str] = {
    "epoch": "epochs that a training has ended",
    "train_loss": "mean loss of its latest epoch",
    "train_top1": "share of training samples that were right in its latest epoch",
    "validation_loss": "loss on held-out samples after its latest epoch",
    "validation_top1": "share of held-out samples that are right after its latest epoch",
    "learning_rate": "learning rate of its latest step",
}
"""numbers of a training while it runs"""

MakeGauge = Callable[..., Any]


class Metrics:
    """Gauges of one study. `make_gauge` is `ray.util.metrics.Gauge`, or what has its signature.

    counts: how many trials there are by status before the first one runs, `left` among them.
    """

    def __init__(self, study_name: str, counts: Mapping[str, int], make_gauge: MakeGauge) -> None:
        self.study_name = study_name
        self.make_gauge = make_gauge
        self.gauges: dict[str, Any] = {}
        self.held: dict[tuple[str, str, str], float] = {}
        self.counts = dict.fromkeys((*STATUSES, LEFT), 0) | dict(counts)
        self.current: str | None = None
        for status in self.counts:
            self._publish_count(status)

    def ended(self, trial_id: str, status: str, values: Mapping[str, float]) -> None:
        """A trial of those left has ended; `values` are those of `OF_TRIAL` that it measured."""
        self.counts[LEFT] -= 1
        self.counts[status] += 1
        self._publish_count(LEFT)
        self._publish_count(status)
        if self.current is not None:
            self._publish_current(self.current, 0)
            self.held = {key: value for key, value in self.held.items() if key[1:] != ("trial", self.current)}
        self.current = trial_id
        self._publish_current(trial_id, 1)
        for name in OF_TRIAL.keys() & values.keys():
            self._publish(name, OF_TRIAL[name], "trial", trial_id, values[name])

    def epoch_ended(self, trial_id: str, row: Mapping[str, float | None]) -> None:
        """A training has ended an epoch, a row of epochs.parquet."""
        for name, description in OF_EPOCH.items():
            if (value := row.get(name)) is not None:
                self._publish(name, description, "trial", trial_id, float(value))

    def repeat(self) -> None:
        """Sets again every value that still holds."""
        for (name, tag, tagged), value in self.held.items():
            self.gauges[name].set(value, tags={"study": self.study_name, tag: tagged})

    def _publish_count(self, status: str) -> None:
        self._publish(
            "trials", "trials of the study by status; left: still to run", "status", status, self.counts[status]
        )

    def _publish_current(self, trial_id: str, value: int) -> None:
        self._publish("current", "1 for the trial that ended last", "trial", trial_id, value)

    def _publish(self, name: str, description: str, tag: str, tagged: str, value: float) -> None:
        if name not in self.gauges:
            self.gauges[name] = self.make_gauge(f"{PREFIX}_{name}", description=description, tag_keys=("study", tag))
        self.held[name, tag, tagged] = value
        self.gauges[name].set(value, tags={"study": self.study_name, tag: tagged})


def numbers(result: TrialResult) -> dict[str, float]:
    """Return the measures of a trial that are not null, and `communication_s` and `exposed_s` if it has buckets.

    For a training: its last epoch, and samples of all epochs per second of training.
    """
    if result.epochs is not None:
        last = result.epochs.slice(result.epochs.num_rows - 1).to_pylist()[0]
        last |= {"throughput_samples_per_s": last["samples"] / last["train_s"]}
        return {name: value for name, value in last.items() if value is not None}
    if result.steps is None:
        return {}
    measures = {name: value for name, value in summarise(result.steps.to_pandas()).items() if value is not None}
    if result.buckets is not None and result.buckets.num_rows:
        measures |= _communication(result.trial, result.buckets, result.steps)
    return measures


def _communication(trial: Trial, buckets: pa.Table, steps: pa.Table) -> dict[str, float]:
    """Per rank the median over the steps, then the mean over ranks."""
    named = {"trial_id": trial.trial_id}
    trials = pd.DataFrame([named | {"device": trial.device, "world_size": trial.world_size}])
    rows = step_rows(bucket_rows(buckets.to_pandas().assign(**named), steps.to_pandas().assign(**named), trials))
    means = rows.groupby("rank")[["communication_s", "exposed_s"]].median().mean()
    return {str(name): float(value) for name, value in means.dropna().items()}


def counts(statuses: Mapping[str, str], left: Sequence[str]) -> dict[str, int]:
    """Return the number of trials per status before a run of those with the ids `left`."""
    to_run = set(left)
    return Counter(status for trial_id, status in statuses.items() if trial_id not in to_run) | Counter(
        {LEFT: len(left)}
    )
