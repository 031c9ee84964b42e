"""A lever: a change of a trial that may make it faster, and the part of the step that it concerns."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from analysis.compare.bottleneck import largest_gain
from study.capacity import Capacity
from study.errors import counted
from study.plan.trials import fit
from trainables.fields import FIELD_FACTS
from trainables.rules import unmet_requirement
from trainables.trial import Trial

Effect = Literal["arithmetic", "memory", "order"]
"""arithmetic: numbers are computed differently, so the loss may change. memory: it is held or moved differently. order:
the same operations, in another order or at other times."""


@dataclass(frozen=True)
class Machine:
    """What levers need to know about where the trials run."""

    capacity: Capacity
    storages: tuple[str, ...] = ()
    """Formats in which the data folder holds the data set."""

    def spare_cores(self, trial: Trial) -> int:
        """Return the cores per rank that the trial could have on the smallest node that it may use."""
        ranks = trial.world_size // trial.nodes
        return min((node.cpus for node in self.capacity if node.cpus >= ranks), default=ranks) // ranks


Change = Callable[[Trial, Machine], Mapping[str, Any] | None]
"""Returns the fields to change in a trial, None if the lever does not apply to it."""


@dataclass(frozen=True)
class Lever:
    """A change that may make a trial faster.

    parts: the regions of a step (`analysis.compare.bottleneck.REGIONS`) that it can shrink; empty if unknown. note:
    what else a user should do or know. is_first: it is tried before others, in a round of its own, because it moves the
    bottleneck. if_no_memory_for: name of another lever; this one is tried only after that one ran out of memory.
    members: the levers that it applies together, as far as they apply. remains: the share of the parts that it cannot
    remove.
    """

    name: str
    parts: tuple[str, ...]
    effect: Effect
    change: Change
    note: str = ""
    is_first: bool = False
    if_no_memory_for: str = ""
    members: tuple["Lever", ...] = ()
    remains: float = 0.0

    def applied(self, trial: Trial, machine: Machine) -> Trial | None:
        """Return the changed trial. None if the lever does not apply, or the result is not valid or does not fit."""
        fields = self.change(trial, machine)
        if not fields:
            return None
        try:
            changed = trial.but(**fields)
        except ValidationError:
            return None
        if changed == trial or unmet_requirement(changed) or fit(changed.model_dump(), machine.capacity)[1]:
            return None
        return changed

    def bound(self, shares: Mapping[str, float], trial: Trial, machine: Machine) -> float | None:
        """Return the largest possible speed-up of a trial: that of a step without the parts it concerns.

        None if unknown. Communication that was not measured is part of compute. Infinite if the parts take the entire
        step.
        """
        acting = [lever for lever in self.members if lever.applied(trial, machine)] or [self]
        known = {name: share for name, share in shares.items() if not math.isnan(share)}
        parts = {name if name in known else "compute" for lever in acting for name in lever.parts}
        if not parts & known.keys():
            return None
        removed = sum(known[name] for name in parts if name in known)
        return largest_gain(min(1.0, removed) * (1 - self.remains))


def changed_fields(before: Trial, after: Trial) -> dict[str, Any]:
    """Return the fields in which a trial differs from another, with their values."""
    old = before.model_dump()
    return {name: value for name, value in after.model_dump().items() if value != old[name]}


def changes_batch(fields: Mapping[str, Any]) -> bool:
    """Return True if the changed fields decide how many samples a step of all ranks has."""
    return any(FIELD_FACTS[name].kind in ("batch", "layout") for name in fields)


def size_levers(sizes: Iterable[int], rank: str) -> Iterator[Lever]:
    """Return a lever per number of ranks that a user allows. They are tried first. rank: what one is called."""

    def change_to(size: int) -> Change:
        def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
            fields = {name: value for name, value in trial.model_dump().items() if name != "nodes"}
            nodes, _ = fit(fields | {"world_size": size}, machine.capacity)
            return {"world_size": size, "nodes": nodes}

        return change

    note = f"the global batch follows the number of {rank}s: adapt the learning rate to it"
    for size in sizes:
        yield Lever(counted(size, rank), (), "arithmetic", change_to(size), note)
