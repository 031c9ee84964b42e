"""What a plan says of its trials: how many trainings run side by side, and what to know before anyone trusts them."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from study.capacity import Capacity
from study.cli.configuration import Configuration, to_yaml
from study.orchestrate.protocol import KnownTrials
from study.plan.estimate import Estimate
from study.plan.placement import can_share_host, concurrent_slots
from study.plan.trials import PlannedTrial
from study.studies.study import Study
from trainables.train.schedule import warning
from trainables.trial import Trial


def side_by_side(asked: int, trials: Sequence[Trial], nodes: Capacity) -> int:
    """How many trainings run at a time: as many as were asked for, as far as they fit."""
    trainings = [trial for trial in trials if can_share_host(trial)]
    return max(1, min(asked, len(concurrent_slots(trainings, nodes)))) if asked > 1 and trainings else 1


def warnings(asked: int, running: int, trials: Sequence[Trial]) -> list[str]:
    """Lines for people, each once; `running` of the `asked` trainings run at a time."""
    lines = [f"warning: {line}" for trial in trials if trial.epochs and (line := warning(trial))]
    if running < asked and any(map(can_share_host, trials)):
        lines.append(f"--max-concurrent {asked}: no more than {running} fit here, so that many train side by side")
    return list(dict.fromkeys(lines))


def replaced_by_workload(asked: Container[str], trials: Sequence[Trial]) -> list[str]:
    """Lines for people on fields in place of which a user's workload stands, where they were asked for or differ."""
    lines = []
    for field in ("model", "dataset"):
        values = list(dict.fromkeys(getattr(trial, field) for trial in trials if trial.workload))
        if len(values) > 1 or (values and field in asked):
            lines.append(
                f"warning: a workload brings its own {field}; {field} {', '.join(values)} only reaches its function, as "
                f"trial.{field}" + (", and where that does not use it, all are the same" if len(values) > 1 else "")
            )
    return lines


@dataclass(frozen=True)
class PreparedStudy:
    """A plan with all that a command says about it. `unfit` are the rows that keep it from starting.

    `known` are the trials that the results folder held when it was read.
    """

    configuration: Configuration
    study: Study
    rows: Sequence[PlannedTrial]
    unfit: Sequence[PlannedTrial]
    estimate: Estimate
    side_by_side: int
    known: KnownTrials

    @property
    def pending(self) -> list[Trial]:
        """Trials still to run."""
        return [row.trial for row in self.rows if row.status == "pending" and row.trial is not None]

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by status."""
        return dict(Counter(row.status for row in self.rows))

    @property
    def yaml(self) -> str:
        """The configuration that asks for this plan again."""
        return to_yaml(self.configuration, self.study)

    def label(self, row: PlannedTrial) -> str:
        """What sets a row apart in its study, without its repeat."""
        names = self.study.varying or ["world_size"]
        named = ", ".join(f"{name} {row.fields[name]}" for name in names if name in row.fields)
        return f"{row.case}: {named}" if row.case else named
