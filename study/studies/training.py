"""Studies that train to an accuracy: what a large batch does to it, and what mends it."""

from collections.abc import Mapping
from typing import Any

from study.capacity import Capacity
from study.studies.study import Fields, Study, gpus, world_sizes

REFERENCE_BATCH = 128

_SCALED = {"lr_rule": "linear"}
_WARMED = {**_SCALED, "warmup": "gradual", "warmup_epochs": 3.0}
REMEDIES: Mapping[str, Fields] = {
    "nothing": {},
    "linear": _SCALED,
    "linear + gradual warm-up": _WARMED,
    "+ LARS": {**_WARMED, "lr_rule": "sqrt", "optimizer": "lars", "learning_rate": 1.0},
    "+ no decay of norms and biases": {**_WARMED, "decay_norm_and_bias": False},
}
"""What is tried against the loss of accuracy, after Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) and You et al. 2017
(https://arxiv.org/abs/1708.03888). LARS has a learning rate of its own kind: at 1 an update moves a layer by 0.001 of its
norm. Grown in proportion to the batch it would soon move layers by all of it, hence the square root."""


def large_batch(capacity: Capacity) -> Study:
    """Accuracy over the global batch, from the reference to the end of memory and reason, for each remedy."""
    on_gpus = gpus(capacity) > 0
    remedies = {name: dict(fields) for name, fields in REMEDIES.items()}
    if on_gpus:
        name, fields = remedies.popitem()
        remedies[f"{name}, zero gamma"] = fields | {"zero_gamma": True}
        batches: tuple[int, ...] = (128, 512, 2048, 8192, 16384, 32768)
    else:
        batches = (128, 512, 2048, 8192)
    # one rank needs two batches of unlike size a step; its batch normalisation then sees half as much, so it is a case apart
    noise = {"global_batch": REFERENCE_BATCH, "accumulation_steps": 2, "noise_scale": True}
    return Study(
        name="large-batch",
        question=(
            "Up to which global batch does training reach the accuracy of the reference batch, how far does each remedy "
            "move that limit, and which batch trains soonest?"
        ),
        base=_training(on_gpus) | {"world_size": 1},
        axes={"global_batch": batches},
        repeats=5 if on_gpus else 3,
        cases=remedies | {"gradient noise scale at the reference batch": noise},
        simplify=without_idle_rules,
        skip=(noise_scale_off_the_reference,),
    )


def fifth_epoch(capacity: Capacity) -> Study:
    """A course's question: loss and accuracy after the fifth epoch, at batch 128 and at the largest batch on all GPUs."""
    on_gpus = gpus(capacity) > 0
    ranks = max(gpus(capacity), 1) if on_gpus else min(2, sum(node.cpus for node in capacity))
    largest = {"world_size": ranks, "batch_per_gpu": 8192 if on_gpus else 1024}
    recipe = {"optimizer": "sgd", "decay": "constant", "label_smoothing": 0.0}
    return Study(
        name="fifth-epoch",
        question=(
            "What are the mean training loss and the training accuracy of the fifth epoch with the largest batch per GPU "
            "on all GPUs, against batch 128 on one, and what do two remedies change?"
        ),
        base=_training(on_gpus) | recipe | {"epochs": 5},
        axes={},
        repeats=3,
        cases={
            "batch 128": {"world_size": 1, "batch_per_gpu": REFERENCE_BATCH},
            "largest batch": largest,
            "largest batch, linear + gradual warm-up": largest | _WARMED,
            "largest batch, LARS": largest | dict(REMEDIES["+ LARS"]),
        },
        report={"report_epoch": 5},
    )


def accuracy(capacity: Capacity) -> Study:
    """One recipe on more and more GPUs, with the global batch held."""
    on_gpus = gpus(capacity) > 0
    return Study(
        name="accuracy",
        question="Which accuracy does this recipe reach, after how long, and how much sooner on more GPUs?",
        base=_training(on_gpus) | {"global_batch": REFERENCE_BATCH},
        axes={"world_size": world_sizes(capacity)},
        repeats=3,
    )


def noise_scale_off_the_reference(fields: Fields) -> str | None:
    """The batches that are asked for are crossed with every case, and this one answers for the reference batch alone."""
    if fields.get("noise_scale") and _global_batch(fields) != fields.get("reference_batch"):
        return "the gradient noise scale is estimated at the reference batch"
    return None


def _global_batch(fields: Fields) -> int | None:
    """Samples of a step of all ranks, however the batch was asked for; None where it was not."""
    if "batch_per_gpu" in fields:
        return int(fields["batch_per_gpu"] * fields.get("world_size", 1) * fields.get("accumulation_steps", 1))
    return fields.get("global_batch")


def without_idle_rules(fields: Fields) -> Fields:
    """At the reference batch a rule scales by 1, so a combination that differs by its rule alone is the plain one.

    Those of other remedies keep their rule, so that each has a reference of its own kind.
    """
    is_plain = fields.get("optimizer") != "lars" and fields.get("decay_norm_and_bias", True)
    if _global_batch(fields) != fields.get("reference_batch") or not is_plain:
        return fields
    return {name: value for name, value in fields.items() if name not in _WARMED}


def short_training(on_gpus: bool) -> dict[str, Any]:
    """Five epochs at the reference batch on one rank: enough to see whether it learns, and how well so far."""
    return _training(on_gpus) | {
        "world_size": 1, "batch_per_gpu": REFERENCE_BATCH, "parallel": "none", "execution": "eager", "epochs": 5,
    }  # fmt: skip


def _training(on_gpus: bool) -> dict[str, Any]:
    """ResNet-18 on GPUs, on CPU ranks a form of it that ends in minutes: a perceptron for a few epochs."""
    both: dict[str, Any] = {
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
        return both | {
            "device": "cpu",
            "model": "mlp",
            "learning_rate": 0.01,  # the linear rule multiplies it by up to 64
            "epochs": 8,
            "most_per_gpu": 4096,
        }
    return both | {
        "device": "cuda",
        "model": "resnet18_small",
        "precision": "bf16",
        "memory_format": "channels_last",
        "execution": "graph",
        "augment": "device",
        "epochs": 18,
        "most_per_gpu": 16384,
    }
