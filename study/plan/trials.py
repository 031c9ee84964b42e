"""What a study will run: every combination once, each with a status; in which order; how long; for how much."""

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
from study.studies.study import NO_FIELDS, Study
from trainables.data.files import missing_files
from trainables.facts import DatasetFacts
from trainables.fields import explain, fields_of_kind
from trainables.registry import DATASETS
from trainables.rules import unmet_requirement
from trainables.trial import Trial

SETTLED = ("done", "out_of_memory", "pruned")
"""statuses in a results folder that are not run again; failed and timed out trials are"""


LAYOUT_FIELDS = (*fields_of_kind("layout"), "cpus_per_rank", "device")
"""fields that decide whether a trial fits a cluster"""


MOST_TRIALS = 100_000


SEED_STRIDE = 1_000
"""between the seeds of a training's repeats: they are to differ in everything that chance decides, timings in nothing"""


class PlanError(Exception):
    """A plan that cannot be made, in one line: what is wrong and what is allowed."""

    exit_code = USAGE


@dataclass(frozen=True)
class PlannedTrial:
    """One combination and repeat. `trial` is None where the combination is no valid trial (`skipped`)."""

    trial: Trial | None
    fields: Mapping[str, Any]
    status: str
    """pending, skipped, infeasible, or what the results folder says: done, out_of_memory, pruned"""
    reason: str = ""
    case: str = ""
    """name of the study's case that it belongs to"""


def plan_trials(
    study: Study,
    capacity: Capacity,
    statuses: Mapping[str, str] | None = None,
    out_of_memory: Sequence[Trial] = (),
) -> list[PlannedTrial]:
    """Every combination of the study's axes and repeats, exactly once, in the order of the axes.

    `statuses`: status by trial id of what has been run; `out_of_memory`: trials that ran out of it before.
    Raises PlanError where there are no or too many combinations, and for a rank to profile that no trial has.
    """
    crossed = max(1, len(study.cases)) * math.prod(len(values) for values in study.axes.values())
    count = (crossed + len(study.beside)) * study.repeats
    if not 0 < count <= MOST_TRIALS:
        raise PlanError(f"study {study.name!r} with these axes has {count} trials; allowed: 1 to {MOST_TRIALS}")
    look_up = functools.cache(functools.partial(_lacking, capacity))  # a plan of many trials reads each folder once
    rows = []
    seen: set[str] = set()
    for case, fields in study.combinations():
        for repeat in range(study.repeats):
            row = _row(study, fields | {"repeat": repeat}, capacity, look_up)
            row = dataclasses.replace(row, case=case)
            if row.trial is not None and row.trial.trial_id in seen:
                continue  # of another case that comes to the same
            seen.update([row.trial.trial_id] if row.trial is not None else [])
            rows.append(_with_history(row, statuses or {}, out_of_memory))
    _refuse_absent_ranks(rows)
    return rows


def _refuse_absent_ranks(rows: Sequence[PlannedTrial]) -> None:
    """Raises PlanError where a rank that shall keep a trace is in no trial; in a grid over world sizes some may lack it."""
    largest: dict[str, int] = {}
    for trial in (row.trial for row in rows if row.trial is not None):
        largest[trial.profile_ranks] = max(largest.get(trial.profile_ranks, 0), trial.world_size)
    for asked, world_size in largest.items():
        ranks = [int(rank) for rank in asked.split("+")] if asked not in ("", "all") else []
        if ranks and max(ranks) >= world_size:
            raise PlanError(
                f"profile_ranks {asked!r}: no trial of this plan has a rank {max(ranks)}; "
                f"ranks of the largest: 0 to {world_size - 1}"
            )


def _row(study: Study, fields: dict[str, Any], capacity: Capacity, look_up: Callable[..., str | None]) -> PlannedTrial:
    reason = next((reason for rule in study.skip if (reason := rule(fields))), None)
    if reason:
        return PlannedTrial(None, fields, "skipped", reason)
    resolved = {name: value for name, value in fields.items() if name not in NO_FIELDS}
    if "global_batch" in fields:
        parts, over = _batch_parts(fields)
        batch, rest = divmod(fields["global_batch"], math.prod(parts))
        if rest or not batch:
            reason = f"global batch {fields['global_batch']} does not divide over {over}"
            return PlannedTrial(None, fields, "skipped", reason)
        resolved |= {"batch_per_gpu": batch, "accumulation_steps": parts[1]}
    if fields.get("epochs"):
        resolved["seed"] = (fields.get("seed", 0) + SEED_STRIDE * fields["repeat"]) % 2**31
    facts = DATASETS.get(fields.get("dataset", ""), DatasetFacts())
    if fields.get("epoch_steps") and not fields.get("epochs") and facts.training_images:
        resolved |= _one_epoch(resolved, facts.training_images)
    if "image_size" not in fields and facts.image_size:
        resolved["image_size"] = facts.image_size
    resolved.setdefault("cpus_per_rank", default_cpus_per_rank(resolved["device"], capacity))
    nodes, unfit = fit(resolved, capacity)
    resolved["nodes"] = nodes
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
    reason = unmet_requirement(trial) or unfit or _misfit(trial, look_up)
    return PlannedTrial(trial, resolved, "infeasible" if reason else "pending", reason or "")


def _misfit(trial: Trial, look_up: Callable[..., str | None]) -> str | None:
    """Why the trial's folder is not what it asks for, where this host has the folder."""
    if trial.workload or not DATASETS[trial.dataset].needs_data_dir or not trial.data_dir:
        return None
    splits = ("train", "test") if trial.epochs else ("train",)
    found = (look_up(Path(trial.data_dir), trial.dataset, trial.storage, trial.image_size, split) for split in splits)
    return next(filter(None, found), None)


def _lacking(capacity: Capacity, folder: Path, *asked: Any) -> str | None:
    """What `missing_files` says; nothing of a folder that is not here, or is empty where other nodes may have it mounted."""
    is_elsewhere = not folder.is_dir() or (len(capacity) > 1 and not any(folder.iterdir()))
    return None if is_elsewhere else missing_files(folder, *asked)


def _batch_parts(fields: Mapping[str, Any]) -> tuple[tuple[int, int], str]:
    """Into how many ranks and batches of each a global batch is divided, and how to say it."""
    ranks, most = fields["world_size"], fields.get("most_per_gpu")
    accumulated = fields.get("accumulation_steps", 1)
    if most is not None:
        accumulated = max(accumulated, -(-fields["global_batch"] // (ranks * most)))
    over = f"world_size {ranks}" + (f" and accumulation_steps {accumulated}" if accumulated > 1 else "")
    return (ranks, accumulated), over


def _one_epoch(fields: Mapping[str, Any], images: int) -> dict[str, int]:
    """Steps of a warm-up and of timed windows that last an epoch each, as far as a batch is not larger than one."""
    together = fields["world_size"] * fields["batch_per_gpu"] * fields.get("accumulation_steps", 1)
    steps = images // together
    return {"warmup_steps": max(2, steps), "steps": max(1, steps)}


def _with_history(row: PlannedTrial, statuses: Mapping[str, str], out_of_memory: Sequence[Trial]) -> PlannedTrial:
    """The row with what is known from earlier runs: settled results stay, whatever fits today."""
    if row.trial is None:
        return row
    status = statuses.get(row.trial.trial_id)
    if status in SETTLED:
        return dataclasses.replace(row, status=status, reason="")
    if row.status != "pending":
        return row
    pruned = pruned_by(row.trial, out_of_memory)
    if pruned:
        return dataclasses.replace(row, status="pruned", reason=pruned)
    again = f"ended as {status} before; runs again" if status in ("failed", "timeout") else ""
    return dataclasses.replace(row, reason=again)


def fit(fields: Mapping[str, Any], capacity: Capacity) -> tuple[int, str | None]:
    """Over how many nodes a trial spreads, and None or the reason why it does not fit.

    Every node gets equally many ranks. Without `nodes` in the fields it is the smallest number that fits.
    """
    asked = fields.get("nodes")
    nodes = _nodes_with_room(fields["world_size"], asked, [_ranks_in(node, fields) for node in capacity])
    return (nodes, None) if nodes else (asked or 1, _unfit(fields, capacity))


def _nodes_with_room(ranks: int, asked: int | None, rooms: Sequence[int]) -> int | None:
    """The asked number of nodes, or the smallest one, over which ranks divide equally; `rooms`: ranks a node holds."""
    for nodes in [asked] if asked else range(1, min(ranks, len(rooms)) + 1):
        if ranks % nodes == 0 and sum(room >= ranks // nodes for room in rooms) >= nodes:
            return nodes
    return None


def _ranks_in(node: NodeCapacity, fields: Mapping[str, Any]) -> int:
    by_cpus = node.cpus // fields["cpus_per_rank"]
    return min(node.gpus, by_cpus) if fields["device"] == "cuda" else by_cpus


def _unfit(fields: Mapping[str, Any], capacity: Capacity) -> str:
    ranks, asked, cores = fields["world_size"], fields.get("nodes"), fields["cpus_per_rank"]
    on_gpus = fields["device"] == "cuda"
    counts = [node.gpus if on_gpus else node.cpus for node in capacity]
    have = [counted(count, "GPU" if on_gpus else "CPU core") for count in counts]
    if on_gpus and _nodes_with_room(ranks, asked, counts):
        cpus = ", ".join(counted(node.cpus, "CPU core") for node in capacity)
        return f"needs {counted(cores, 'CPU core')} for each of {counted(ranks, 'GPU')}; the nodes have {cpus}"
    if asked and asked > len(capacity):
        return f"needs {asked} nodes; there {'is' if len(capacity) == 1 else 'are'} {len(capacity)}"

    def need(ranks: int) -> str:
        cpus = f"{counted(ranks * cores, 'CPU core')} for {counted(ranks, 'rank')}"
        return counted(ranks, "GPU") if on_gpus else cpus

    if asked and asked > 1:
        return f"needs {need(ranks // asked)} on each of {asked} nodes; the nodes have {', '.join(have)}"
    if asked or len(capacity) == 1:
        return f"needs {need(ranks)} on one node; the largest node has {max(zip(counts, have, strict=True))[1]}"
    if sum(counts) < (ranks if on_gpus else ranks * cores):
        return f"needs {need(ranks)}; the {len(capacity)} nodes have {', '.join(have)}"
    return f"needs {need(ranks)}, equally many on each node that takes part; the nodes have {', '.join(have)}"


# ---------------------------------------------------------------------------------------------------------- pruning


def row_of(trial: Trial) -> tuple[Any, ...]:
    """What trials of one row share: every field but the batch, the repeat and the seed."""
    return tuple(value for name, value in trial.model_dump().items() if name not in ("batch_per_gpu", "repeat", "seed"))


def pruned_by(trial: Trial, out_of_memory: Sequence[Trial]) -> str | None:
    """Why a trial need not be run: its row ran out of memory at this batch or a smaller one. None where it did not."""
    row = row_of(trial)
    batches = [other.batch_per_gpu for other in out_of_memory if row_of(other) == row]
    if not batches or trial.batch_per_gpu < min(batches):
        return None
    return f"batch_per_gpu {min(batches)} of this row ran out of memory"
