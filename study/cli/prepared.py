"""A plan with its configuration, and the warnings that a user should read before trusting its trials."""

import json
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.duration import duration
from study.capacity import Capacity
from study.cli.configuration import Configuration, to_yaml
from study.cli.own_code import varying_options
from study.errors import ConfigurationError, counted
from study.options import OPTION_OF_FIELD
from study.orchestrate.discovery.address import is_local
from study.orchestrate.protocol import KnownTrials
from study.plan.estimate import Estimate
from study.plan.placement import can_share_host, concurrent_slots
from study.plan.trials import PlannedTrial
from study.store.redaction import secret_in
from study.studies.study import Study
from trainables.train.schedule import warning
from trainables.trial import Trial


def concurrent_trainings(max_concurrent: int, trials: Sequence[Trial], nodes: Capacity) -> int:
    """Return how many trainings run at a time: `max_concurrent`, or fewer if no more fit on the nodes."""
    trainings = [trial for trial in trials if can_share_host(trial)]
    return (
        max(1, min(max_concurrent, len(concurrent_slots(trainings, nodes)))) if max_concurrent > 1 and trainings else 1
    )


def warnings(max_concurrent: int, concurrent: int, trials: Sequence[Trial]) -> list[str]:
    """Return one line per distinct warning. `concurrent` trainings run at a time, `max_concurrent` were requested."""
    lines = [f"warning: {line}" for trial in trials if trial.epochs and (line := warning(trial))]
    if concurrent < max_concurrent and any(map(can_share_host, trials)):
        lines.append(f"warning: --max-concurrent {max_concurrent}: only {concurrent} trainings fit at the same time")
    return list(dict.fromkeys(lines))


def workload_warnings(requested: Container[str], trials: Sequence[Trial]) -> list[str]:
    """Return a warning per field that a user's workload replaces, if the field was requested or varies."""
    lines = []
    for field in ("model", "dataset"):
        values = list(dict.fromkeys(getattr(trial, field) for trial in trials if trial.workload))
        if len(values) > 1 or (values and field in requested):
            lines.append(
                f"warning: the workload defines its own {field}; {field} {', '.join(values)} is only passed to it as "
                f"trial.{field}" + ("; if it ignores that field, these trials are identical" if len(values) > 1 else "")
            )
    return lines


def refuse_secrets(trials: Iterable[Trial]) -> None:
    """Raise ConfigurationError for a field that holds a secret: every field is written into the results folder."""
    values = {(name, value) for trial in trials for name, value in trial.model_dump().items() if isinstance(value, str)}
    for name, value in sorted(values):
        if found := secret_in(value):
            raise ConfigurationError(
                f"{name}: its value has {found}, and would be stored in the results; fix: pass secrets to your code in "
                "environment variables, or rename a variable that holds no secret"
            )


@dataclass(frozen=True)
class PreparedStudy:
    """A plan with everything that a command prints about it.

    does_not_fit: the rows that keep the plan from starting. concurrent: trainings that run at a time. known: the trials
    that the results folder held when it was read. gpus: number of GPUs of all nodes.
    """

    configuration: Configuration
    study: Study
    rows: Sequence[PlannedTrial]
    does_not_fit: Sequence[PlannedTrial]
    estimate: Estimate
    concurrent: int
    known: KnownTrials
    gpus: int

    @property
    def pending(self) -> list[Trial]:
        """Trials still to run."""
        return [row.trial for row in self.rows if row.status == "pending" and row.trial is not None]

    @property
    def planned(self) -> list[Trial]:
        """All valid trials, also those that have run or cannot."""
        return [row.trial for row in self.rows if row.trial is not None]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by status."""
        return dict(Counter(row.status for row in self.rows))

    @property
    def outline(self) -> str:
        """The trials to run in one line: their number, the axes, repeats and estimated time."""
        study = self.study
        varying = {name: values for name, values in study.axes.items() if len(values) > 1}
        axes = [_as_option(name, ",".join(map(str, varying[name]))) for name in varying if name not in _OF_OWN_CODE]
        axes += varying_options(self.configuration.vary, self.configuration.env)
        axes += [counted(len(study.cases), "case")] if study.cases else []
        parts = [counted(len(self.pending), "trial"), f": {' x '.join(axes)}" if axes else ""]
        parts += [f", {counted(study.repeats, 'repeat')}; about {duration(self.estimate.duration_s)}"]
        return "".join(parts)

    @property
    def yaml(self) -> str:
        """The configuration file that reproduces this plan."""
        return to_yaml(self.configuration, self.study)

    def label(self, row: PlannedTrial) -> str:
        """Return the values that distinguish a row within its study, without its repeat, as options if there are."""
        names = self.study.varying or ["world_size"]
        values = ", ".join(_as_option(name, row.fields[name]) for name in names if name in row.fields)
        return f"{row.case}: {values}" if row.case else values


_OF_OWN_CODE = ("script_flags", "script_env", "function_config")
"""Fields whose text names the flags, variables or config entries of a user's own code."""


def _as_option(field: str, value: Any) -> str:
    if field == "function_config":
        return ", ".join(f"{name}={entry}" for name, entry in json.loads(value).items())
    if field in _OF_OWN_CODE:
        return str(value)  # it names itself
    option = OPTION_OF_FIELD.get(field)
    return f"--{option.name} {value}" if option and option.is_axis else f"{field} {value}"


def does_not_fit_lines(prepared: PreparedStudy) -> list[str]:
    """Return an error per reason that keeps a plan from starting, with the combinations concerned, and a fix."""
    labels: dict[str, dict[str, None]] = {}
    for row in prepared.does_not_fit:
        labels.setdefault(row.reason, {})[prepared.label(row)] = None
    lines = []
    for reason, of_reason in labels.items():
        first, *others = of_reason
        where = f"{first} and {counted(len(others), 'other combination')}" if others else first
        if others and len(prepared.does_not_fit) == len(prepared.rows) and len(labels) == 1:
            where = f"all {len(of_reason)} combinations"
        lines.append(f"error: does not fit: {where}: {reason}")
    if any(reason.startswith("needs ") for reason in labels) and is_local(prepared.configuration.address):
        lines.append(
            "fix: run this on a cluster's head node, or give --address HOST:PORT; only this machine was counted"
        )
    return lines


def plan_as_json(prepared: PreparedStudy) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {
        "study": prepared.study.name,
        "question": prepared.study.question,
        "out": prepared.configuration.out,
        "counts": prepared.counts,
        "estimate": {name: getattr(prepared.estimate, name) for name in ("duration_s", "gpu_hours", "cost", "basis")},
        "trials": [
            {
                "trial_id": row.trial.trial_id if row.trial else None,
                "status": row.status,
                "reason": row.reason,
                "fields": row.trial.model_dump() if row.trial else dict(row.fields),
            }
            for row in prepared.rows
        ],
    }
