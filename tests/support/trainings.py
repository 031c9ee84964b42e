"""Synthetic results folders of trainings: accuracy follows a stated law of batch and recipe, with noise per seed."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.support.frames import FIELDS, record, write_study, write_trial

TRAINING: dict[str, Any] = FIELDS | {
    "device": "cuda", "model": "resnet18_small", "precision": "bf16", "batch_per_gpu": 128, "accumulation_steps": 1,
    "optimizer": "nesterov", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "epochs": 6,
    "target_accuracy": None,
    "reference_batch": 128, "lr_rule": "none", "warmup": "none", "warmup_epochs": 3.0, "decay": "cosine",
    "decay_norm_and_bias": True, "label_smoothing": 0.0, "noise_scale": False,
}  # fmt: skip

SAMPLES = 60_000
NOTHING: dict[str, Any] = {}
LINEAR: dict[str, Any] = {"lr_rule": "linear"}
WARMED: dict[str, Any] = {"lr_rule": "linear", "warmup": "gradual"}
LARS: dict[str, Any] = {"lr_rule": "sqrt", "warmup": "gradual", "optimizer": "lars", "learning_rate": 1.0}
NOISE: dict[str, Any] = {"batch_per_gpu": 64, "accumulation_steps": 2, "noise_scale": True}


def global_batch(fields: dict[str, Any]) -> int:
    return int(fields["world_size"] * fields["batch_per_gpu"] * fields["accumulation_steps"])


def epochs(fields: dict[str, Any], final_top1: float, step_s: float = 0.01, **columns: Any) -> pd.DataFrame:
    """Return epochs.parquet of a training whose accuracy rises to its final value, with matching losses and times.

    Validation accuracy of epoch e of E is `final_top1` - 0.3 (1 - e / E), at least 0. `columns` replace complete
    columns.
    """
    count = fields["epochs"]
    number = np.arange(1, count + 1)
    steps = -(-SAMPLES // global_batch(fields))
    top1 = np.maximum(0.0, final_top1 - 0.3 * (1 - number / count))
    frame = pd.DataFrame(
        {
            "epoch": number.astype(np.int32),
            "step": number * steps,
            "samples": number * SAMPLES,
            "train_s": number * steps * step_s,
            "validation_s": 0.5,
            "train_loss": 2.0 * (1 - top1),
            "train_top1": np.minimum(1.0, top1 + 0.02),
            "train_top5": None,
            "validation_loss": 2.1 * (1 - top1),
            "validation_top1": top1,
            "validation_top5": np.minimum(1.0, top1 + 0.07),
            "learning_rate": fields["learning_rate"] * (1 - (number - 0.5) / count),
            "noise_trace": None,
            "noise_norm2": None,
            "non_finite_steps": 0,
        }
    )
    return frame.assign(**columns).astype({"train_top5": float, "noise_trace": float, "noise_norm2": float})


def write_training(
    directory: Path, fields: dict[str, Any], frame: pd.DataFrame, concurrent: int | None = None, **more: Any
) -> str:
    """Write a completed training, and return its id. The id contains a hash of its fields, as in real trials."""
    trial = record(fields, **more)
    name = f"training-{hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]}"
    trial |= {"trial_id": name}
    if concurrent:
        for rank in trial["environment"]["ranks"]:
            rank["concurrent"] = concurrent
    last = frame.iloc[-1]
    steps = pd.DataFrame(
        {
            "rank": np.int32(0), "window": "train", "step": np.arange(3, dtype=np.int32),
            "samples": np.int32(global_batch(fields)), "window_s": np.nan, "loss": float(last["train_loss"]),
        }
    )  # fmt: skip
    folder = write_trial(directory, trial, steps)
    frame.to_parquet(folder / "epochs.parquet")
    return name


def accuracy_loss(fields: dict[str, Any], largest_lossless_batch: int) -> float:
    """Return the loss of accuracy: 3 points per doubling of the batch above the largest lossless batch."""
    return 0.03 * max(0.0, float(np.log2(global_batch(fields) / largest_lossless_batch)))


def large_batch(directory: Path, seeds: int = 5, spread: float = 0.001, phi: float = 1500.0) -> Path:
    """Write a study of large batches with 92 % accuracy at batch 128 (LARS: 91 %).

    The largest lossless batch is 512 without a recipe, 2048 with linear scaling, 8192 with linear scaling and warm-up,
    and unlimited with LARS. A step takes 5 ms plus 2 µs per sample. Gradients have a noise scale tr(Sigma) / |G|^2 of
    `phi`, which varies by 20 % between trainings.
    """
    write_study(directory, "large-batch", "Up to which batch does training reach the accuracy of the reference batch?",
                configuration={"repeats": seeds, "price-per-gpu-hour": 3.0})  # fmt: skip
    rng = np.random.default_rng(1)
    recipes: list[tuple[dict[str, Any], int, Callable[[int], bool]]] = [
        (NOTHING, 512, lambda batch: True),
        (LINEAR, 2048, lambda batch: batch > 128),
        (WARMED, 8192, lambda batch: batch > 128),
        (LARS, 10**9, lambda batch: True),
    ]
    for seed in range(seeds):
        for recipe, largest_lossless_batch, runs_at in recipes:
            for batch in (128, 512, 2048, 8192, 32768):
                if not runs_at(batch):
                    continue
                parts = 2 if batch == 32768 else 1
                fields = TRAINING | recipe | {
                    "batch_per_gpu": batch // parts, "accumulation_steps": parts, "seed": seed, "repeat": seed,
                }  # fmt: skip
                top1 = (0.91 if recipe is LARS else 0.92) - accuracy_loss(fields, largest_lossless_batch)
                top1 += spread * rng.standard_normal()
                frame = epochs(fields, top1, 0.005 + 2e-6 * batch)
                write_training(directory, fields, frame, concurrent=4)
        fields = TRAINING | NOISE | {"seed": seed, "repeat": seed}
        norm2 = 0.02 * np.exp(0.2 * rng.standard_normal())
        frame = epochs(fields, 0.92 + spread * rng.standard_normal(), 0.0053, noise_trace=0.02 * phi, noise_norm2=norm2)
        write_training(directory, fields, frame, concurrent=4)
    return directory


if __name__ == "__main__":
    import sys

    large_batch(Path(sys.argv[1]))
