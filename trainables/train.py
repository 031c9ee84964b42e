"""One rank's part of training to an accuracy: epochs with a validation after each, kept so that it can be resumed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainables.epochs import epochs_of
from trainables.execution import stream_for
from trainables.noise_cost import noise_cost
from trainables.parallel import Strategy
from trainables.precision import Precision
from trainables.process import drop_buckets, settings_for
from trainables.registry import PARALLEL, PRECISIONS, load
from trainables.timing import Row, without_garbage_collection
from trainables.trainee import Trainee
from trainables.trial import Trial
from trainables.workload import build_workload, on_device

CHECKPOINT_EVERY_S = 30.0
"""at most one checkpoint in so many seconds: a large model's takes seconds to write"""


class Checkpoints(Protocol):
    """Where an unfinished trial is kept. Only rank 0 calls it."""

    def load(self) -> bytes | None:
        """What was saved last; None: nothing, the trial begins."""

    def save(self, content: bytes) -> None:
        """Replaces what was saved before."""


@dataclass(frozen=True)
class Trained:
    """What training gave: on rank 0 the rows of epochs.parquet and steps.parquet, of all ranks together; on others none.

    A row of `epochs`: epoch (from 1), step and samples (of all ranks, so far), train_s (so far, of the slowest rank;
    validation, compiling and capturing are left out), validation_s (this epoch's), train_* and validation_* of loss,
    top1 and top5 (shares 0 to 1; None where they cannot be told, and top5 below 6 classes), learning_rate (of the last
    step), noise_trace and noise_norm2 (None without `noise_scale`), non_finite_steps (of this epoch: their loss was not
    finite, or a loss scaler left them out). The train loss is the one that is minimised, label smoothing included, over
    the steps of the epoch as they were taken; the validation loss is plain.

    A row of `steps` is an optimizer step: window "train", rank 0, step from 0, epoch from 1, samples (of the step, all
    ranks), loss (their mean, None where not finite), learning_rate.
    """

    epochs: list[Row]
    steps: list[Row]
    began_at: float
    ended_at: float
    observations: list[Any] = field(default_factory=list)
    """what `observe` gave before the first epoch and after the last"""
    peak_memory_by_device_bytes: list[int] | None = None
    """of the rank's GPU; None on CPUs"""
    step_flops: float | None = None
    """of a rank's whole step, see `trainables.flops`; counted on CUDA only"""
    dataset_samples: int = 0
    """samples of the data set that is trained on"""
    noise_ratio: float | None = None
    """seconds of a step with the noise scale / without, see `trainables.noise_cost`; None without it"""


def train(
    trial: Trial,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    control: dist.ProcessGroup | None = None,
    source: str | None = None,
    checkpoints: Checkpoints | None = None,
    on_epoch: Callable[[Row], None] | None = None,
    observe: Callable[[], Any] = lambda: None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> Trained:
    """Trains the trial on this rank; every taking-part rank of the trial calls it.

    It ends after `epochs` epochs, or after the first whose validation reaches `target_accuracy`. Arguments are those of
    `trainables.run.run`; `checkpoints` hands over the state after an epoch, at most every `checkpoint_every_s`, and
    gives it back to a training that is taken up again, which then goes on exactly as it would have; `on_epoch` gets each
    new row of `epochs` on rank 0. Raises DataError, WorkloadError or CheckpointError.
    """
    precision: Precision = load(PRECISIONS[trial.precision])
    strategy: Strategy = load(PARALLEL[trial.parallel])
    with settings_for(trial, precision), stream_for(trial, device):
        workload = on_device(build_workload(trial, device, source), trial, precision, device)
        here = Trainee(trial, rank, device, group, control or group, precision, strategy, workload)
        try:
            observations = [observe()]
            began_at = time.time()
            content = here.from_first(checkpoints.load() if checkpoints and rank == 0 else None)
            if content is not None:
                here.resume(content)
            _epochs(here, checkpoints, on_epoch, checkpoint_every_s)
            observations.append(observe())
            peaks = [torch.cuda.max_memory_allocated(device)] if device.type == "cuda" else None
            trained = Trained(
                here.progress.rows if rank == 0 else [],
                here.step_rows() if rank == 0 else [],
                began_at,
                time.time(),
                observations,
                peaks,
                here.flops,
                here.length,
            )
            if here.sample is not None:
                trained = replace(trained, noise_ratio=noise_cost(here, here.sample))
        finally:
            # loader processes end when their iterator does; what they hold must not reach into the next trial
            del workload, here
        if trial.parallel != "none":
            drop_buckets(group, device)
    return trained


def _epochs(
    here: "Trainee", checkpoints: Checkpoints | None, on_epoch: Callable[[Row], None] | None, checkpoint_every_s: float
) -> None:
    """All epochs that are left."""
    progress = here.progress
    epochs = epochs_of(here.trial, here.workload, here.rank, here.device, progress.epoch)
    kept_at = time.monotonic()
    while not here.finished():
        with without_garbage_collection():
            row = here.epoch(epochs)
        progress.rows.append(row)
        if on_epoch is not None and here.rank == 0:
            on_epoch(row)
        due = checkpoints is not None and time.monotonic() - kept_at >= checkpoint_every_s and not here.finished()
        if here.from_first(due):
            content = here.packed()
            if checkpoints is not None and here.rank == 0:
                checkpoints.save(content)
            kept_at = time.monotonic()
