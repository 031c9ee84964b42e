"""Named studies: each a function from what the machine can hold to full values, never a template to fill in."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from study.capacity import NodeCapacity

Capacity = Sequence[NodeCapacity]
Fields = Mapping[str, Any]
"""values of a trial's fields, by name; `global_batch` may stand in place of `batch_per_gpu`"""


@dataclass(frozen=True)
class Study:
    """A question and the grid that answers it: every combination of `axes` over `base`, `repeats` times.

    A skip rule looks at one combination and gives the reason why it means nothing, or None.
    """

    name: str
    question: str
    base: Fields
    axes: Mapping[str, tuple[Any, ...]]
    repeats: int
    skip: tuple[Callable[[Fields], str | None], ...] = ()

    def asking(self, axes: Mapping[str, tuple[Any, ...]], repeats: int | None = None) -> "Study":
        """This study with other values on some axes. The batch is per GPU or global: asking for one drops the other."""
        gone = _BATCH if _BATCH & set(axes) else set()
        kept = {name: axes.get(name, values) for name, values in self.axes.items() if name in axes or name not in gone}
        base = {name: value for name, value in self.base.items() if name not in axes and name not in gone}
        return dataclasses.replace(self, base=base, axes=kept | dict(axes), repeats=repeats or self.repeats)


_BATCH = {"batch_per_gpu", "global_batch"}


def default(capacity: Capacity) -> Study:
    """GPUs where there are any, else CPU ranks; a grid that ends in minutes."""
    on_gpus = _gpus(capacity) > 0
    base: dict[str, Any] = {"memory_format": "channels_last", "learning_rate": 0.01, "dataset": "fashion_mnist_sample"}
    axes: dict[str, tuple[Any, ...]] = {"world_size": _world_sizes(capacity)}
    if on_gpus:
        base |= {"device": "cuda", "model": "resnet18_small", "warmup_steps": 11, "steps": 50}
        axes |= {"batch_per_gpu": (32, 128, 512), "loader_workers": (2, 4), "precision": ("bf16", "fp32")}
    else:
        # The ImageNet stem divides 28 pixels by four before the first block; without it, a CPU that lacks bf16
        # instructions takes over a second for a bf16 step.
        base |= {"device": "cpu", "model": "resnet18", "warmup_steps": 2, "steps": 3, "prefetch_batches": 1}
        base |= {"account_steps": 1, "sweep_bytes": 4 * 2**20}  # gloo is slow, and the grid is to end in minutes
        axes |= {"batch_per_gpu": (2, 4), "loader_workers": (0, 1), "precision": ("fp32", "bf16")}
    return Study(
        name="default",
        question="How does data-parallel training scale here, and what do batch size, loader workers and precision change?",
        base=base,
        axes=axes,
        repeats=5 if on_gpus else 3,
    )


def weak(capacity: Capacity) -> Study:
    """One batch per GPU, so that the global batch grows with the GPUs."""
    study = default(capacity)
    on_gpus = study.base["device"] == "cuda"
    fixed = {
        "batch_per_gpu": (128 if on_gpus else 8,),
        "loader_workers": (4 if on_gpus else 0,),
        "precision": ("bf16" if on_gpus else "fp32",),
    }
    return dataclasses.replace(
        study.asking(fixed),
        name="weak",
        question="With the batch per GPU held, how close does throughput come to growing with the number of GPUs?",
    )


def strong(capacity: Capacity) -> Study:
    """One global batch, divided among more and more GPUs."""
    study = weak(capacity)
    on_gpus = study.base["device"] == "cuda"
    return dataclasses.replace(
        study.asking({"global_batch": (1024 if on_gpus else 16,)}),
        name="strong",
        question="With the global batch held, how much sooner does a step end on more GPUs?",
    )


def smoke(capacity: Capacity) -> Study:
    """Seconds, to see that everything works; its numbers mean little."""
    study = default(capacity)
    axes = {
        "world_size": tuple(size for size in _world_sizes(capacity) if size <= 2),
        "batch_per_gpu": (8, 16),
        "loader_workers": (0,),
        "precision": ("fp32",),
    }
    return dataclasses.replace(
        study.asking(axes, repeats=2),
        name="smoke",
        question="Does everything work here, from the ranks to the report?",
        base=dict(study.base) | {"model": "mlp", "memory_format": "contiguous", "warmup_steps": 2, "steps": 4},
    )


STUDIES: Mapping[str, Callable[[Capacity], Study]] = {
    "default": default,
    "weak": weak,
    "strong": strong,
    "smoke": smoke,
}


def _gpus(capacity: Capacity) -> int:
    return sum(node.gpus for node in capacity)


def _world_sizes(capacity: Capacity) -> tuple[int, ...]:
    """Powers of two up to all GPUs; without GPUs up to two CPU ranks, which is enough to show the whole path."""
    most = _gpus(capacity) or min(2, sum(node.cpus for node in capacity))
    return tuple(2**power for power in range(max(1, most).bit_length()))
