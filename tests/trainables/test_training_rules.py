"""Invalid combinations of fields in trials that train by epochs."""

from typing import Any

import pytest

from tests.trainables.test_trial import broken
from trainables.trial import Trial

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"target_accuracy": 0.9}, ("target_accuracy", "epochs")),
    ({"lr_rule": "linear"}, ("lr_rule", "epochs")),
    ({"shared_shuffle": False}, ("shared_shuffle", "epochs")),
    ({"resident_data": True}, ("resident_data", "epochs")),
    ({"epochs": 1, "noise_scale": True}, ("noise_scale", "accumulation_steps", "world_size")),
    ({"epochs": 1, "noise_scale": True, "world_size": 2, "parallel": "ddp_delayed"}, ("noise_scale", "parallel")),
    ({"epochs": 1, "resident_data": True, "loader_workers": 2}, ("loader_workers", "resident_data")),
    ({"epochs": 1, "resident_data": True, "dataset": "image_folder"}, ("resident_data", "dataset")),
    ({"epochs": 1, "parallel": "fsdp2"}, ("parallel", "epochs")),
    ({"epochs": 2, "model": "mlstm64", "dataset": "text_sample"}, ("epochs", "model")),
    ({"epochs": 2, "dataset": "synthetic"}, ("epochs", "dataset")),
    ({"epochs": 1, "profile_ranks": "0"}, ("profile_ranks", "epochs")),
    ({"epochs": 1, "workload": "mine.py:build", "execution": "graph"}, ("execution", "workload", "epochs")),
    (
        {"epochs": 1, "optimizer": "adamw", "momentum_correction": False},
        ("momentum_correction", "optimizer", "momentum"),
    ),
    ({"zero_gamma": True, "model": "mlp"}, ("zero_gamma", "model")),
    ({"label_smoothing": 0.1, "workload": "mine.py:build"}, ("label_smoothing", "model")),
]


@pytest.mark.parametrize(("fields", "rule"), REFUSED, ids=["+".join(fields) for fields, _ in REFUSED])
def test_conflicting_fields_are_rejected(fields: dict[str, Any], rule: tuple[str, ...]) -> None:
    assert broken(fields) == rule


def test_a_captured_step_may_accumulate_only_in_training() -> None:
    assert Trial(execution="graph", accumulation_steps=2, epochs=1).captured
    assert broken({"execution": "graph", "accumulation_steps": 2}) == ("execution", "accumulation_steps")
