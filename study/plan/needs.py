"""What a study needs, and how long it takes on some nodes."""

from collections.abc import Callable
from dataclasses import dataclass

from study.capacity import Capacity
from study.plan.estimate import estimate
from study.plan.trials import plan_trials
from study.studies.study import Study
from trainables.registry import DATASETS, names_with


@dataclass(frozen=True)
class Needs:
    """Needs of a study on given nodes. `ranks` and `nodes` are those of its largest trial, even if it does not fit."""

    trials: int
    infeasible: int
    device: str
    ranks: int
    nodes: int
    data_dir: bool
    """True if the study reads files that the user has to give."""
    made_for_gpus: bool
    """True if this is the small form of a study that is made for GPUs."""
    duration_s: float
    """Estimated time of the trials that are feasible."""


def needs(study_of: Callable[[Capacity], Study], nodes: Capacity) -> Needs:
    """Return what a study needs on these nodes. Files that the user has to give count as present."""
    study = study_of(nodes)
    fields = (study.base, *study.cases.values(), *study.extra_trials.values())
    data_dir = any(of_case.get("dataset") in names_with(DATASETS, "needs_data_dir") for of_case in fields)
    if data_dir:
        study = study.with_overrides({"data_dir": ("DIR",)})
    rows = [row for row in plan_trials(study, nodes) if row.trial is not None]
    return Needs(
        trials=len(rows),
        infeasible=sum(row.status == "infeasible" for row in rows),
        device=str(study.base["device"]),
        ranks=max(row.fields["world_size"] for row in rows),
        nodes=max(row.fields["nodes"] for row in rows),
        data_dir=data_dir,
        made_for_gpus="small_form" in study.report,
        duration_s=estimate(rows, (), None).duration_s,
    )
