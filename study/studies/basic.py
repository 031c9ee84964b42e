"""The named studies. Each is a function that returns a complete `Study` for the given nodes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from study.capacity import Capacity, gpus
from study.studies.comparisons import averaging, loader_grid, number_formats, real_ranks, storage_order
from study.studies.published import (
    acceleration_ladder,
    everything,
    forum_phases,
    hpml_lab4,
    mlstm_scaling,
    vgg_case_study,
)
from study.studies.study import Study, world_sizes
from study.studies.training import accuracy, fifth_epoch, large_batch
from study.studies.transformers import gpt2_scaling, sharding


def default(capacity: Capacity) -> Study:
    """Return a grid that takes minutes: two models at practical batch sizes on GPUs, a small model on CPU ranks."""
    on_gpus = gpus(capacity) > 0
    base: dict[str, Any] = {"memory_format": "channels_last", "learning_rate": 0.01}
    axes: dict[str, tuple[Any, ...]] = {"world_size": world_sizes(capacity)}
    if on_gpus:
        # Synthetic samples are on the device already, so that storage and decoding do not hide how training scales.
        base |= {"device": "cuda", "dataset": "synthetic", "image_size": 224, "sequence_length": 256}
        base |= {"precision": "bf16", "warmup_steps": 11, "steps": 20}
        axes |= {"model": ("resnet50", "transformer"), "batch_per_gpu": (64, 256)}
    else:
        # No loader processes: each rank has one core. Steps of 25 ms and more keep gloo's latency small against them.
        base |= {"device": "cpu", "model": "resnet20", "dataset": "fashion_mnist_sample"}
        # Where 110 steps of batch 64 take 18 s, the study would take 6 minutes instead of 4.
        base |= {"warmup_steps": 15, "steps": 110, "window_limit_s": 9.0}
        base |= {"communication_steps": 5, "sweep_bytes": 4 * 2**20}  # gloo is slow
        axes |= {"batch_per_gpu": (16, 64)}
    return Study(
        name="default",
        question=(
            "How does data-parallel training scale on this machine, what holds it back, and how does the batch size "
            "change that?"
        ),
        base=base,
        axes=axes,
        repeats=5 if on_gpus else 3,
    )


def weak(capacity: Capacity) -> Study:
    """Fix the batch per GPU, so the global batch grows with the number of GPUs."""
    study = default(capacity)
    on_gpus = study.base["device"] == "cuda"
    fixed: dict[str, tuple[Any, ...]] = {"batch_per_gpu": (128 if on_gpus else 32,)}
    if on_gpus:
        fixed["model"] = ("resnet50",)
    return dataclasses.replace(
        study.with_overrides(fixed),
        name="weak",
        question="With a fixed batch per GPU, how close to linear does throughput scale with the number of GPUs?",
    )


def strong(capacity: Capacity) -> Study:
    """Fix the global batch and divide it among more and more GPUs."""
    study = weak(capacity)
    on_gpus = study.base["device"] == "cuda"
    return dataclasses.replace(
        study.with_overrides({"global_batch": (512 if on_gpus else 64,)}),
        name="strong",
        question="With a fixed global batch, how much shorter is a step on more GPUs?",
    )


def smoke(capacity: Capacity) -> Study:
    """Return a grid that takes seconds and checks that everything works. Its numbers mean little."""
    on_gpus = gpus(capacity) > 0
    return Study(
        name="smoke",
        question="Does everything work on this machine, from the ranks to the report?",
        base={
            "device": "cuda" if on_gpus else "cpu",
            "model": "mlp",
            "dataset": "fashion_mnist_sample",
            "learning_rate": 0.01,
            "loader_workers": 0,
            "precision": "fp32",
            "warmup_steps": 2,
            "steps": 4,
        }
        | ({} if on_gpus else {"communication_steps": 1, "sweep_bytes": 4 * 2**20}),
        axes={
            "world_size": tuple(size for size in world_sizes(capacity) if size <= 2),
            "batch_per_gpu": (8, 16),
        },
        repeats=2,
    )


def interconnect(capacity: Capacity) -> Study:
    """Use complete nodes, more and more of them, with two models that differ in operations per byte of gradients.

    Use one results folder per network: the study does not know which network connects the nodes.
    """
    on_gpus = gpus(capacity) > 0
    ranks = [node.gpus if on_gpus else 1 for node in capacity if (node.gpus if on_gpus else node.cpus)]
    per_node = min(ranks, default=1)
    counts = [2**power for power in range(max(1, len(ranks)).bit_length())]
    base: dict[str, Any] = {"dataset": "synthetic", "learning_rate": 0.01}
    if on_gpus:
        base |= {"device": "cuda", "image_size": 224, "precision": "bf16", "warmup_steps": 11, "steps": 30}
        models, batch = ("vgg19", "resnet50"), 64
    else:
        base |= {
            "device": "cpu",
            "image_size": 32,
            "warmup_steps": 2,
            "steps": 3,
            "communication_steps": 3,
            "sweep_bytes": 2**22,
        }
        models, batch = ("mlp", "resnet18_small"), 8
    cases = {f"weak, {_nodes(n)}": {"nodes": n, "world_size": n * per_node, "batch_per_gpu": batch} for n in counts}
    cases |= {
        f"strong, {_nodes(n)}": {"nodes": n, "world_size": n * per_node, "batch_per_gpu": batch // n}
        for n in counts
        if batch % n == 0
    }
    return Study(
        name="interconnect",
        question=(
            "How much time does the network between nodes cost a model with few operations per byte of gradients, and "
            "one with many, with a fixed batch per GPU and with a fixed global batch?"
        ),
        base=base,
        axes={"model": models},
        repeats=3,
        cases=cases,
    )


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


STUDIES: Mapping[str, Callable[[Capacity], Study]] = {
    "default": default,
    "weak": weak,
    "strong": strong,
    "smoke": smoke,
    "everything": everything,
    "forum-phases": forum_phases,
    "acceleration-ladder": acceleration_ladder,
    "hpml-lab4": hpml_lab4,
    "vgg-case-study": vgg_case_study,
    "mlstm-scaling": mlstm_scaling,
    "gpt2-scaling": gpt2_scaling,
    "sharding": sharding,
    "accuracy": accuracy,
    "large-batch": large_batch,
    "fifth-epoch": fifth_epoch,
    "interconnect": interconnect,
    "storage-order": storage_order,
    "number-formats": number_formats,
    "loader-grid": loader_grid,
    "averaging": averaging,
    "real-ranks": real_ranks,
}
