"""Train a trial on one rank: epochs with validation after each, and checkpoints to resume from."""

import torch

from trainables.clock import monotonic, unix_s
from trainables.step.context import RankContext, RankOutput, RankSetup, rank_context
from trainables.step.process import drop_buckets
from trainables.step.timing import without_garbage_collection
from trainables.train.epochs import epochs_of
from trainables.train.trainer import Trainer
from trainables.trial import Trial


def train(trial: Trial, setup: RankSetup) -> RankOutput:
    """Train the trial on this rank. Collective over the trial's ranks.

    Ends after `epochs` epochs, or after the first one whose validation reaches `target_accuracy`. Saves the state after
    an epoch to `setup.checkpoints`, at most every `checkpoint_every_s`. A training that starts from a checkpoint
    continues exactly as without interruption. Raises DataError, WorkloadError or CheckpointError.

    Rank 0 returns the rows of epochs.parquet and steps.parquet for all ranks; other ranks return no rows. A row of
    `epochs` contains:
    - epoch: from 1. step, samples: of all ranks, so far.
    - train_s: so far, of the slowest rank, without validation, compilation and capture. validation_s: of this epoch.
    - train_loss: the minimised loss, with label smoothing, over the steps of the epoch. validation_loss: without.
    - train_top1, train_top5, validation_top1, validation_top5: 0 to 1. None if unknown; top5 requires >= 6 classes.
    - learning_rate: of the last step. noise_trace, noise_norm2: None without `noise_scale`.
    - non_finite_steps: steps of this epoch whose loss was not finite, or that a loss scaler skipped.

    A row of `steps` is an optimizer step: window "train", rank 0, step from 0, epoch from 1, samples (of the step, all
    ranks), loss (mean over them, None if not finite), learning_rate.
    """
    with rank_context(trial, setup) as context:
        distributed = context.distributed
        output = _train_all_epochs(context, setup)
        del context  # frees the loaders and the model before the next trial
        if distributed:
            drop_buckets(setup.group, setup.device)
    return output


def _train_all_epochs(context: RankContext, setup: RankSetup) -> RankOutput:
    trainer = Trainer(context)
    observations = [setup.observe()]
    started_at = unix_s()
    content = context.broadcast(setup.checkpoints.load() if setup.checkpoints and setup.rank == 0 else None)
    if content is not None:
        trainer.resume(content)
    _train_remaining_epochs(trainer, setup)
    observations.append(setup.observe())
    cuda = context.device.type == "cuda"
    peaks = [torch.cuda.max_memory_allocated(context.device)] if cuda else None
    ended_at = unix_s()
    trainer.count_flops()
    is_rank0 = setup.rank == 0
    return RankOutput(
        {"steps": trainer.step_rows() if is_rank0 else [], "epochs": trainer.progress.rows if is_rank0 else []},
        context.evidence(observations, peaks, trainer.flops),
        (started_at, ended_at),
    )


def _train_remaining_epochs(trainer: Trainer, setup: RankSetup) -> None:
    progress, context, checkpoints = trainer.progress, trainer.context, setup.checkpoints
    epochs = epochs_of(context, progress.epoch)
    saved_at = monotonic()
    while not trainer.finished():
        with without_garbage_collection():
            row = trainer.train_epoch(epochs)
        progress.rows.append(row)
        if setup.on_epoch is not None and setup.rank == 0:
            setup.on_epoch(row)
        elapsed_s = monotonic() - saved_at
        due = checkpoints is not None and elapsed_s >= setup.checkpoint_every_s and not trainer.finished()
        if context.broadcast(due):
            content = trainer.checkpoint()
            if checkpoints is not None and setup.rank == 0:
                checkpoints.save(content)
            saved_at = monotonic()
