"""What cannot go together in a trial that trains by epochs: one exact line for each."""

from typing import Any

import pytest
from pydantic import ValidationError

from trainables.trial import Trial, explain

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"target_accuracy": 0.9},
        ("target_accuracy 0.9 is about training by epochs, and epochs is 0, which times windows: "
        "give epochs, or leave target_accuracy out"),
    ),
    (
        {"lr_rule": "linear"},
        "lr_rule 'linear' is about training by epochs, and epochs is 0, which times windows: give epochs, or leave lr_rule out",
    ),
    (
        {"epochs": 1, "noise_scale": True},
        ("noise_scale compares gradients of two batch sizes, and one rank with accumulation_steps 1 has one: "
        "use accumulation_steps 2 or more, or more ranks"),
    ),
    (
        {"epochs": 1, "noise_scale": True, "world_size": 2, "parallel": "ddp_delayed"},
        ("noise_scale needs to see a rank's own gradients, which parallel 'ddp_delayed' shows nobody; "
        "allowed: ddp, ddp_fp16, ddp_bf16, zero1"),
    ),
    (
        {"epochs": 1, "resident_data": True, "loader_workers": 2},
        "loader_workers 2 has nothing to load with resident_data, which gathers batches on the device; allowed: 0",
    ),
    (
        {"epochs": 1, "resident_data": True, "dataset": "image_folder"},
        ("resident_data holds all images as one array; allowed data sets: fashion_mnist_sample, fashion_mnist, cifar10, "
        "not 'image_folder'"),
    ),
    (
        {"epochs": 1, "parallel": "fsdp2"},
        "parallel 'fsdp2' is for timed windows; with epochs allowed: none, ddp, ddp_fp16, ddp_bf16, zero1, ddp_delayed",
    ),
    (
        {"epochs": 2, "model": "mlstm64", "dataset": "text_sample"},
        "epochs 2 needs images with labels; model 'mlstm64' reads an endless text: use epochs 0, or an image model",
    ),
    (
        {"epochs": 2, "dataset": "synthetic"},
        "epochs 2 has nothing to learn from dataset 'synthetic', which is random: use one of images",
    ),
    (
        {"epochs": 1, "profile_ranks": "0"},
        "profile_ranks '0' is for timed windows: leave it out with epochs",
    ),
    (
        {"epochs": 1, "workload": "mine.py:build", "execution": "graph"},
        ("execution 'graph' with epochs warms up and takes its steps back, which a workload's own optimizer may not allow: "
        "use 'eager' or 'compile'"),
    ),
    (
        {"epochs": 1, "optimizer": "adamw", "momentum_correction": False},
        ("momentum_correction False needs momentum; optimizer 'adamw' with momentum 0.9 has none that follows the learning "
        "rate: use 'sgd', 'nesterov' or 'lars' with momentum above 0"),
    ),
    (
        {"zero_gamma": True, "model": "mlp"},
        ("zero_gamma is about residual blocks, and model 'mlp' has none that are known here; "
        "allowed models: resnet18, resnet18_small, resnet50, resnet50_small"),
    ),
    (
        {"label_smoothing": 0.1, "workload": "mine.py:build"},
        "label_smoothing 0.1 is of the loss of image models; workload 'mine.py:build' has its own: use 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "line"), REFUSED, ids=["+".join(fields) for fields, _ in REFUSED])
def test_what_does_not_go_together_is_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as error:
        Trial(**fields)
    assert explain(error.value) == [line]


def test_a_captured_step_may_accumulate_where_it_trains_by_epochs() -> None:
    assert Trial(execution="graph", accumulation_steps=2, epochs=1).captured
    with pytest.raises(ValidationError, match="captures one batch"):
        Trial(execution="graph", accumulation_steps=2)
