"""A round of a search: a few configurations, measured next to one another in the same worker groups."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from study.improve.lever import Lever, Machine
from trainables.trial import Trial

Configuration = tuple[str, ...]
"""Names of levers, in the order in which they are applied to the baseline; empty for the baseline."""

Goal = Literal["throughput", "efficiency"]

REPEATS_PER_ROUND = 100
"""Repeats of a round are numbered from its own multiple, so that no round takes a trial of another for its own."""

SEEDS = 2
"""Further seeds of the baseline, whose losses show the spread of seeds."""


@dataclass(frozen=True)
class Settings:
    """What is searched. trials, budget_s: limits of the search; None for no limit."""

    base: Trial
    levers: Mapping[str, Lever]
    machine: Machine
    goal: Goal = "throughput"
    trials: int | None = None
    budget_s: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks on which every configuration is measured."""
        return (1, self.base.world_size) if self.goal == "efficiency" else (self.base.world_size,)

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


@dataclass(frozen=True)
class Planned:
    """A trial of a round, and the configuration that it measures."""

    configuration: Configuration
    trial: Trial
    is_timed: bool = True
    """False for a trial that only shows the loss with another seed."""


@dataclass(frozen=True)
class Round:
    """Configurations that run in each of `groups` worker groups, every other time in reverse order (A B | B A).

    The first configuration is the reference. losses: configurations and offsets of the seed that run once, in the first
    worker group, only for their loss.
    """

    number: int
    kind: Literal["baseline", "levers", "confirm", "combine", "final"]
    configurations: Sequence[Configuration]
    groups: int
    losses: Sequence[tuple[Configuration, int]] = ()
    blocks: Sequence[Sequence[Planned]] = field(default=(), compare=False)

    def planned_for(self, settings: Settings) -> "Round":
        """Return the round with its trials, one block per worker group."""
        blocks = []
        for group in range(self.groups):
            repeat = REPEATS_PER_ROUND * self.number + group
            points = [(names, size) for names in self.configurations for size in settings.sizes]
            ordered = points if group % 2 == 0 else points[::-1]
            block = [Planned(names, settings.trial_of(names, size, repeat)) for names, size in ordered]
            if group == 0:
                size = settings.base.world_size
                block += [
                    Planned(names, settings.trial_of(names, size, repeat, seed), is_timed=False)
                    for names, seed in self.losses
                ]
            blocks.append(block)
        return dataclasses.replace(self, blocks=blocks)

    @property
    def planned(self) -> list[Planned]:
        return [planned for block in self.blocks for planned in block]

    def block_name(self, number: int) -> str:
        """Return a name for a block that no other round has."""
        return f"{self.number}.{number}"

    @property
    def trial_ids(self) -> list[str]:
        return [planned.trial.trial_id for planned in self.planned]

    def ids_of(self, configuration: Configuration) -> tuple[str, ...]:
        """Return the timed trials of a configuration, on the most ranks."""
        most = max(planned.trial.world_size for planned in self.planned)
        return tuple(
            planned.trial.trial_id
            for planned in self.planned
            if planned.is_timed and planned.configuration == configuration and planned.trial.world_size == most
        )
