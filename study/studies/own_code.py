"""The study of a user's own script, train function or workload."""

import dataclasses
from typing import Any

from study.capacity import Capacity, gpus
from study.studies.basic import weak
from study.studies.study import Study, world_sizes

_QUESTION = "How does this training scale on this machine, what limits it, and what would help?"


def own_code_study(capacity: Capacity, name: str) -> Study:
    """Return a study of a script or train function on 1, 2, 4, ... GPUs, or CPU ranks if there are no GPUs."""
    on_gpus = gpus(capacity) > 0
    return Study(
        name=name,
        question=_QUESTION,
        base={"device": "cuda" if on_gpus else "cpu"} | _windows(on_gpus),
        axes={"world_size": world_sizes(capacity)},
        repeats=5 if on_gpus else 3,
    )


def workload_study(capacity: Capacity, name: str) -> Study:
    """Return the study of a workload: `weak`, with windows as short as those of scripts."""
    study = weak(capacity)
    base = dict(study.base) | _windows(gpus(capacity) > 0)
    return dataclasses.replace(study, name=name, question=_QUESTION, base=base)


def _windows(on_gpus: bool) -> dict[str, Any]:
    if on_gpus:
        return {"warmup_steps": 12, "steps": 30}
    return {"warmup_steps": 6, "steps": 10, "sweep_bytes": 4 * 2**20}  # gloo is slow
