"""Levers of users' scripts and train functions: environment variables, bound fields, and values that users vary."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from analysis.compare.bottleneck import COMMUNICATION
from study.improve.factory_levers import BATCH_FACTOR, LARGER_BATCH_PARTS
from study.improve.lever import Change, Lever, Machine
from trainables.trial import Trial


def _variable(name: str, value: str, gpu: bool = True, several: bool = False) -> Change:
    """Set a variable of a script, unless the user sets it. gpu, several: only on GPUs, only on several ranks."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        applies = (
            trial.door == "script" and (trial.device == "cuda" or not gpu) and (trial.world_size > 1 or not several)
        )
        return _with_variable(trial, name, value) if applies else None

    return change


def _with_variable(trial: Trial, name: str, value: str) -> Mapping[str, Any] | None:
    entries = shlex.split(trial.script_env)
    if any(entry.partition("=")[0] == name for entry in entries):
        return None
    return {"script_env": shlex.join([*entries, f"{name}={value}"])}


def _threads(share: float) -> Change:
    """Give each rank's script a share of the cores that its host has per rank as threads."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        threads = max(1, int(share * machine.spare_cores(trial)))
        if trial.door != "script" or threads == trial.cpus_per_rank:
            return None
        return _with_variable(trial, "OMP_NUM_THREADS", str(threads))

    return change


def _bound(field: str, values: Sequence[int] = (), factor: int = 1) -> Change:
    """Change a field that the user binds to a flag: to the first larger value, or by a factor."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if field not in trial.bound_fields:
            return None
        now = getattr(trial, field)
        new = next((value for value in values if value > now), None) if values else factor * now
        return None if new is None or (values and new > machine.spare_cores(trial)) else {field: new}

    return change


_RATE = f"the global batch grows {BATCH_FACTOR}x: adapt the learning rate; train to the end before you rely on it"

LEVERS: tuple[Lever, ...] = (
    Lever("more loader workers (bound)", ("load",), "order", _bound("loader_workers", (2, 4, 8))),
    Lever(
        "batch 2x (bound)", LARGER_BATCH_PARTS, "arithmetic",
        _bound("batch_per_gpu", factor=BATCH_FACTOR), _RATE,
    ),
    Lever(
        "accumulation 2x (bound)", (*COMMUNICATION, "host"), "arithmetic",
        _bound("accumulation_steps", factor=BATCH_FACTOR), _RATE,
    ),
    Lever("OMP_NUM_THREADS, all cores", ("load", "compute"), "order", _threads(1.0)),
    Lever("OMP_NUM_THREADS, half of the cores", ("load", "compute"), "order", _threads(0.5)),
    Lever(
        "CUDA_DEVICE_MAX_CONNECTIONS=32", ("wire", "host", "idle"), "order",
        _variable("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ),
    Lever(
        "CUDA_DEVICE_MAX_CONNECTIONS=1", ("wire",), "order",
        _variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", several=True),
    ),
    Lever(
        "NCCL_BUFFSIZE=16777216", ("wire",), "memory", _variable("NCCL_BUFFSIZE", "16777216", several=True),
    ),
    Lever("NCCL_MIN_CTAS=16", ("wire",), "order", _variable("NCCL_MIN_CTAS", "16", several=True)),
    Lever("NCCL_MAX_CTAS=8", ("wire", "contention", "compute"), "order", _variable("NCCL_MAX_CTAS", "8", several=True)),
    Lever(
        "TORCHINDUCTOR_MAX_AUTOTUNE=1", ("compute",), "order", _variable("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
        "acts on code that torch.compile compiles",
    ),
    Lever(
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1", ("compute",), "order",
        _variable("TORCHINDUCTOR_COORDINATE_DESCENT_TUNING", "1"), "acts on code that torch.compile compiles",
    ),
)  # fmt: skip


def varied_levers(axes: Mapping[str, Sequence[Any]]) -> Iterable[Lever]:
    """Return a lever per further value of an axis that the user gives several values; the first is the baseline's.

    Its bound is unknown, and it may change anything.
    """
    for field, (_, *others) in axes.items():
        for value in others:
            name = str(value) if field in ("script_flags", "script_env", "function_config") else f"{field} {value}"
            yield Lever(name or f"no {field}", (), "arithmetic", _value(field, value), "your own value")


def _value(field: str, value: Any) -> Change:
    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if field != "script_env":
            return {field: value}
        new = shlex.split(value)
        names = {entry.partition("=")[0] for entry in new}
        others = [entry for entry in shlex.split(trial.script_env) if entry.partition("=")[0] not in names]
        return {"script_env": shlex.join([*others, *new])}

    return change
