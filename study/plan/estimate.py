"""Order planned trials and estimate their time and cost."""

import contextlib
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from study.errors import counted
from study.plan.duration import AFTER_S, BEFORE_S, RENEWAL_S, START_S, UNKNOWN_STEP_S, runs_own_code, trial_s
from study.plan.placement import ProcessKind, can_share_host
from study.plan.trials import PlannedTrial
from trainables.fields import fields_of_kind
from trainables.trial import Trial


@dataclass(frozen=True)
class Expected:
    """The parts of an estimate, in seconds: each pending trial, the start of a worker group with its own launch and of
    one that follows another on the same ranks, and the report."""

    trials_s: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    renewal_s: float = 0.0
    end_s: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Time and cost of the pending trials, with starts of worker groups. `cost` is None without a price or GPU.

    `basis` says what the estimate comes from. GPU-hours count every GPU that a worker group holds, even while a trial
    uses fewer.
    """

    duration_s: float
    gpu_hours: float
    cost: float | None
    basis: str
    expected: Expected = Expected()


# ------------------------------------------------------------------------------------------------------------ order


def blocks(trials: Sequence[Trial], seed: int) -> list[list[Trial]]:
    """Return the trials in run order, one block per repeat. Warm worker groups live for at most one block.

    A worker group per repeat lets the spread between repeats include that between worker groups, so that an interval
    holds for the next run. Within a block, trials of the same process kind stay together, because another kind needs
    another group, and so do kinds that can follow on the same ranks. Every second block has the kinds in reverse: it
    begins on the ranks on which the one before ended, and drift does not always hit the same kind last. Within a kind,
    trials are in random order (`seed`), so that drift does not look like an effect of an axis.
    """
    shuffled = random.Random(seed).sample(list(trials), len(trials))
    kinds = list(dict.fromkeys(ProcessKind.of(trial) for trial in shuffled))
    launches = list(dict.fromkeys(kind.launch_kind for kind in kinds))
    kinds.sort(key=lambda kind: launches.index(kind.launch_kind))
    shuffled.sort(key=lambda trial: (trial.repeat, (-1) ** trial.repeat * kinds.index(ProcessKind.of(trial))))
    return [list(block) for _, block in itertools.groupby(shuffled, key=lambda trial: trial.repeat)]


Group = tuple[ProcessKind, int]
"""Process kind and repeat of the trials of a worker group."""


def group_of(trial: Trial) -> Group:
    return ProcessKind.of(trial), trial.repeat


def opening_groups(groups: Iterable[Group], live: Group | None = None) -> list[tuple[ProcessKind, bool]]:
    """Return the kind of each worker group that opens, and whether it needs its own launch.

    groups: of trials in run order. live: the group that is open before them.
    """
    opening = [group for group in dict.fromkeys(groups) if group != live]
    return [
        (kind, before is None or before[0].launch_kind != kind.launch_kind)
        for before, (kind, _) in zip([live, *opening], opening, strict=False)
    ]


# --------------------------------------------------------------------------------------------------- time and money


def estimate(
    rows: Sequence[PlannedTrial],
    records: Sequence[Mapping[str, Any]],
    price_per_gpu_hour: float | None,
    concurrent: int = 1,
) -> Estimate:
    """Estimate time, GPU-hours and cost of the pending rows from the durations in `records` (contents of trial.json).

    A trial takes the median time of recorded repeats of its configuration, else of trials that also differ in batch,
    loader workers and precision, else the time that `study.plan.duration` models, scaled so that the model fits the
    records. Starts of worker groups take their recorded median, else a typical time: longer for a group with its
    own launch than for the others. `concurrent` training trials on one rank run at the same time, each with its own
    GPU.
    """
    pending = [row.trial for row in rows if row.status == "pending" and row.trial is not None]
    if not pending:
        return Estimate(0.0, 0.0, None if price_per_gpu_hour is None else 0.0, "nothing is left to run")
    # a duration is negative if the host's clock was set back
    done = [record for record in records if record.get("status") == "done" and (record.get("duration_s") or 0) > 0]
    exact, similar = _median_durations(done, _REPEAT_FIELDS), _median_durations(done, _SIMILAR_FIELDS)
    scale = _model_scale(done)
    start_s = _median_start_s(done, own_launch=True) or START_S[pending[0].device]
    renewal_s = _median_start_s(done, own_launch=False) or RENEWAL_S[pending[0].device]
    group_sizes = _group_sizes(trial for trial in pending if not _is_shared(trial, concurrent))
    gpu_s = 0.0
    trials_s: dict[str, float] = {}
    sources: Counter[str] = Counter()
    for trial in pending:
        repeat_s = exact.get(_key(trial.model_dump(), _REPEAT_FIELDS))
        similar_s = similar.get(_key(trial.model_dump(), _SIMILAR_FIELDS))
        sources["repeats" if repeat_s else "similar" if similar_s else "model"] += 1
        duration_s = repeat_s or similar_s or scale * trial_s(trial)
        is_shared = _is_shared(trial, concurrent)
        trials_s[trial.trial_id] = duration_s / concurrent if is_shared else duration_s
        if trial.device == "cuda":
            gpu_s += duration_s * (1 if is_shared else group_sizes[ProcessKind.of(trial)])
    in_order = map(group_of, itertools.chain.from_iterable(blocks(pending, seed=0)))
    starts_s = [(kind, start_s if own_launch else renewal_s) for kind, own_launch in opening_groups(in_order)]
    gpu_s += sum(seconds * group_sizes.get(kind, 1) for kind, seconds in starts_s if kind.device == "cuda")
    gpu_hours = gpu_s / 3600
    cost = gpu_hours * price_per_gpu_hour if price_per_gpu_hour is not None and gpu_hours else None
    total_s = sum(trials_s.values()) + sum(seconds for _, seconds in starts_s) + BEFORE_S + AFTER_S
    expected = Expected(trials_s, start_s, renewal_s, AFTER_S)
    return Estimate(total_s, gpu_hours, cost, _basis(sources, len(done), pending), expected)


def _is_shared(trial: Trial, concurrent: int) -> bool:
    return concurrent > 1 and can_share_host(trial)


def _basis(sources: Mapping[str, int], records: int, pending: Sequence[Trial]) -> str:
    """Return which trials the estimate takes from records, and which from the model."""
    own = next((trial for trial in pending if runs_own_code(trial)), None)
    assumed = f", assuming steps of {UNKNOWN_STEP_S[own.device]:g} s of your own code" if own else ""
    if sources["model"] == len(pending) and not records:
        return f"estimate from operations and typical rates{assumed}, no trial is recorded yet"
    parts = [f"{counted(records, 'recorded trial')}"]
    if sources["similar"]:
        changes = "batch, loader workers or precision" + (" or recipe" if any(t.epochs for t in pending) else "")
        parts.append(f"{sources['similar']} of {len(pending)} from trials with another {changes}")
    if sources["model"]:
        parts.append(f"{sources['model']} of {len(pending)} estimated from operations")
    return "; ".join(parts)


def _model_scale(done: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of recorded durations, relative to the modelled ones; 1 without records."""
    ratios = []
    for record in done:
        with contextlib.suppress(ValidationError):  # a record of an earlier version, with other fields
            ratios.append(record["duration_s"] / trial_s(Trial.model_validate(record["trial"])))
    return statistics.median(ratios) if ratios else 1.0


def _median_start_s(done: Sequence[Mapping[str, Any]], own_launch: bool) -> float | None:
    """Return the median time of recorded starts of worker groups with or without their own launch; None if unknown."""
    of_kind = [record for record in done if has_own_launch(record) == own_launch]
    times = [record.get("environment", {}).get("group") or {} for record in of_kind]
    starts = {facts["opened_at"] - facts["asked_at"] for facts in times if facts}
    positive = [start_s for start_s in starts if start_s > 0]
    return statistics.median(positive) if positive else None


def has_own_launch(record: Mapping[Any, Any]) -> bool:
    """Return True if the trial's worker group was the first of its launch. Older records do not name the launch."""
    group = str(record.get("worker_group", "-1"))
    launch = (record.get("environment") or {}).get("launch")
    return launch == group if launch else group.endswith("-1")


_REPEAT_FIELDS = frozenset({"repeat", "seed"})
"""Fields that may differ between repeats of a configuration."""

_SIMILAR_FIELDS = _REPEAT_FIELDS | {"batch_per_gpu", "loader_workers", "precision"}
"""Fields that may differ between similar trials."""

_ACCURACY_FIELDS = frozenset({*fields_of_kind("recipe"), "accumulation_steps", "execution", "noise_scale"})
"""Fields that affect the accuracy of a training trial more than its time, or its time less than the batch does."""


def configuration_key(trial: Trial) -> tuple[Any, ...]:
    """Return what the repeats of a configuration share."""
    return _key(trial.model_dump(), _REPEAT_FIELDS)


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
