"""Order planned trials, and estimate their time and cost."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from study.errors import counted
from study.plan.placement import ProcessKind, can_share_host
from study.plan.trials import PlannedTrial
from trainables.fields import fields_of_kind
from trainables.trial import Trial


@dataclass(frozen=True)
class Estimate:
    """What is still to run costs this much; None is unknown. `basis` says what it was estimated from.

    GPU-hours count every GPU that a worker group holds, also while a trial uses fewer.
    """

    duration_s: float | None
    gpu_hours: float | None
    cost: float | None
    basis: str


# ------------------------------------------------------------------------------------------------------------ order


def blocks(trials: Sequence[Trial], repeats: int, seed: int) -> list[list[Trial]]:
    """The order of a run: each list is what one lifetime of warm worker groups may hold.

    Two or more repeats are divided over two lists, so that the difference between worker groups shows. In a list
    trials of one kind of process stay together, for another kind needs another group; within them come the repeats,
    each with its trials in a random order of its own (`seed`), so that drift does not look like an effect of an axis.
    """
    order = random.Random(seed)
    shuffled = order.sample(list(trials), len(trials))
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
    side_by_side: int = 1,
) -> Estimate:
    """Time, GPU-hours and cost of the pending rows, from the durations in `records` (contents of trial.json).

    So many trainings on one rank run `side_by_side`, each holding its own GPU alone.

    A trial takes the median of recorded repeats of the same configuration, else of trials that differ in batch,
    loader workers and precision too. Where one pending trial has neither, everything is unknown.
    """
    pending = [row.trial for row in rows if row.status == "pending" and row.trial is not None]
    if not pending:
        return Estimate(0.0, 0.0, None if price_per_gpu_hour is None else 0.0, "nothing is left to run")
    done = [record for record in records if record.get("status") == "done" and record.get("duration_s")]
    same, like = _durations(done, _SAME_BUT), _durations(done, _LIKE_BUT)
    beside = [side_by_side > 1 and can_share_host(trial) for trial in pending]
    held: dict[ProcessKind, int] = {}
    for trial, is_beside in zip(pending, beside, strict=True):
        if not is_beside:
            held[ProcessKind.of(trial)] = max(held.get(ProcessKind.of(trial), 0), trial.world_size)
    total_s = gpu_s = 0.0
    from_like = 0
    for trial, is_beside in zip(pending, beside, strict=True):
        known = same.get(_key(trial.model_dump(), _SAME_BUT))
        if known is None:
            known = like.get(_key(trial.model_dump(), _LIKE_BUT))
            from_like += 1
        if known is None:
            return Estimate(None, None, None, "no trial like these has been recorded in this results folder")
        total_s += known / side_by_side if is_beside else known
        gpu_s += known * (1 if is_beside else held[ProcessKind.of(trial)]) if trial.device == "cuda" else 0.0
    basis = f"{counted(len(done), 'recorded trial')}; the start of worker groups is not in it"
    if from_like:
        differ = "batch, loader workers or precision" + (" or way to train" if any(t.epochs for t in pending) else "")
        basis = f"{from_like} of {len(pending)} from trials of another {differ}; {basis}"
    gpu_hours = gpu_s / 3600
    return Estimate(total_s, gpu_hours, None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour, basis)


_SAME_BUT = frozenset({"repeat", "seed"})


_LIKE_BUT = _SAME_BUT | {"batch_per_gpu", "loader_workers", "precision"}


_ACCURACY_ONLY = frozenset({*fields_of_kind("recipe"), "accumulation_steps", "execution", "noise_scale"})
"""fields that decide what a training comes to rather than how long it takes, or the latter less than the batch does"""


def _key(fields: Mapping[str, Any], but: frozenset[str]) -> tuple[Any, ...]:
    if fields.get("epochs") and but == _LIKE_BUT:
        but = but | _ACCURACY_ONLY
    return tuple(sorted((name, value) for name, value in fields.items() if name not in but))


def _durations(records: Sequence[Mapping[str, Any]], but: frozenset[str]) -> dict[tuple[Any, ...], float]:
    grouped: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        grouped.setdefault(_key(record["trial"], but), []).append(record["duration_s"])
    return {key: statistics.median(durations) for key, durations in grouped.items()}
