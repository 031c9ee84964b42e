"""Studies that train to an accuracy: how a large batch reduces it, and which recipes recover it."""

from collections.abc import Mapping
from typing import Any

from study.capacity import Capacity, cpus, gpus
from study.studies.questions import asked
from study.studies.study import Fields, Study, small_form, world_sizes

REFERENCE_BATCH = 128

_LINEAR = {"lr_rule": "linear"}
_GRADUAL = {**_LINEAR, "warmup": "gradual", "warmup_epochs": 3.0}
RECIPES: Mapping[str, Fields] = {
    "nothing": {},
    "linear": _LINEAR,
    "linear + gradual warm-up": _GRADUAL,
    "+ LARS": {**_GRADUAL, "lr_rule": "sqrt", "optimizer": "lars", "learning_rate": 1.0},
    "+ no decay of norms and biases": {**_GRADUAL, "decay_norm_and_bias": False},
}
"""Large-batch recipes of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) and You et al. 2017
(https://arxiv.org/abs/1708.03888).

The learning rate of LARS has another scale: at 1, an update changes a layer by 0.001 of its norm. Scaled linearly with
the batch, an update would soon change layers by their full norm, hence the square root.
"""


def large_batch(capacity: Capacity) -> Study:
    """Measure accuracy per recipe and global batch, from the reference batch to the largest useful one."""
    on_gpus = gpus(capacity) > 0
    recipes = {name: dict(fields) for name, fields in RECIPES.items()}
    if on_gpus:
        name, fields = recipes.popitem()
        recipes[f"{name}, zero gamma"] = fields | {"zero_gamma": True}
        batches: tuple[int, ...] = (128, 512, 2048, 8192, 16384, 32768)
    else:
        batches = (128, 512, 2048, 8192)
    # With one rank, the noise scale needs two accumulated batches per step. Batch normalization then sees half a batch,
    # so this is a separate case.
    noise = {"global_batch": REFERENCE_BATCH, "accumulation_steps": 2, "noise_scale": True}
    return Study(
        name="large-batch",
        question=(
            "Up to which global batch does training reach the accuracy of the reference batch, how far does each "
            "recipe raise that limit, and which batch reaches the accuracy first?"
        ),
        base=base_of_trainings(on_gpus) | {"world_size": 1},
        axes={"global_batch": batches},
        repeats=5 if on_gpus else 3,
        cases=recipes | {"gradient noise scale at the reference batch": noise},
        simplify=without_idle_rules,
        skip=(noise_scale_off_the_reference,),
        report=small_form(on_gpus),
    )


def fifth_epoch(capacity: Capacity) -> Study:
    """Compare loss and accuracy of epoch 5 at batch 128 and at the largest batch on all GPUs, as in a course lab."""
    on_gpus = gpus(capacity) > 0
    ranks = max(gpus(capacity), 1) if on_gpus else min(2, cpus(capacity))
    largest = {"world_size": ranks, "batch_per_gpu": 8192 if on_gpus else 1024}
    recipe = {"optimizer": "sgd", "decay": "constant", "label_smoothing": 0.0}
    return Study(
        name="fifth-epoch",
        question=(
            "What are the mean training loss and training accuracy of the fifth epoch with the largest batch per GPU "
            "on all GPUs, compared with batch 128 on one GPU, and how do two recipes change them?"
        ),
        base=base_of_trainings(on_gpus) | recipe | {"epochs": 5},
        axes={},
        repeats=3,
        cases={
            "batch 128": {"world_size": 1, "batch_per_gpu": REFERENCE_BATCH},
            "largest batch": largest,
            "largest batch, linear + gradual warm-up": largest | _GRADUAL,
            "largest batch, LARS": largest | dict(RECIPES["+ LARS"]),
        },
        report=asked("fifth-epoch") | {"report_epoch": 5} | small_form(on_gpus),
    )


def accuracy(capacity: Capacity) -> Study:
    """Train one recipe on more and more GPUs with a fixed global batch."""
    on_gpus = gpus(capacity) > 0
    return Study(
        name="accuracy",
        question="Which accuracy does this recipe reach, how long does it take, and how much faster are more GPUs?",
        base=base_of_trainings(on_gpus) | {"global_batch": REFERENCE_BATCH},
        axes={"world_size": world_sizes(capacity)},
        repeats=3,
        report=small_form(on_gpus),
    )


def noise_scale_off_the_reference(fields: Fields) -> str | None:
    """Skip the noise-scale case at other batches than the reference. All batches are crossed with every case."""
    if fields.get("noise_scale") and _global_batch(fields) != fields.get("reference_batch"):
        return "the gradient noise scale is estimated at the reference batch"
    return None


def _global_batch(fields: Fields) -> int | None:
    """Return the samples per step of all ranks, None if the fields set no batch."""
    if "batch_per_gpu" in fields:
        return int(fields["batch_per_gpu"] * fields.get("world_size", 1) * fields.get("accumulation_steps", 1))
    return fields.get("global_batch")


def without_idle_rules(fields: Fields) -> Fields:
    """Drop rules for learning rate and warm-up at the reference batch, where they scale by 1 and change nothing.

    Other recipes keep theirs, so that each has a reference at the same settings.
    """
    is_plain = fields.get("optimizer") != "lars" and fields.get("decay_norm_and_bias", True)
    if _global_batch(fields) != fields.get("reference_batch") or not is_plain:
        return fields
    return {name: value for name, value in fields.items() if name not in _GRADUAL}


def short_training(on_gpus: bool) -> dict[str, Any]:
    """Return a training trial of five epochs at the reference batch on one rank, enough to see if it learns."""
    return base_of_trainings(on_gpus) | {
        "world_size": 1, "batch_per_gpu": REFERENCE_BATCH, "parallel": "none", "execution": "eager", "epochs": 5,
    }  # fmt: skip


def base_of_trainings(on_gpus: bool) -> dict[str, Any]:
    """Return the base of all training trials: ResNet-18 on GPUs; on CPUs a perceptron, which takes minutes."""
    common: dict[str, Any] = {
        "dataset": "fashion_mnist_sample",
        "reference_batch": REFERENCE_BATCH,
        "resident_data": True,
        "decay": "cosine",
        "optimizer": "nesterov",
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "learning_rate": 0.05,
        "label_smoothing": 0.1,
    }
    if not on_gpus:
        return common | {
            "device": "cpu",
            "model": "mlp",
            "learning_rate": 0.01,  # the linear rule multiplies this by up to 64
            "epochs": 8,
            "most_per_gpu": 4096,
        }
    return common | {
        "device": "cuda",
        "model": "resnet18_small",
        "precision": "bf16",
        "memory_format": "channels_last",
        "execution": "graph",
        "augment": "device",
        "epochs": 18,
        "most_per_gpu": 16384,
    }
