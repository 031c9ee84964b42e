"""What of an unfinished training is kept between two epochs, as bytes that `torch.load` reads with `weights_only=True`.

Random numbers need not be kept: each epoch begins with seeds of its own (`trainables.train.epochs.seed_of`).
"""

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainables.step.precision import Updater
from trainables.step.timing import Row
from trainables.trial import Trial

VERSION = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be used, in one line: what, why, what to do."""


@dataclass
class Progress:
    """How far a training is. `steps` has (epoch, samples, loss, learning rate) of each optimizer step."""

    epoch: int = 0
    samples: int = 0
    train_s: float = 0.0
    loss_scale: float | None = None
    rows: list[Row] = field(default_factory=list)
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)


def rank_state(updater: Updater) -> dict[str, Any]:
    """What a rank's updates depend on beside the weights: the optimizer's state (ZeRO: the rank's share), masters, scaler."""
    return {
        "optimizer": updater.own.state_dict(),
        "masters": [master.detach() for master in updater.masters],
        "scaler": updater.scaler.state_dict() if updater.scaler else None,
    }


def pack(trial: Trial, progress: Progress, model: nn.Module, ranks: list[dict[str, Any]], noise: Any) -> bytes:
    """A checkpoint: `model` without its wrapper, and the state of rank 0, or of every rank where they differ."""
    sink = io.BytesIO()
    content = {
        "version": VERSION,
        "trial_id": trial.trial_id,
        "progress": vars(progress) | {"steps": torch.tensor(progress.steps, dtype=torch.float64)},
        "model": model.state_dict(),
        "ranks": ranks,
        "noise": noise,
    }
    torch.save(content, sink)
    return sink.getvalue()


def unpack(trial: Trial, content: bytes) -> dict[str, Any]:
    """What `pack` was given, on the CPU. Raises CheckpointError for damaged bytes, another version or another trial's."""
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        version, trial_id = found["version"], found["trial_id"]
    except Exception as error:  # damaged bytes raise nearly anything
        what = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"the checkpoint of trial {trial.trial_id} cannot be read ({what}): remove it, and the trial begins anew"
        ) from error
    if (version, trial_id) != (VERSION, trial.trial_id):
        raise CheckpointError(
            f"the checkpoint is of trial {trial_id} in version {version}, not of {trial.trial_id} in version {VERSION}: "
            "remove it, and the trial begins anew"
        )
    progress = found["progress"]
    progress["steps"] = [tuple(row) for row in progress["steps"].tolist()]
    return found | {"progress": Progress(**progress)}


def restore(found: dict[str, Any], model: nn.Module, updater: Updater, rank: int) -> None:
    """Puts weights, buffers and the rank's state back in place; the learning rate is set before each step anyway."""
    model.load_state_dict(found["model"])
    states = found["ranks"]
    state = states[rank if len(states) > 1 else 0]
    rates = [held["lr"] for held in updater.own.param_groups]
    updater.own.load_state_dict(state["optimizer"])
    for held, rate in zip(updater.own.param_groups, rates, strict=True):
        held["lr"] = rate  # what was read lies on the CPU, where a captured step would take it for a constant
    with torch.no_grad():
        for master, kept in zip(updater.masters, state["masters"], strict=True):
            master.copy_(kept)
    if updater.scaler:
        updater.scaler.load_state_dict(state["scaler"])
