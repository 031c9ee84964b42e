"""Levers of the project's own training step, for registered models and users' workloads."""

from collections.abc import Callable, Mapping
from typing import Any

from analysis.compare.bottleneck import COMMUNICATION
from study.improve.lever import Change, Effect, Lever, Machine, changed_fields
from trainables.registry import DECODERS, MODELS, OPTIMIZERS, PARALLEL, STORAGES
from trainables.rule import data
from trainables.trial import Trial

BATCH_FACTOR = 2
LARGER_BATCH_PARTS = ("host", *COMMUNICATION, "idle")
"""Regions of a step that do not grow with the batch."""

FIRST_BUCKET_MB = 1.0
"""DDP's own size of the first bucket if it is given none for the others (`_DEFAULT_FIRST_BUCKET_BYTES` in torch)"""

FP8_REMAINS = 0.5
"""A product takes half as long in fp8 as in bf16 (NVIDIA's data sheets of L40S, H100, H200 and B200), a copy too."""

_COPIES_SLOWLY = "the step must not depend on values that Python reads from the device"


def _on_gpu(change: Callable[[Trial], Mapping[str, Any] | None]) -> Change:
    return lambda trial, machine: change(trial) if trial.device == "cuda" else None


def _from(field: str, values: tuple[Any, ...], new: Any) -> Change:
    """Change a field from one of these values to a new one, on GPUs."""
    return _on_gpu(lambda trial: {field: new} if getattr(trial, field) in values else None)


def _compile(trial: Trial) -> Mapping[str, Any] | None:
    return {"execution": {"eager": "compile", "graph": "compile_graph"}.get(trial.execution, trial.execution)}


def _graph(trial: Trial) -> Mapping[str, Any] | None:
    return {"execution": {"eager": "graph", "compile": "compile_graph"}.get(trial.execution, trial.execution)}


def _fp8(trial: Trial) -> Mapping[str, Any] | None:
    is_text = not trial.workload and MODELS[trial.model].reads != "images"  # linear layers take most of the time
    return {"precision": "fp8"} if is_text and trial.precision == "bf16" else None


def _channels_last(trial: Trial) -> Mapping[str, Any] | None:
    is_dense = not trial.workload and (MODELS[trial.model].reads != "images" or trial.model == "mlp")
    return None if is_dense else {"memory_format": "channels_last"}


def _loads(trial: Trial) -> bool:
    """Return True if batches come from a loader, rather than being on the device already."""
    return not data(trial, "on_device") and not trial.resident_data


def _workers(least: int, most: int) -> Change:
    """Use as many loader processes as the rank's host has cores, up to `most`, if at least `least` are used now."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        count = min(most, machine.spare_cores(trial))
        applies = _loads(trial) and least <= trial.loader_workers < count
        return {"loader_workers": count} if applies else None

    return change


def _prefetch(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    return {"prefetch_batches": 2 * trial.prefetch_batches} if _loads(trial) and trial.loader_workers else None


def _pin(trial: Trial) -> Mapping[str, Any] | None:
    return {"pin_memory": True, "non_blocking": True} if _loads(trial) else None


def _copy_ahead(trial: Trial) -> Mapping[str, Any] | None:
    return {"copy_ahead": True, "pin_memory": True, "non_blocking": True} if _loads(trial) else None


def _storage(name: str) -> Change:
    """Read the data set in another format, if the data folder holds it."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if not data(trial, "image_folder") or name not in machine.storages:
            return None
        return {"storage": name} | ({"decode": "pil"} if STORAGES[name].holds_pixels else {})

    return change


def _decode(name: str) -> Change:
    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if not data(trial, "image_folder") or STORAGES[trial.storage].holds_pixels or trial.decode == name:
            return None
        moved = {"augment": "device"} if DECODERS[name].on_device and trial.augment == "cpu" else {}
        return {"decode": name} | moved

    return change


def _augment(trial: Trial) -> Mapping[str, Any] | None:
    return {"augment": "device"} if trial.augment == "cpu" else None


def _in_memory(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    if not data(trial, "image_folder") or trial.storage_place == "shared_memory":
        return None
    return {"storage_place": "shared_memory", "page_cache": "as_is"}


def _warm(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    return {"page_cache": "warm"} if data(trial, "image_folder") and trial.storage_place == "disk" else None


def _ddp(**fields: Any) -> Change:
    """Change options of DDP, on several ranks."""
    names = set(fields)

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        return fields if trial.world_size > 1 and names <= set(PARALLEL[trial.parallel].options) else None

    return change


def _buckets(factor: float) -> Change:
    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        return _ddp(bucket_mb=factor * trial.bucket_mb)(trial, machine)

    return change


def _first_bucket(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    """Send the first gradients before a bucket of the usual size is full."""
    if trial.first_bucket_mb is not None or trial.bucket_mb <= FIRST_BUCKET_MB:
        return None
    return _ddp(first_bucket_mb=FIRST_BUCKET_MB)(trial, machine)


def _parallel(name: str) -> Change:
    """Change the parallel strategy from DDP, on several GPUs. Drop the options that the new one lacks."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if trial.device != "cuda" or trial.world_size == 1 or trial.parallel != "ddp":
            return None
        lost = set(PARALLEL["ddp"].options) - set(PARALLEL[name].options)
        return {"parallel": name} | {option: Trial.model_fields[option].default for option in lost}

    return change


def _larger_batch(trial: Trial, machine: Machine) -> dict[str, Any]:
    return {"batch_per_gpu": BATCH_FACTOR * trial.batch_per_gpu} | _scaled_rate(trial)


def _checkpointed_batch(kind: str) -> Change:
    """Use a larger batch in the memory of activations that are computed again."""

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        if trial.activation_checkpointing == "full":
            return None
        return {"activation_checkpointing": kind} | _larger_batch(trial, machine)

    return change


def _accumulate(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    if trial.world_size == 1:
        return None
    return {"accumulation_steps": BATCH_FACTOR * trial.accumulation_steps} | _scaled_rate(trial)


def _scaled_rate(trial: Trial) -> dict[str, Any]:
    """Return the rule with which a training's learning rate follows its batch, unless it has one already."""
    if not trial.epochs or trial.lr_rule != "none":
        return {}
    rule = "linear" if OPTIMIZERS[trial.optimizer].momentum else "sqrt"
    return {"lr_rule": rule, "reference_batch": trial.global_batch}


def _resident(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    """Gather the batches of a training on the device. Timed steps have no such form."""
    if not trial.epochs or not _loads(trial):
        return None
    return {"resident_data": True, "loader_workers": 0, "copy_ahead": False}


def _cores(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
    cores = machine.spare_cores(trial)
    return {"cpus_per_rank": cores} if trial.device == "cpu" and cores > trial.cpus_per_rank else None


def _stem(trial: Trial) -> Mapping[str, Any] | None:
    return {"rewritten_stem": True} if trial.compiled else None


_RATE = (
    f"the global batch grows {BATCH_FACTOR}x: with SGD multiply the learning rate by {BATCH_FACTOR} and warm it up, "
    f"with Adam by {BATCH_FACTOR**0.5:.2g}; train to the end before you rely on it"
)
"""Linear rule: Goyal et al., 2017. Square root: Malladi et al., 2022."""

_HALF = "compare the accuracy at the end of a training too"

_SINGLE: tuple[Lever, ...] = (
    Lever("loader workers, up to 8", ("load",), "order", _workers(0, 8)),
    Lever("loader workers, up to 16", ("load",), "order", _workers(8, 16)),
    Lever("decode on GPU, ahead", ("load",), "arithmetic", _decode("nvjpeg_ahead"), _HALF),
    Lever("decode on GPU", ("load",), "arithmetic", _decode("nvjpeg"), _HALF),
    *(Lever(f"storage {name}", ("load",), "memory", _storage(name)) for name in STORAGES if name != "jpeg"),
    Lever("decode by torchvision", ("load",), "arithmetic", _decode("torchvision"), _HALF),
    Lever("bf16", ("compute", "host"), "arithmetic", _from("precision", ("fp32", "tf32"), "bf16"), _HALF),
    Lever("tf32", ("compute",), "arithmetic", _from("precision", ("fp32",), "tf32"), _HALF),
    Lever("channels_last", ("compute",), "order", _on_gpu(_channels_last)),
    Lever("compile", ("compute", "host"), "order", _on_gpu(_compile), "the first steps take minutes"),
    Lever("CUDA graph", ("host", "idle"), "order", _on_gpu(_graph), _COPIES_SLOWLY),
    Lever(
        "compiled CUDA graph", ("compute", "host", "idle"), "order",
        _from("execution", ("eager",), "compile_graph"), _COPIES_SLOWLY,
    ),
    Lever("rewritten stem", ("compute",), "order", _on_gpu(_stem)),
    Lever(f"batch {BATCH_FACTOR}x", LARGER_BATCH_PARTS, "arithmetic", _larger_batch, _RATE),
    Lever("fp8", ("compute",), "arithmetic", _on_gpu(_fp8), _HALF, remains=FP8_REMAINS),
    Lever(
        "selective checkpointing, batch 2x", LARGER_BATCH_PARTS, "arithmetic",
        _checkpointed_batch("selective"), _RATE, if_no_memory_for="batch 2x",
    ),
    Lever(
        "full checkpointing, batch 2x", LARGER_BATCH_PARTS, "arithmetic",
        _checkpointed_batch("full"), _RATE, if_no_memory_for="selective checkpointing, batch 2x",
    ),
    Lever("data on the device", ("load", "transfer"), "memory", _resident, "the data set must fit in device memory"),
    Lever("copy ahead", ("transfer",), "order", _on_gpu(_copy_ahead)),
    Lever("pinned memory", ("transfer",), "memory", _on_gpu(_pin)),
    Lever("prefetch 2x", ("load",), "memory", _prefetch),
    Lever("augment on GPU", ("load",), "order", _on_gpu(_augment)),
    Lever("data in shared memory", ("load",), "memory", _in_memory),
    Lever("warm page cache", ("load",), "memory", _warm, "read the files once before; they must fit in memory"),
    Lever("all CPU cores", ("compute",), "order", _cores),
    Lever(
        "pinned cores", ("compute", "wait"), "order",
        lambda trial, machine: {"pin_cores": True} if trial.device == "cpu" else None,
    ),
    Lever("bf16 gradients", COMMUNICATION, "arithmetic", _parallel("ddp_bf16"), _HALF),
    Lever("fp16 gradients", COMMUNICATION, "arithmetic", _parallel("ddp_fp16"), _HALF),
    Lever("accumulation 2x", (*COMMUNICATION, "host"), "arithmetic", _accumulate, _RATE),
    Lever("buckets 4x", ("wire", "contention"), "order", _buckets(4)),
    Lever("buckets 1/4", ("wire", "contention"), "order", _buckets(0.25)),
    Lever("first bucket 1 MiB", ("wire",), "order", _first_bucket),
    Lever("gradient views", ("compute", "host"), "memory", _ddp(gradient_as_bucket_view=True)),
    Lever("static graph", ("wire", "host"), "order", _ddp(static_graph=True)),
    Lever(
        "no buffer broadcast", ("wire", "wait", "host"), "arithmetic", _ddp(broadcast_buffers=False),
        "batch normalisation then keeps each rank's own running averages",
    ),
    Lever("ZeRO-1", ("compute",), "memory", _parallel("zero1")),
    Lever("FSDP2", ("compute", "wire"), "memory", _parallel("fsdp2"), "checkpoints then hold sharded weights"),
)  # fmt: skip
"""Equal bounds are tried in this order: usually larger gains first."""


def _usual(effect: Effect) -> Lever:
    """Return a lever of the settings that most trainings on GPUs use, as far as they apply.

    effect: the largest that its parts have. They are one lever, because loading hides behind slow compute and compute
    behind slow loading: on one H100, neither bf16 nor loader processes alone sped up a naive ResNet-50.
    """
    names = ["channels_last", "loader workers, up to 8", "copy ahead"] + ["bf16"] * (effect == "arithmetic")
    parts = [lever for lever in _SINGLE if lever.name in names]

    def change(trial: Trial, machine: Machine) -> Mapping[str, Any] | None:
        changed, count = trial, 0
        for lever in parts if trial.device == "cuda" else ():
            if after := lever.applied(changed, machine):
                changed, count = after, count + 1
        return changed_fields(trial, changed) if count > 1 else None

    name = "usual settings" if effect == "arithmetic" else "usual settings, same arithmetic"
    note = f"as far as they apply: {', '.join(names)}"
    acts_on = tuple(dict.fromkeys(part for lever in parts for part in lever.parts))
    return Lever(name, acts_on, effect, change, note, is_first=True, members=tuple(parts))


LEVERS: tuple[Lever, ...] = (_usual("arithmetic"), _usual("order"), *_SINGLE)
