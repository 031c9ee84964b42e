"""The study of a user's own script or train function."""

from typing import Any

from study.capacity import Capacity
from study.studies.study import Study, gpus, world_sizes


def own_code_study(capacity: Capacity, name: str) -> Study:
    """Return a study of a user's own code on 1, 2, 4, ... GPUs, or CPU ranks if there are no GPUs."""
    on_gpus = gpus(capacity) > 0
    base: dict[str, Any] = {"device": "cuda", "warmup_steps": 12, "steps": 30}
    if not on_gpus:
        base = {"device": "cpu", "warmup_steps": 6, "steps": 10, "sweep_bytes": 4 * 2**20}  # gloo is slow
    return Study(
        name=name,
        question="How does this training scale on this machine, what limits it, and what would help?",
        base=base,
        axes={"world_size": world_sizes(capacity)},
        repeats=5 if on_gpus else 3,
    )
