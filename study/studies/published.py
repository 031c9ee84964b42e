"""Published studies and course assignments as this project runs them, and a study that tries every option."""

from typing import Any

from study.capacity import Capacity, NodeCapacity, default_cpus_per_rank, gpus
from study.studies.questions import asked
from study.studies.study import GPU_WINDOW, Study, small_form, world_sizes
from study.studies.training import fifth_epoch, short_training
from trainables.registry import (
    DECODERS,
    EXECUTIONS,
    IMAGE_MODELS,
    MEMORY_FORMATS,
    OPTIMIZERS,
    PARALLEL,
    PRECISIONS,
    SAMPLE_DATASETS,
    SEQUENCE_MODELS,
    STORAGES,
)

_OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "synchronised batch normalisation": {"model": "resnet18", "sync_batch_norm": True},
    "no buffer broadcast": {"model": "resnet18", "broadcast_buffers": False},
    "small buckets": {"bucket_mb": 0.1},
    "accumulation": {"accumulation_steps": 2},
    "without set_epoch": {"set_epoch": False},
    "in order": {"order": "in_order"},
    "augmentation by loaders": {"dataset": "image_folder_sample", "augment": "cpu"},
    "augmentation on the device": {"dataset": "image_folder_sample", "augment": "device"},
    "warm page cache": {"dataset": "image_folder_sample", "page_cache": "warm"},
    "shared memory": {"dataset": "image_folder_sample", "storage": "lmdb", "storage_place": "shared_memory"},
    "resident synthetic data": {"dataset": "synthetic", "image_size": 32},
    "loaded synthetic data": {"dataset": "synthetic_loader", "image_size": 32, "loader_workers": 1},
    "batches copied ahead": {
        "dataset": "synthetic_loader",
        "image_size": 32,
        "loader_workers": 1,
        "copy_ahead": True,
    },
}
"""Options of trials that are not choices from a registry."""


_TOKENS = {"model": "gpt2_tiny", "dataset": "token_sample", "sequence_length": 16}
"""a model with blocks"""


def everything(capacity: Capacity) -> Study:
    """Try each model, precision, strategy, optimizer, storage format, decoder and execution mode once.

    Every trial is as small as possible.
    """
    on_gpus = gpus(capacity) > 0
    ranks = max(size for size in world_sizes(capacity) if size <= 2)
    cases: dict[str, dict[str, Any]] = {"plain": {}} | _registered_names(on_gpus) | _OTHER_OPTIONS
    base: dict[str, Any] = {
        "device": "cuda" if on_gpus else "cpu",
        "model": "mlp",
        "world_size": ranks,
        "batch_per_gpu": 4,
        "warmup_steps": 2,
        "steps": 2,
        "prefetch_batches": 1,
        "communication_steps": 2,
        "sweep_bytes": 2**16,
    }
    return Study(
        name="everything",
        question="Which models, precisions, strategies, storage formats and execution modes run here, or why not?",
        base=base,
        axes={},
        repeats=1,
        cases=cases,
    )


def _registered_names(on_gpus: bool) -> dict[str, dict[str, Any]]:
    """Return one case per name in the registries."""
    cases: dict[str, dict[str, Any]] = {}
    for name, facts in IMAGE_MODELS.items():
        cases[f"model {name}"] = {"model": name, "image_size": max(32, facts.smallest_image)}
        if name.startswith("vgg") and not on_gpus:  # gloo takes seconds per step for 560 MB of gradients
            cases[f"model {name}"]["world_size"] = 1
    for name, facts in SEQUENCE_MODELS.items():
        cases[f"model {name}"] = {"model": name, "dataset": SAMPLE_DATASETS[facts.reads], "sequence_length": 16}
    for name in PRECISIONS:
        cases[f"precision {name}"] = {"precision": name}
    for name in PARALLEL:
        cases[f"parallel {name}"] = {"parallel": name} | ({"world_size": 1} if name == "none" else {})
    for name in EXECUTIONS:
        cases[f"execution {name}"] = {"execution": name} | (_TOKENS if name == "compile_blocks" else {})
    for name in OPTIMIZERS:
        cases[f"optimizer {name}"] = {"optimizer": name}
    for name in STORAGES:
        cases[f"storage {name}"] = {"dataset": "image_folder_sample", "storage": name}
    for name in DECODERS:
        cases[f"decode {name}"] = {"dataset": "image_folder_sample", "decode": name}
    for name in MEMORY_FORMATS:
        cases[f"memory format {name}"] = {"model": "resnet18", "memory_format": name}
    return cases


def forum_phases(capacity: Capacity) -> Study:
    """Ask why the processing time of a batch on one GPU changes when other GPUs train too."""
    on_gpus = gpus(capacity) > 0
    node_ranks = _on_one_node(capacity)
    axes: dict[str, tuple[Any, ...]] = {
        "world_size": (1, node_ranks) if node_ranks > 1 else (1,),
        "parallel": ("dp", "ddp"),
    }
    if on_gpus:
        base: dict[str, Any] = {
            "device": "cuda",
            "image_size": 224,
            "loader_workers": 4,
        } | GPU_WINDOW
        axes |= {"model": ("resnet18", "resnet50"), "batch_per_gpu": (64, 256, 512, 1024)}
    else:
        base = {"device": "cpu", "image_size": 32, "loader_workers": 1, "warmup_steps": 2, "steps": 3}
        base |= {"prefetch_batches": 1, "communication_steps": 1, "sweep_bytes": 2**20}
        axes |= {"model": ("resnet18",), "batch_per_gpu": (2, 8)}
    return Study(
        name="forum-phases",
        question=(
            "How long do loading, transfer and processing of a batch take with DataParallel and DDP, on one GPU and on "
            "several, and why does the processing time per GPU change?"
        ),
        base=base | {"dataset": "synthetic_loader", "learning_rate": 0.01},
        axes=axes,
        repeats=3,
        report=asked("forum-phases") | small_form(on_gpus),
        cases=_copy_cases(on_gpus),
    )


def _copy_cases(on_gpus: bool) -> dict[str, dict[str, Any]]:
    """Return all combinations of pinned memory and asynchronous copies; on CPUs, which copy nothing, only two."""
    cases = {
        "pinned, non-blocking": {"pin_memory": True, "non_blocking": True},
        "pageable, blocking": {"pin_memory": False, "non_blocking": False},
    }
    if on_gpus:
        cases["pinned, blocking"] = {"pin_memory": True, "non_blocking": False}
        cases["pageable, non-blocking"] = {"pin_memory": False, "non_blocking": True}
    return cases


_SOURCE = "a published study, another machine, one GPU"
PUBLISHED_LADDERS = [
    {"machine": "another machine's, batch 256", "samples": 256, "batches_s": [336.5, 88.0, 70.1], "source": _SOURCE},
    {
        "machine": "another machine's, batch 512",
        "samples": 512,
        "batches_s": [161.0, 81.7, 60.2, 41.6, 38.8, 22.1],
        "source": _SOURCE,
    },
]
"""Acceleration ladders from other machines: seconds per 300 batches, one value per step of the ladder."""


def acceleration_ladder(capacity: Capacity) -> Study:
    """Apply one improvement after another, from JPEG files, fp32 and one GPU to several nodes."""
    on_gpus = gpus(capacity) > 0
    mixed_precision = "fp16" if on_gpus else "bf16"
    base: dict[str, Any] = {"device": "cuda" if on_gpus else "cpu", "augment": "cpu"}
    if on_gpus:
        base |= {"dataset": "image_folder", "model": "resnet18", "image_size": 224, "warmup_steps": 200, "steps": 300}
    else:
        base |= {"dataset": "image_folder_sample", "model": "resnet18", "image_size": 32, "warmup_steps": 2, "steps": 4}
        base |= {"communication_steps": 1, "sweep_bytes": 2**20, "prefetch_batches": 1}
    # Speed does not show whether a precision can learn. Short training trials on the shipped sample do, whatever data
    # set the steps of the ladder read.
    levels = {"fp32 (O0)": "fp32", "mixed precision (O1)": mixed_precision}
    levels |= {"fp16 with master weights (O2)": "fp16_master", "pure fp16 (O3)": "fp16_pure"}
    training = short_training(on_gpus)
    return Study(
        name="acceleration-ladder",
        question="Starting from JPEG files, fp32 and one GPU: what does each step gain, and what do all gain together?",
        base=base | {"learning_rate": 0.01},
        axes={},
        repeats=3,
        cases=_ladder_steps(capacity, on_gpus, mixed_precision),
        ladder=True,
        report=asked("acceleration-ladder") | {"reference_ladders": PUBLISHED_LADDERS} | small_form(on_gpus),
        extra_trials={f"{name}, trained": training | {"precision": precision} for name, precision in levels.items()},
    )


def _ladder_steps(capacity: Capacity, on_gpus: bool, mixed_precision: str) -> dict[str, dict[str, Any]]:
    node_ranks = _on_one_node(capacity)
    global_batch = 512 if on_gpus else 8

    def step(ranks: int, **fields: Any) -> dict[str, Any]:
        return {"world_size": ranks, "batch_per_gpu": global_batch // ranks} | fields

    raw = {"storage": "arrow_raw", "storage_place": "shared_memory"}
    mixed = {"precision": mixed_precision}
    share = (
        default_cpus_per_rank("cuda", capacity)
        if on_gpus
        else max(1, max((node.cpus for node in capacity), default=1) // node_ranks)
    )
    few = {"loader_workers": 2 if on_gpus else 0, "cpus_per_rank": min(2 if on_gpus else 1, share)}
    many = {"loader_workers": 8 if on_gpus else 1, "cpus_per_rank": share}
    one = {"parallel": "none"}
    emulated = {"DDP, mixed precision, two nodes emulated by sockets": step(
        node_ranks, **raw, **many, **mixed, parallel="ddp", interconnect="socket"
    )}  # fmt: skip
    return {
        "JPEG files, fp32, one GPU": step(1, storage="jpeg", **one, **few),
        "LMDB": step(1, storage="lmdb", **one, **few),
        "raw pixels in shared memory": step(1, **raw, **one, **few),
        "mixed precision (O1)": step(1, **raw, **one, **few, **mixed),
        "fp16 with master weights (O2)": step(1, **raw, **one, **few, precision="fp16_master"),
        "pure fp16 (O3)": step(1, **raw, **one, **few, precision="fp16_pure"),
        "DataParallel, fp32": step(node_ranks, **raw, **few, parallel="dp"),
        "DataParallel, more loader workers and CPU threads": step(node_ranks, **raw, **many, parallel="dp"),
        "DDP, fp32": step(node_ranks, **raw, **many, parallel="ddp"),
        "DDP, mixed precision": step(node_ranks, **raw, **many, **mixed, parallel="ddp"),
        "DDP, mixed precision, two nodes": {
            "world_size": 2 * node_ranks, "nodes": 2, "batch_per_gpu": global_batch // node_ranks,
            **raw, **many, **mixed, "parallel": "ddp",
        },
        **(emulated if on_gpus and node_ranks > 1 else {}),
    }  # fmt: skip


def hpml_lab4(capacity: Capacity) -> Study:
    """Compare DataParallel and DDP from a small batch to the largest that fits, as in a course lab."""
    on_gpus = gpus(capacity) > 0
    # 64 and 256 give a data point of strong scaling: twice the batch on half the ranks.
    batches = (32, 64, 128, 256, 512, 2048, 8192, 32768, 131072) if on_gpus else (8, 32)
    base: dict[str, Any] = {
        "device": "cuda" if on_gpus else "cpu",
        "model": "resnet18_small" if on_gpus else "resnet18",
        "dataset": "fashion_mnist_sample",
        "loader_workers": 2 if on_gpus else 1,
        "learning_rate": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "epoch_steps": on_gpus,
    }
    if on_gpus:
        base |= {"window_limit_s": GPU_WINDOW["window_limit_s"]}  # for the largest batches, whose steps take seconds
    else:
        base |= {"warmup_steps": 2, "steps": 3, "prefetch_batches": 1, "communication_steps": 1, "sweep_bytes": 2**20}
    trainings = {f"epoch 5, {name}": trial for name, trial in fifth_epoch(capacity).combinations()}
    return Study(
        name="hpml-lab4",
        question=(
            "As the batch per GPU grows fourfold until memory runs out, how do DataParallel and DDP scale, where does "
            "the time go, and how much of the interconnect do they use?"
        ),
        base=base,
        axes={
            "parallel": ("dp", "ddp"),
            "world_size": tuple(size for size in world_sizes(capacity) if size <= 4),
            "batch_per_gpu": batches,
        },
        repeats=3,
        cases={"timed": {}},  # so that --case timed leaves the trainings out
        extra_trials=trainings if on_gpus else {},  # CPU ranks would train longer than they measure
        extra_follow=("dataset", "data_dir"),
        evidence=("study.studies.lab_evidence", *("--steps", "40", "--seeds", "2" if on_gpus else "1")),
        report=asked("hpml-lab4") | {"documents": ["lab4"], "report_epoch": 5} | small_form(on_gpus),
    )


def vgg_case_study(capacity: Capacity) -> Study:
    """Time VGG-19 on enlarged images: few, huge gradients, and DataParallel's extra memory on the first GPU.

    Also train a few epochs with each batch, under DDP only: DataParallel computes the same.
    """
    on_gpus = gpus(capacity) > 0
    base: dict[str, Any] = {"device": "cuda" if on_gpus else "cpu", "model": "vgg19", "dataset": "fashion_mnist_sample"}
    if on_gpus:
        base |= {"image_size": 224, "loader_workers": 8} | GPU_WINDOW
        batches: tuple[int, ...] = (12, 16, 32, 48, 64, 100, 128, 256, 512, 1024, 2048, 4096)
    else:
        base |= {"image_size": 32, "warmup_steps": 2, "steps": 2, "communication_steps": 1, "sweep_bytes": 2**20}
        batches = (2, 4)
    training: dict[str, Any] = {"parallel": "ddp", "epochs": 5, "momentum": 0.9}
    if not on_gpus:  # an epoch of VGG-19 takes half an hour on CPUs
        training |= {"model": "mlp", "image_size": 28, "epochs": 1, "batch_per_gpu": 64}
    return Study(
        name="vgg-case-study",
        question=(
            "How do step time and peak memory per GPU grow with the batch, with DataParallel and with DDP, and which "
            "accuracy does each batch reach?"
        ),
        base=base | {"learning_rate": 0.01},
        axes={
            "parallel": ("dp", "ddp"),
            "world_size": tuple(size for size in world_sizes(capacity) if size <= 2),
            "batch_per_gpu": batches,
        },
        repeats=3,
        cases={"timed": {}, "trained": training},
        report=asked("vgg-case-study") | {"report_epoch": training["epochs"]} | small_form(on_gpus),
    )


def mlstm_scaling(capacity: Capacity) -> Study:
    """Train a byte-level language model whose huge, dense weights load the interconnect."""
    on_gpus = gpus(capacity) > 0
    base: dict[str, Any] = {"device": "cuda" if on_gpus else "cpu", "dataset": "text_sample"}
    if on_gpus:
        base["dataset"] = "synthetic"  # the sample is too short for the streams of 8 GPUs
        base |= {"precision": "bf16", "sequence_length": 256} | GPU_WINDOW
        axes: dict[str, tuple[Any, ...]] = {
            "model": ("mlstm4096", "mlstm8192"),
            "batch_per_gpu": (256,),
            "interconnect": ("auto", "no_p2p", "socket"),
        }
        cases: dict[str, dict[str, Any]] = {
            "16-bit all-reduce": {"parallel": "ddp_fp16"},
            "32-bit all-reduce": {"parallel": "ddp"},
            # one process copies between its GPUs, so it says nothing about NCCL's paths
            "threads of one process": {"parallel": "dp", "interconnect": "auto"},
        }
    else:
        base |= {"precision": "fp32", "parallel": "ddp_fp16", "sequence_length": 16, "warmup_steps": 2, "steps": 3}
        base |= {"communication_steps": 1, "sweep_bytes": 2**20}
        axes, cases = {"model": ("mlstm64",), "batch_per_gpu": (4,)}, {}
    return Study(
        name="mlstm-scaling",
        question=(
            "How many characters per second does a multiplicative LSTM train on, with more and more GPUs and over each "
            "interconnect?"
        ),
        base=base | {"learning_rate": 0.01},
        axes={"world_size": world_sizes(capacity)} | axes,
        repeats=3,
        cases=cases,
        report=asked("mlstm-scaling") | {"predict_to": 128} | small_form(on_gpus),
    )


def _on_one_node(capacity: Capacity) -> int:
    """Return the largest power of two of GPUs on one node, at most 4 as in the published studies; on CPUs, 2 ranks."""
    largest = max((node.gpus for node in capacity), default=0)
    if not largest:
        return max(world_sizes(capacity))
    return max(world_sizes([NodeCapacity("largest", "", cpus=0, gpus=min(4, largest))]))
