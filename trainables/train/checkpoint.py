"""Checkpoints of a training between two epochs, as bytes for `torch.load` with `weights_only=True`.

They contain no random state, because each epoch sets its own seeds (`trainables.data.sampler.seed_of`).
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
    """A checkpoint cannot be used. The message is one line: the problem, the cause and the fix."""


@dataclass
class Progress:
    """The progress of a training. `steps` contains (epoch, samples, loss, learning rate) per optimizer step."""

    epoch: int = 0
    samples: int = 0
    train_s: float = 0.0
    loss_scale: float | None = None
    rows: list[Row] = field(default_factory=list)
    steps: list[tuple[float, float, float, float]] = field(default_factory=list)


def rank_state(updater: Updater) -> dict[str, Any]:
    """Return a rank's state apart from the weights.

    It is that of the optimizer (with ZeRO, the rank's share), master weights, scaler and a user's scheduler.
    """
    return {
        "optimizer": updater.local_optimizer.state_dict(),
        "masters": [master.detach() for master in updater.masters],
        "scaler": updater.scaler.state_dict() if updater.scaler else None,
        "scheduler": updater.scheduler.state_dict() if updater.scheduler else None,
    }


def pack(trial: Trial, progress: Progress, model: nn.Module, ranks: list[dict[str, Any]], noise: Any) -> bytes:
    """Serialise a checkpoint.

    `model` is the unwrapped model. `ranks` are the states of all ranks, or only of rank 0 if they are the same.
    """
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
    """Return the arguments of `pack`, on the CPU.

    Raises CheckpointError for damaged bytes, and for a checkpoint of another version or another trial.
    """
    try:
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        version, trial_id = checkpoint["version"], checkpoint["trial_id"]
    except Exception as error:  # damaged bytes can raise almost anything
        cause = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise CheckpointError(
            f"cannot read the checkpoint of trial {trial.trial_id} ({cause}); remove it to restart the trial"
        ) from error
    if (version, trial_id) != (VERSION, trial.trial_id):
        raise CheckpointError(
            f"the checkpoint belongs to trial {trial_id}, version {version}, but trial {trial.trial_id}, version "
            f"{VERSION}, is required; remove it to restart the trial"
        )
    progress = checkpoint["progress"]
    progress["steps"] = [tuple(row) for row in progress["steps"].tolist()]
    return checkpoint | {"progress": Progress(**progress)}


def restore(checkpoint: dict[str, Any], model: nn.Module, updater: Updater, rank: int) -> None:
    """Restore weights, buffers and the rank's state in place.

    The learning rate is kept unless a user's scheduler sets it; otherwise every step sets it anyway.
    """
    model.load_state_dict(checkpoint["model"])
    states = checkpoint["ranks"]
    state = states[rank if len(states) > 1 else 0]
    optimizer = updater.local_optimizer
    rates = [param_group["lr"] for param_group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for param_group, rate in zip(optimizer.param_groups, rates, strict=True):
        param_group["lr"] = rate  # the loaded rate is on the CPU, where a captured step would treat it as a constant
    with torch.no_grad():
        for master, saved in zip(updater.masters, state["masters"], strict=True):
            master.copy_(saved)
    if updater.scaler:
        updater.scaler.load_state_dict(state["scaler"])
    if updater.scheduler:
        updater.scheduler.load_state_dict(state["scheduler"])
        for param_group, rate in zip(updater.optimizer.param_groups, updater.scheduler.get_last_lr(), strict=True):
            param_group["lr"] = rate
