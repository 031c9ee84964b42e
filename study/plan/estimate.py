"""Order planned trials and estimate their time and cost."""

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from study.errors import counted
from study.plan.placement import ProcessKind, can_share_host
from study.plan.trials import PlannedTrial
from trainables.fields import fields_of_kind
from trainables.trial import Trial


@dataclass(frozen=True)
class Estimate:
    """Time and cost of the pending trials; None if unknown. `basis` says which records the estimate uses.

    GPU-hours count every GPU that a worker group holds, even while a trial uses fewer.
    """

    duration_s: float | None
    gpu_hours: float | None
    cost: float | None
    basis: str


# ------------------------------------------------------------------------------------------------------------ order


def blocks(trials: Sequence[Trial], repeats: int, seed: int) -> list[list[Trial]]:
    """Return the trials in run order, divided into blocks. Warm worker groups live for at most one block.

    Two or more repeats are divided over two blocks, so that the difference between worker groups shows. Within a block,
    trials of the same process kind stay together, because another kind needs another group. Within a kind, repeats
    follow each other, each in its own random order (`seed`), so that drift does not look like an effect of an axis.
    """
    shuffled = random.Random(seed).sample(list(trials), len(trials))
    kinds = list(dict.fromkeys(ProcessKind.of(trial) for trial in shuffled))
    shuffled.sort(key=lambda trial: (kinds.index(ProcessKind.of(trial)), trial.repeat))
    if repeats < 2:
        return [shuffled] if shuffled else []
    first = -(-repeats // 2)
    halves = (
        [trial for trial in shuffled if trial.repeat < first],
        [trial for trial in shuffled if trial.repeat >= first],
    )
    return [half for half in halves if half]


# --------------------------------------------------------------------------------------------------- time and money


def estimate(
    rows: Sequence[PlannedTrial],
    records: Sequence[Mapping[str, Any]],
    price_per_gpu_hour: float | None,
    concurrent: int = 1,
) -> Estimate:
    """Estimate time, GPU-hours and cost of the pending rows from the durations in `records` (contents of trial.json).

    A trial takes the median time of recorded repeats of its configuration, else of trials that also differ in batch,
    loader workers and precision. Everything is unknown if one pending trial has neither. `concurrent` training trials
    on one rank run at the same time, each with its own GPU.
    """
    pending = [row.trial for row in rows if row.status == "pending" and row.trial is not None]
    if not pending:
        return Estimate(0.0, 0.0, None if price_per_gpu_hour is None else 0.0, "nothing is left to run")
    done = [record for record in records if record.get("status") == "done" and record.get("duration_s")]
    exact, similar = _median_durations(done, _REPEAT_FIELDS), _median_durations(done, _SIMILAR_FIELDS)

    def is_shared(trial: Trial) -> bool:
        return concurrent > 1 and can_share_host(trial)

    group_sizes = _group_sizes(trial for trial in pending if not is_shared(trial))
    total_s = gpu_s = 0.0
    similar_count = 0
    for trial in pending:
        duration_s = exact.get(_key(trial.model_dump(), _REPEAT_FIELDS))
        if duration_s is None:
            duration_s = similar.get(_key(trial.model_dump(), _SIMILAR_FIELDS))
            similar_count += 1
        if duration_s is None:
            return Estimate(None, None, None, "this results folder has no record of a similar trial")
        total_s += duration_s / concurrent if is_shared(trial) else duration_s
        if trial.device == "cuda":
            gpu_s += duration_s * (1 if is_shared(trial) else group_sizes[ProcessKind.of(trial)])
    basis = f"{counted(len(done), 'recorded trial')}, without the start of worker groups"
    if similar_count:
        changes = "batch, loader workers or precision" + (" or recipe" if any(t.epochs for t in pending) else "")
        basis = f"{similar_count} of {len(pending)} from trials with another {changes}; {basis}"
    gpu_hours = gpu_s / 3600
    return Estimate(total_s, gpu_hours, None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour, basis)


_REPEAT_FIELDS = frozenset({"repeat", "seed"})
"""Fields that may differ between repeats of a configuration."""

_SIMILAR_FIELDS = _REPEAT_FIELDS | {"batch_per_gpu", "loader_workers", "precision"}
"""Fields that may differ between similar trials."""

_ACCURACY_FIELDS = frozenset({*fields_of_kind("recipe"), "accumulation_steps", "execution", "noise_scale"})
"""Fields that affect the accuracy of a training trial more than its time, or its time less than the batch does."""


def _group_sizes(trials: Iterable[Trial]) -> dict[ProcessKind, int]:
    """Return the ranks of the largest trial per process kind."""
    sizes: dict[ProcessKind, int] = {}
    for trial in trials:
        kind = ProcessKind.of(trial)
        sizes[kind] = max(sizes.get(kind, 0), trial.world_size)
    return sizes


def _key(fields: Mapping[str, Any], ignored: frozenset[str]) -> tuple[Any, ...]:
    if fields.get("epochs") and ignored == _SIMILAR_FIELDS:
        ignored = ignored | _ACCURACY_FIELDS
    return tuple(sorted((name, value) for name, value in fields.items() if name not in ignored))


def _median_durations(records: Sequence[Mapping[str, Any]], ignored: frozenset[str]) -> dict[tuple[Any, ...], float]:
    grouped: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        grouped.setdefault(_key(record["trial"], ignored), []).append(record["duration_s"])
    return {key: statistics.median(durations) for key, durations in grouped.items()}
