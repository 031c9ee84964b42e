"""One rank's part of training to an accuracy: epochs with a validation after each, kept so that it can be resumed."""

import time

import torch

from trainables.step.context import RankContext, RankOutput, RankSetup, rank_context
from trainables.step.process import drop_buckets
from trainables.step.timing import without_garbage_collection
from trainables.train.epochs import epochs_of
from trainables.train.trainer import Trainee
from trainables.trial import Trial


def train(trial: Trial, setup: RankSetup) -> RankOutput:
    """Train the trial on this rank; every rank of the trial calls it.

    It ends after `epochs` epochs, or after the first whose validation reaches `target_accuracy`. The state after an epoch
    is saved to `setup.checkpoints`, at most every `checkpoint_every_s`; a training that finds one continues exactly as it
    would have. Raises DataError, WorkloadError or CheckpointError.

    Rank 0 returns the rows of epochs.parquet and steps.parquet, of all ranks together; other ranks none. A row of `epochs`:
    epoch (from 1), step and samples (of all ranks, so far), train_s (so far, of the slowest rank; validation, compiling
    and capturing are left out), validation_s (this epoch's), train_* and validation_* of loss, top1 and top5 (shares 0 to
    1; None if unknown, and top5 below 6 classes), learning_rate (of the last step), noise_trace and noise_norm2 (None
    without `noise_scale`), non_finite_steps (of this epoch: their loss was not finite, or a loss scaler left them out).
    The train loss is the one that is minimised, label smoothing included, over the steps of the epoch as they were taken;
    the validation loss is plain. A row of `steps` is an optimizer step: window "train", rank 0, step from 0, epoch from 1,
    samples (of the step, all ranks), loss (their mean, None if not finite), learning_rate.
    """
    with rank_context(trial, setup) as context:
        distributed = context.distributed
        output = _trained(context, setup)
        del context  # what its loaders and model hold must not reach into the next trial
        if distributed:
            drop_buckets(setup.group, setup.device)
    return output


def _trained(context: RankContext, setup: RankSetup) -> RankOutput:
    trainee = Trainee(context)
    observations = [setup.observe()]
    began_at = time.time()
    content = context.from_first(setup.checkpoints.load() if setup.checkpoints and setup.rank == 0 else None)
    if content is not None:
        trainee.resume(content)
    _epochs(trainee, setup)
    observations.append(setup.observe())
    cuda = context.device.type == "cuda"
    peaks = [torch.cuda.max_memory_allocated(context.device)] if cuda else None
    first = setup.rank == 0
    return RankOutput(
        {"steps": trainee.step_rows() if first else [], "epochs": trainee.progress.rows if first else []},
        context.evidence(observations, peaks, trainee.flops),
        (began_at, time.time()),
    )


def _epochs(trainee: Trainee, setup: RankSetup) -> None:
    """Train all epochs that are left."""
    progress, context, checkpoints = trainee.progress, trainee.context, setup.checkpoints
    epochs = epochs_of(context, progress.epoch)
    saved_at = time.monotonic()
    while not trainee.finished():
        with without_garbage_collection():
            row = trainee.epoch(epochs)
        progress.rows.append(row)
        if setup.on_epoch is not None and setup.rank == 0:
            setup.on_epoch(row)
        elapsed_s = time.monotonic() - saved_at
        due = checkpoints is not None and elapsed_s >= setup.checkpoint_every_s and not trainee.finished()
        if context.from_first(due):
            content = trainee.packed()
            if checkpoints is not None and setup.rank == 0:
                checkpoints.save(content)
            saved_at = time.monotonic()
