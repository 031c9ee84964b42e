"""Studies of single factors that the published studies vary in their tables."""

from typing import Any

from study.capacity import Capacity, default_cpus_per_rank, gpus
from study.studies.questions import asked
from study.studies.study import GPU_WINDOW, Study, small_form, world_sizes
from study.studies.training import RECIPES, REFERENCE_BATCH, base_of_trainings, short_training

_SMALL = {"warmup_steps": 2, "steps": 4, "communication_steps": 1, "sweep_bytes": 2**20, "prefetch_batches": 1}


def _photographs(on_gpus: bool) -> dict[str, Any]:
    """Return the fields of ResNet-18 on photographs from files, on one rank."""
    base: dict[str, Any] = {"parallel": "none", "world_size": 1, "model": "resnet18", "learning_rate": 0.01}
    if not on_gpus:
        base |= {"device": "cpu", "dataset": "image_folder_sample", "image_size": 32, "batch_per_gpu": 8}
        return base | _SMALL
    base |= {"device": "cuda", "dataset": "image_folder", "image_size": 224, "batch_per_gpu": 256}
    return base | {"precision": "bf16", "augment": "cpu"} | GPU_WINDOW | {"warmup_steps": 20}


def storage_order(capacity: Capacity) -> Study:
    """Read photographs in each storage format, shuffled and in order, from a cold and a warm page cache."""
    on_gpus = gpus(capacity) > 0
    return Study(
        name="storage-order",
        question=(
            "How fast does each storage format feed training, shuffled and in order, from a cold and a warm page "
            "cache, and from shared memory?"
        ),
        base=_photographs(on_gpus) | ({"loader_workers": 8} if on_gpus else {}),
        axes={"storage": ("jpeg", "lmdb", "arrow_jpeg", "arrow_raw"), "order": ("shuffled", "in_order")},
        repeats=3,
        cases={
            "cold page cache": {"page_cache": "cold"},
            "warm page cache": {"page_cache": "warm"},
            "shared memory": {"storage_place": "shared_memory"},
        },
        report=asked("storage-order") | small_form(on_gpus),
    )


def number_formats(capacity: Capacity) -> Study:
    """Train in fp32 and in the levels O1 to O3 of mixed precision, with five seeds."""
    on_gpus = gpus(capacity) > 0
    mixed = ("fp32", "fp16", "fp16_master", "fp16_pure") if on_gpus else ("fp32", "bf16")
    return Study(
        name="number-formats",
        question="Which accuracy do fp32 (O0), mixed precision (O1) and fp16 (O2, O3) reach, and how fast are they?",
        base=short_training(on_gpus),
        axes={"precision": mixed},
        repeats=5 if on_gpus else 3,
        report=asked("number-formats") | small_form(on_gpus),
    )


def loader_grid(capacity: Capacity) -> Study:
    """Vary CPU threads and loader workers until more of them slow training down."""
    on_gpus = gpus(capacity) > 0
    if on_gpus:
        most = default_cpus_per_rank("cuda", capacity) * max(1, gpus(capacity))
        cores = tuple(2**power for power in range(most.bit_length()) if 2**power <= most)
        workers: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64)
    else:
        cores, workers = (1,), (0, 1, 2)
    return Study(
        name="loader-grid",
        question="How many CPU threads and loader workers does a GPU need, and from which number on are they too many?",
        base=_photographs(on_gpus),
        axes={"cpus_per_rank": cores, "loader_workers": workers},
        repeats=3,
        report=asked("loader-grid") | small_form(on_gpus),
    )


def averaging(capacity: Capacity) -> Study:
    """Compare ways to average gradients, and DataParallel, with the global batch held."""
    on_gpus = gpus(capacity) > 0
    base: dict[str, Any] = {"device": "cuda" if on_gpus else "cpu", "model": "resnet18", "learning_rate": 0.01}
    base |= {"dataset": "synthetic", "image_size": 224 if on_gpus else 32}
    base |= GPU_WINDOW if on_gpus else _SMALL
    cases: dict[str, dict[str, Any]] = {
        "DDP": {"parallel": "ddp"},
        "DDP, one all-reduce after the backward pass": {"parallel": "ddp_delayed"},
        "Horovod": {"parallel": "horovod"},
    }
    if on_gpus:
        cases["DDP, synchronised batch normalisation"] = {"parallel": "ddp", "sync_batch_norm": True}
        cases["DataParallel"] = {"parallel": "dp"}
    return Study(
        name="averaging",
        question=(
            "With a fixed global batch, what do DDP, an all-reduce after the backward pass, Horovod, synchronised "
            "batch normalisation and DataParallel cost on more and more GPUs?"
        ),
        base=base | {"global_batch": 256 if on_gpus else 8},
        axes={"world_size": tuple(size for size in world_sizes(capacity) if size <= _on_one_node(capacity))},
        repeats=3,
        cases=cases,
        report=asked("averaging") | small_form(on_gpus),
    )


def _on_one_node(capacity: Capacity) -> int:
    return max((node.gpus for node in capacity), default=0) or 2


def real_ranks(capacity: Capacity) -> Study:
    """Train large global batches divided over all GPUs, and accumulated on one.

    All accumulate batches of one size, the largest that eight GPUs have at the smallest large batch, so that batch
    normalisation sees the same number of samples everywhere.
    """
    on_gpus = gpus(capacity) > 0
    ranks = max(world_sizes(capacity))
    batches = (4096, 8192, 16384) if on_gpus else (512, 1024)
    recipes = {name: dict(RECIPES[name]) for name in ("nothing", "linear + gradual warm-up")}
    return Study(
        name="real-ranks",
        question=(
            "Does a large global batch divided over several GPUs reach the accuracy of the same batch accumulated on "
            "one?"
        ),
        base=base_of_trainings(on_gpus) | {"most_per_gpu": batches[0] // (8 if on_gpus else 2)},
        axes={"global_batch": (REFERENCE_BATCH, *batches), "world_size": tuple(dict.fromkeys((1, ranks)))},
        repeats=3,
        cases=recipes,
        report=asked("real-ranks") | small_form(on_gpus),
    )
