"""Plan the trials of a study: every combination once, with a status and a reason."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from study.capacity import Capacity, NodeCapacity, default_cpus_per_rank
from study.errors import USAGE, counted
from study.studies.study import PLAN_ONLY_FIELDS, Study
from trainables.data.files import missing_files
from trainables.facts import DatasetFacts
from trainables.fields import TrialFields, explain, fields_of_kind
from trainables.registry import DATASETS, MODELS, TOKEN_MODELS
from trainables.rules import unmet_requirement
from trainables.trial import Trial

FINAL_STATUSES = ("done", "out_of_memory", "pruned")
"""Statuses of trials that are not run again, unlike failed and timed-out ones."""

LAYOUT_FIELDS = (*fields_of_kind("layout"), "cpus_per_rank", "device")
"""Fields that decide whether a trial fits a cluster."""

MAX_TRIALS = 100_000

SEED_STRIDE = 1_000
"""Difference between the seeds of a training trial's repeats. Repeats of timed trials share one seed."""

FolderCheck = Callable[..., str | None]
"""Takes data folder, data set, storage, image size and split; returns what the folder lacks, or None."""


class PlanError(Exception):
    """A plan that is not possible. The message is one line: what is wrong and what is allowed."""

    exit_code = USAGE


@dataclass(frozen=True)
class PlannedTrial:
    """One combination and repeat. `trial` is None if the combination is not a valid trial (`skipped`)."""

    trial: Trial | None
    fields: Mapping[str, Any]
    status: str
    """pending, skipped, infeasible, or a final status from the results folder: done, out_of_memory, pruned"""
    reason: str = ""
    case: str = ""
    """Name of the study's case."""


def plan_trials(
    study: Study,
    capacity: Capacity,
    statuses: Mapping[str, str] | None = None,
    out_of_memory: Sequence[Trial] = (),
) -> list[PlannedTrial]:
    """Return every combination of the study's axes and repeats once, in the order of the axes.

    `statuses` maps trial ids of earlier runs to statuses; `out_of_memory` lists earlier trials that ran out of memory.
    Raises PlanError if there are no or too many combinations, or if no trial has the rank to profile.
    """
    crossed = max(1, len(study.cases)) * math.prod(len(values) for values in study.axes.values())
    count = (crossed + len(study.extra_trials)) * study.repeats
    if not 0 < count <= MAX_TRIALS:
        raise PlanError(f"study {study.name!r} with these axes has {count} trials; allowed: 1 to {MAX_TRIALS}")
    check_folder = functools.cache(functools.partial(_folder_problem, capacity))  # read each folder once
    rows = []
    seen: set[str] = set()
    for case, fields in study.combinations():
        for repeat in range(study.repeats):
            row = _planned_trial(study, fields | {"repeat": repeat}, capacity, check_folder)
            row = dataclasses.replace(row, case=case)
            if row.trial is not None and row.trial.trial_id in seen:
                continue  # another case has the same trial
            seen.update([row.trial.trial_id] if row.trial is not None else [])
            rows.append(_with_history(row, statuses or {}, out_of_memory))
    _check_profiled_ranks(rows)
    return rows


_NOT_AXES = {"repeat", "seed", "workload_digest", "script_digest", "train_function_digest"}


def varying_fields(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Return the fields in which these trials differ, other than their repeat and what follows from it."""
    if not trials:
        return ()
    first = trials[0].model_dump()
    others = [trial.model_dump() for trial in trials[1:]]
    return tuple(
        name for name in first if name not in _NOT_AXES and any(other[name] != first[name] for other in others)
    )


def _check_profiled_ranks(rows: Sequence[PlannedTrial]) -> None:
    """Raise PlanError if no trial has a rank to profile. The smaller trials of a grid over world sizes may lack it."""
    largest: dict[str, int] = {}
    for trial in (row.trial for row in rows if row.trial is not None):
        largest[trial.profile_ranks] = max(largest.get(trial.profile_ranks, 0), trial.world_size)
    for value, world_size in largest.items():
        ranks = [int(rank) for rank in value.split("+")] if value not in ("", "all") else []
        if ranks and max(ranks) >= world_size:
            raise PlanError(
                f"profile_ranks {value!r}: no trial of this plan has a rank {max(ranks)}; "
                f"ranks of the largest: 0 to {world_size - 1}"
            )


def _planned_trial(study: Study, fields: dict[str, Any], capacity: Capacity, check_folder: FolderCheck) -> PlannedTrial:
    reason = next((reason for rule in study.skip if (reason := rule(fields))), None)
    if reason:
        return PlannedTrial(None, fields, "skipped", reason)
    resolved = {name: value for name, value in fields.items() if name not in PLAN_ONLY_FIELDS}
    if "global_batch" in fields:
        ranks, accumulation_steps = fields["world_size"], _accumulation_steps(fields)
        batch, remainder = divmod(fields["global_batch"], ranks * accumulation_steps)
        if remainder or not batch:
            divisor = f"world_size {ranks}"
            if accumulation_steps > 1:
                divisor += f" and accumulation_steps {accumulation_steps}"
            reason = f"global batch {fields['global_batch']} does not divide over {divisor}"
            return PlannedTrial(None, fields, "skipped", reason)
        resolved |= {"batch_per_gpu": batch, "accumulation_steps": accumulation_steps}
    model = MODELS.get(fields.get("model", ""))
    if model is not None and "sequence_length" not in fields and model.sequence_length:
        resolved["sequence_length"] = model.sequence_length
    if "tokens_per_step" in fields:
        steps, reason = _steps_of_tokens(fields["tokens_per_step"], resolved)
        if reason:
            return PlannedTrial(None, fields, "skipped", reason)
        resolved["accumulation_steps"] = steps
    if fields.get("epochs"):
        resolved["seed"] = (fields.get("seed", 0) + SEED_STRIDE * fields["repeat"]) % 2**31
    facts = DATASETS.get(fields.get("dataset", ""), DatasetFacts())
    if fields.get("epoch_steps") and not fields.get("epochs") and facts.training_images:
        resolved |= _steps_of_one_epoch(resolved, facts.training_images)
    if "image_size" not in fields and facts.image_size:
        resolved["image_size"] = facts.image_size
    resolved.setdefault("cpus_per_rank", default_cpus_per_rank(resolved["device"], capacity))
    resolved["nodes"], does_not_fit = fit(resolved, capacity)
    try:
        trial = Trial.model_validate(resolved)
    except ValidationError as error:
        return PlannedTrial(None, resolved, "skipped", "; ".join(explain(error)))
    images = DATASETS[trial.dataset].training_images
    if trial.epochs and images is not None and trial.global_batch > images:
        reason = (
            f"global batch {trial.global_batch} is larger than an epoch: dataset {trial.dataset!r} has {images} images"
        )
        return PlannedTrial(None, resolved, "skipped", reason)
    reason = unmet_requirement(trial) or does_not_fit or _missing_files(trial, check_folder)
    return PlannedTrial(trial, resolved, "infeasible" if reason else "pending", reason or "")


def _missing_files(trial: Trial, check_folder: FolderCheck) -> str | None:
    """Return what the trial's data folder lacks, None if nothing or if this host does not have the folder."""
    if trial.workload or not DATASETS[trial.dataset].needs_data_dir or not trial.data_dir:
        return None
    splits = ("train", "test") if trial.epochs else ("train",)
    problems = (
        check_folder(Path(trial.data_dir), trial.dataset, trial.storage, trial.image_size, split) for split in splits
    )
    return next(filter(None, problems), None)


def _folder_problem(capacity: Capacity, folder: Path, *requested: Any) -> str | None:
    """Return what the data folder lacks, None if nothing.

    A folder that is missing or empty on this host may exist on other nodes, so it is not a problem.
    """
    is_elsewhere = not folder.is_dir() or (len(capacity) > 1 and not any(folder.iterdir()))
    return None if is_elsewhere else missing_files(folder, *requested)


def _steps_of_tokens(tokens_per_step: int, fields: Mapping[str, Any]) -> tuple[int, str]:
    """Return the batches to accumulate for these tokens per step of all ranks, or why that is impossible."""
    if fields.get("workload") or fields.get("model") not in TOKEN_MODELS:
        return 0, f"tokens per step require a model that reads tokens: {', '.join(TOKEN_MODELS)}"
    defaults = TrialFields.model_fields
    batch, length = (fields.get(name, defaults[name].default) for name in ("batch_per_gpu", "sequence_length"))
    tokens_per_batch = fields["world_size"] * batch * length
    steps, remainder = divmod(tokens_per_step, tokens_per_batch)
    if remainder or not steps:
        return 0, (
            f"{tokens_per_step} tokens per step are no multiple of world_size {fields['world_size']} x batch_per_gpu "
            f"{batch} x sequence_length {length} = {tokens_per_batch}"
        )
    return steps, ""


def _accumulation_steps(fields: Mapping[str, Any]) -> int:
    """Return the batches to accumulate per step, so that no batch per GPU is larger than `most_per_gpu`."""
    steps = fields.get("accumulation_steps", 1)
    limit = fields.get("most_per_gpu")
    return steps if limit is None else max(steps, -(-fields["global_batch"] // (fields["world_size"] * limit)))


LEAST_STEPS = 50
"""Least steps of a window of complete epochs: fewer have no reliable median."""


def _steps_of_one_epoch(fields: Mapping[str, Any], images: int) -> dict[str, int]:
    """Return warm-up and window steps: a warm-up of one epoch, and a window of epochs with at least `LEAST_STEPS`.

    If a batch is larger than an epoch, a step counts as one epoch.
    """
    global_batch = fields["world_size"] * fields["batch_per_gpu"] * fields.get("accumulation_steps", 1)
    steps = images // global_batch
    epoch = max(1, steps)
    return {"warmup_steps": max(2, steps), "steps": epoch * math.ceil(LEAST_STEPS / epoch)}


def _with_history(row: PlannedTrial, statuses: Mapping[str, str], out_of_memory: Sequence[Trial]) -> PlannedTrial:
    """Return the row with its result from earlier runs. Final results stay, even if the trial no longer fits."""
    if row.trial is None:
        return row
    status = statuses.get(row.trial.trial_id)
    if status in FINAL_STATUSES:
        return dataclasses.replace(row, status=status, reason="")
    if row.status != "pending":
        return row
    reason = pruned_by(row.trial, out_of_memory)
    if reason:
        return dataclasses.replace(row, status="pruned", reason=reason)
    is_retry = status in ("failed", "timeout")
    return dataclasses.replace(row, reason=f"ended as {status} before; runs again" if is_retry else "")


def fit(fields: Mapping[str, Any], capacity: Capacity) -> tuple[int, str | None]:
    """Return the number of nodes for a trial, and None or the reason why it does not fit.

    Every node gets the same number of ranks. Without `nodes` in the fields, return the smallest number that fits.
    """
    requested = fields.get("nodes")
    nodes = _number_of_nodes(fields["world_size"], requested, [_slots_of(node, fields) for node in capacity])
    return (nodes, None) if nodes else (requested or 1, _why_not_fitting(fields, capacity))


def _number_of_nodes(ranks: int, requested: int | None, slots: Sequence[int]) -> int | None:
    """Return the requested, else the smallest number of nodes that fit an equal share of the ranks; None if none does.

    `slots` is the number of ranks that fit on each node.
    """
    for nodes in [requested] if requested else range(1, min(ranks, len(slots)) + 1):
        if ranks % nodes == 0 and sum(count >= ranks // nodes for count in slots) >= nodes:
            return nodes
    return None


def _slots_of(node: NodeCapacity, fields: Mapping[str, Any]) -> int:
    by_cpus = node.cpus // fields["cpus_per_rank"]
    return min(node.gpus, by_cpus) if fields["device"] == "cuda" else by_cpus


def _why_not_fitting(fields: Mapping[str, Any], capacity: Capacity) -> str:
    ranks, requested, cores = fields["world_size"], fields.get("nodes"), fields["cpus_per_rank"]
    on_gpus = fields["device"] == "cuda"
    counts = [node.gpus if on_gpus else node.cpus for node in capacity]
    supply = [counted(count, "GPU" if on_gpus else "CPU core") for count in counts]
    if on_gpus and _number_of_nodes(ranks, requested, counts):
        cpus = ", ".join(counted(node.cpus, "CPU core") for node in capacity)
        return f"needs {counted(cores, 'CPU core')} for each of {counted(ranks, 'GPU')}; the nodes have {cpus}"
    if requested and requested > len(capacity):
        return f"needs {requested} nodes; there {'is' if len(capacity) == 1 else 'are'} {len(capacity)}"

    def demand(ranks: int) -> str:
        cpus = f"{counted(ranks * cores, 'CPU core')} for {counted(ranks, 'rank')}"
        return counted(ranks, "GPU") if on_gpus else cpus

    if requested and requested > 1:
        return f"needs {demand(ranks // requested)} on each of {requested} nodes; the nodes have {', '.join(supply)}"
    if requested or len(capacity) == 1:
        return f"needs {demand(ranks)} on one node; the largest node has {max(zip(counts, supply, strict=True))[1]}"
    if sum(counts) < (ranks if on_gpus else ranks * cores):
        return f"needs {demand(ranks)}; the {len(capacity)} nodes have {', '.join(supply)}"
    return f"needs {demand(ranks)}, the same number on each node used; the nodes have {', '.join(supply)}"


# ---------------------------------------------------------------------------------------------------------- pruning


def _fields_without_batch(trial: Trial) -> tuple[Any, ...]:
    """Return the values of all fields except the batch, the repeat and the seed."""
    return tuple(value for name, value in trial.model_dump().items() if name not in ("batch_per_gpu", "repeat", "seed"))


def pruned_by(trial: Trial, out_of_memory: Sequence[Trial]) -> str | None:
    """Return the reason to prune a trial, or None.

    A trial is pruned if an equal one with the same or a smaller batch ran out of memory.
    """
    fields = _fields_without_batch(trial)
    batches = [other.batch_per_gpu for other in out_of_memory if _fields_without_batch(other) == fields]
    if not batches or trial.batch_per_gpu < min(batches):
        return None
    return f"ran out of memory at batch_per_gpu {min(batches)}"
