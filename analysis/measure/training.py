"""Reduce training trials to one row per run: final accuracy, time and epochs to the target."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

_ABSENT: Mapping[str, Any] = {
    "lr_rule": "none", "warmup": "none", "warmup_epochs": 0.0, "reference_batch": float("nan"), "precision": "",
    "optimizer": "", "learning_rate": float("nan"), "accumulation_steps": 1, "seed": 0, "repeat": 0,
}  # fmt: skip
"""Values of fields that a record lacks, because another program wrote it or it was changed."""


def training_runs(trials: pd.DataFrame, epochs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per done training with at least one epoch: its fields and the results of its last epoch.

    Fields that the comparison of trainings needs and records lack are added. Columns besides the fields: global_batch;
    train_* and validation_* of the last epoch; epochs_trained, steps_trained, samples_trained, train_s;
    throughput_samples_per_s (samples / train_s, without validation); concurrent (maximum of concurrent trainings on a
    host, including itself; NaN if not recorded).
    """
    rows = trials[trials["status"] == "done"] if "epochs" in trials else trials.iloc[:0]
    rows = rows[rows["trial_id"].isin(epochs["trial_id"])]
    if len(rows):
        rows = rows[rows["epochs"].fillna(0) > 0].reset_index(drop=True)
    if rows.empty:
        return rows
    rows = rows.assign(**{name: _filled(rows, name, value) for name, value in _ABSENT.items()})
    rows["accumulation_steps"] = rows["accumulation_steps"].astype(int)
    ordered = epochs.sort_values(["trial_id", "epoch"], kind="stable")
    last = ordered.drop_duplicates("trial_id", keep="last").set_index("trial_id").drop(columns=["learning_rate"])
    last = last.rename(columns={"epoch": "epochs_trained", "step": "steps_trained", "samples": "samples_trained"})
    last = last.drop(columns=["validation_s", "noise_trace", "noise_norm2", "non_finite_steps"])
    rows = rows.join(last, on="trial_id")
    rows["global_batch"] = rows["world_size"] * rows["batch_per_gpu"] * rows["accumulation_steps"]
    rows["throughput_samples_per_s"] = rows["samples_trained"] / rows["train_s"]
    rows["concurrent"] = [_noted(environment, "concurrent") for environment in rows["environment"]]
    return rows


def _filled(rows: pd.DataFrame, name: str, value: Any) -> Any:
    """Return the column with `value` where a record lacks the field."""
    return rows[name].where(rows[name].notna(), value) if name in rows else value


def _noted(environment: Any, name: str) -> float:
    """Return the maximum value recorded by a rank; NaN if none did."""
    noted = [rank.get(name) for rank in (environment or {}).get("ranks") or ()]
    return float(max((value for value in noted if value), default=np.nan))


def reached_target(epochs: pd.DataFrame, runs: pd.DataFrame, target: float | None) -> pd.DataFrame:
    """Return steps, samples and seconds to each run's first epoch at its target accuracy.

    The target is the run's own, or else the common one. Runs that did not reach it have no row.
    """
    goals = pd.Series(np.nan if target is None else target, index=runs["trial_id"], dtype=float)
    if "target_accuracy" in runs:
        goals = runs.set_index("trial_id")["target_accuracy"].astype(float).fillna(goals)
    there = epochs[epochs["validation_top1"] >= epochs["trial_id"].map(goals)].sort_values("epoch")
    first = there.drop_duplicates("trial_id").set_index("trial_id")[["step", "samples", "train_s"]]
    return first.set_axis(["steps_to_target", "samples_to_target", "time_to_target_s"], axis=1).astype(float)
