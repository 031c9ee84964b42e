"""A round of a search: a few configurations, measured next to one another in the same worker groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from study.improve.lever import Lever, Machine
from study.plan.trials import SEED_STRIDE
from trainables.fields import FIELD_FACTS
from trainables.trial import Trial

Configuration = tuple[str, ...]
"""Names of levers, in the order in which they are applied to the baseline; empty for the baseline."""

Goal = Literal["throughput", "efficiency", "cost", "time-to-accuracy"]
"""What is compared: the throughput of all ranks, its ratio to that of one rank, the throughput per rank, or the inverse
of the time that a training takes to its target accuracy."""

Role = Literal["timed", "loss", "breakdown"]
"""What a trial of a round shows: the speed, only the loss with another seed, or only the parts of a step."""

REPEATS_PER_ROUND = 100
"""Repeats of a round are numbered from its own multiple, so that no round takes a trial of another for its own."""

SEEDS = 2
"""Further seeds of the baseline, whose losses show the spread of seeds."""


@dataclass(frozen=True)
class Settings:
    """What is searched. trials, budget_s: limits of the search; None for no limit. price_per_gpu_hour: or None."""

    base: Trial
    levers: Mapping[str, Lever]
    machine: Machine
    goal: Goal = "throughput"
    trials: int | None = None
    budget_s: float | None = None
    price_per_gpu_hour: float | None = None

    @property
    def is_training(self) -> bool:
        """Return True if trials train to a target accuracy, rather than time steps."""
        return self.goal == "time-to-accuracy"

    @property
    def compared_sizes(self) -> tuple[int, ...]:
        """Return one rank and all, if configurations are compared by their ratio; else none."""
        return (1, self.base.world_size) if self.goal == "efficiency" else ()

    def sizes_of(self, configuration: Configuration) -> tuple[int, ...]:
        """Return the numbers of ranks on which a configuration is measured."""
        trial = self.trial(configuration)
        assert trial is not None
        return self.compared_sizes or (trial.world_size,)

    def trial(self, configuration: Configuration) -> Trial | None:
        """Return the baseline with these levers applied; None if one does not apply to the result of the others."""
        changed: Trial | None = self.base
        for name in configuration:
            changed = changed and self.levers[name].applied(changed, self.machine)
        return changed

    def trial_of(self, configuration: Configuration, world_size: int, repeat: int, seed: int = 0) -> Trial:
        """Return a trial of a configuration that applies."""
        trial = self.trial(configuration)
        assert trial is not None
        nodes = 1 if world_size == 1 else trial.nodes
        changes = {"world_size": world_size, "nodes": nodes, "repeat": repeat}
        return trial.but(**changes, **({"seed": (trial.seed + seed) % 2**31} if seed else {}))


def timed_steps(trial: Trial) -> Trial:
    """Return a training as a trial of timed windows, whose breakdown shows what bounds its step."""
    training = {name: Trial.model_fields[name].default for name, facts in FIELD_FACTS.items() if facts.needs_epochs}
    return trial.but(epochs=0, **training)


@dataclass(frozen=True)
class Planned:
    """A trial of a round, and the configuration that it measures."""

    configuration: Configuration
    trial: Trial
    role: Role = "timed"


@dataclass(frozen=True)
class Round:
    """Configurations that run in each of `groups` worker groups, every other time in reverse order (A B | B A).

    The first configuration is the reference. Trainings of a worker group share a seed, which no other group has.
    losses: configurations and offsets of the seed that run once, in the first worker group, only for their loss.
    breakdowns: configurations whose trainings also run as timed steps there, see `timed_steps`.
    """

    number: int
    kind: Literal["baseline", "levers", "confirm", "combine", "final"]
    configurations: Sequence[Configuration]
    groups: int
    losses: Sequence[tuple[Configuration, int]] = ()
    breakdowns: Sequence[Configuration] = ()
    blocks: Sequence[Sequence[Planned]] = field(default=(), compare=False)

    def planned_for(self, settings: Settings) -> "Round":
        """Return the round with its trials, one block per worker group."""
        blocks = []
        for group in range(self.groups):
            repeat = REPEATS_PER_ROUND * self.number + group
            seed = SEED_STRIDE * repeat if settings.is_training else 0
            points = [(names, size) for names in self.configurations for size in settings.sizes_of(names)]
            ordered = points if group % 2 == 0 else points[::-1]
            block = [Planned(names, settings.trial_of(names, size, repeat, seed)) for names, size in ordered]
            if group == 0:
                block += self._untimed(settings, repeat)
            blocks.append(block)
        return dataclasses.replace(self, blocks=blocks)

    def _untimed(self, settings: Settings, repeat: int) -> list[Planned]:
        found = [
            Planned(names, settings.trial_of(names, settings.sizes_of(names)[-1], repeat, seed), "loss")
            for names, seed in self.losses
        ]
        for names in self.breakdowns if settings.is_training else ():
            training = settings.trial_of(names, settings.sizes_of(names)[-1], repeat)
            if not training.resident_data:  # timed steps would load their batches
                found.append(Planned(names, timed_steps(training), "breakdown"))
        return found

    @property
    def planned(self) -> list[Planned]:
        return [planned for block in self.blocks for planned in block]

    def block_name(self, number: int) -> str:
        """Return a name for a block that no other round has."""
        return f"{self.number}.{number}"

    @property
    def trial_ids(self) -> list[str]:
        return [planned.trial.trial_id for planned in self.planned]

    def timed(self, configuration: Configuration) -> list[Planned]:
        """Return the trials that show how fast a configuration is."""
        return [p for p in self.planned if p.role == "timed" and p.configuration == configuration]

    def ids_of(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the timed trials of a configuration, on its largest number of ranks."""
        timed = self.timed(configuration)
        most = max((planned.trial.world_size for planned in timed), default=0)
        return tuple(planned.trial.trial_id for planned in timed if planned.trial.world_size == most)

    def breakdown_ids(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the trials that only show the parts of a configuration's step."""
        return tuple(
            planned.trial.trial_id
            for planned in self.planned
            if planned.role == "breakdown" and planned.configuration == configuration
        )
