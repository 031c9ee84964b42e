"""Build a trial's workload (model, data, loss and optimizer) from the registry or from a user's file."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainables.batch import identity
from trainables.data.images.augment import padded_crop_and_flip
from trainables.data.loader import all_on_device
from trainables.data.text import next_token_loss, streams
from trainables.fields import TrialFields
from trainables.models.blocks import checkpoint_blocks
from trainables.models.optimizers import make_optimizer
from trainables.models.resnet import zero_last_gammas
from trainables.models.rewritten_stem.stem import rewrite_stem
from trainables.registry import DATASETS, MODELS, load
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import HeldOutSet, Workload, WorkloadError


def build_workload(trial: Trial, device: torch.device, source: str | None = None) -> Workload:
    """Build the trial's workload. The registry's models are created on the device, a user's own model on the CPU.

    `source` is the text of a user's workload file, for hosts that do not have the file.
    Raises WorkloadError, or DataError from the data source.
    """
    if trial.workload:
        workload = load_user_workload(trial.workload, source)(trial)
        if not isinstance(workload, Workload):
            raise WorkloadError(
                f"workload {trial.workload!r} returned {type(workload).__name__}; "
                "it must return a trainables.workload.Workload"
            )
        if problem := _problem(trial, workload):
            raise WorkloadError(f"workload {trial.workload!r}: {problem}")
        if (make_loader := workload.loader) is not None:  # a trial may record which of its fields are read
            return replace(workload, loader=lambda _, rank, world: make_loader(trial, rank, world))
        return workload
    return (_images if MODELS[trial.model].reads == "images" else _text)(trial, device)


def _problem(trial: Trial, workload: Workload) -> str | None:
    """Return what is wrong with the fields of a user's workload, and the fix. None if nothing is."""
    if not isinstance(workload.model, nn.Module):
        return f"model must be a torch.nn.Module, got {type(workload.model).__name__}"
    for name in ("optimizer", "step", "loss", "loader", "after_backward", "scheduler", "collate", "prepare", "ahead"):
        value = getattr(workload, name)
        if value is not None and not callable(value):
            example = "; for example lambda parameters: torch.optim.AdamW(parameters)" if name == "optimizer" else ""
            return f"{name} must be a function, got {type(value).__name__}{example}"
    if (workload.step is None) == (workload.loss is None):
        return "give either step, or loss for batches (inputs, targets)"
    if (workload.dataset is None) == (workload.loader is None):
        return "give either dataset or loader"
    has_length = hasattr(workload.dataset, "__len__") and hasattr(workload.dataset, "__getitem__")
    if workload.dataset is not None and not has_length and not isinstance(workload.dataset, IterableDataset):
        kind = type(workload.dataset).__name__
        return f"dataset must have __len__ and __getitem__, or be an IterableDataset, got {kind}; or give loader"
    if workload.step is not None and (
        workload.ahead is not None or workload.prepare is not identity or workload.gathered
    ):
        return "prepare, ahead and gathered apply to batches (inputs, targets) with loss; with step, do that in step"
    if workload.step is not None and trial.parallel == "dp":
        return "parallel 'dp' splits batches (inputs, targets) itself and requires loss instead of step; use 'ddp'"
    defaults = TrialFields.model_fields
    replaced = [name for name in ("lr_rule", "warmup", "decay") if getattr(trial, name) != defaults[name].default]
    if workload.scheduler is not None and replaced:
        return f"its scheduler replaces {' and '.join(replaced)} of the trial; omit {'them' if replaced[1:] else 'it'}"
    return None


def _images(trial: Trial, device: torch.device) -> Workload:
    data = load(DATASETS[trial.dataset].images)(trial)
    blueprint = partial(load(MODELS[trial.model]), data.classes, data.channels, data.image_size)
    with device:
        model = blueprint()
    if trial.zero_gamma:
        zero_last_gammas(model)
    if trial.rewritten_stem:
        rewrite_stem(model)
    first, normalise = data.prepare, _normalise(trial.memory_format)
    if trial.augment == "device" and DATASETS[trial.dataset].in_memory:
        first = padded_crop_and_flip
    return Workload(
        model=model,
        blueprint=blueprint,
        dataset=all_on_device(data.dataset, device) if trial.resident_data else data.dataset,
        loss=partial(nn.functional.cross_entropy, label_smoothing=trial.label_smoothing),
        optimizer=make_optimizer(trial),
        collate=identity,
        prepare=_prepare(first, normalise),
        ahead=data.ahead,
        resident=DATASETS[trial.dataset].on_device,
        validation=_held_out_set(trial, device) if trial.epochs else None,
        gathered=trial.resident_data,
    )


def _held_out_set(trial: Trial, device: torch.device) -> HeldOutSet:
    """Return the test split, without augmentation or label smoothing."""
    data = load(DATASETS[trial.dataset].images)(trial.but(augment="none"), "test")
    dataset = all_on_device(data.dataset, device) if trial.resident_data else data.dataset
    return HeldOutSet(dataset, nn.functional.cross_entropy, _prepare(data.prepare, _normalise(trial.memory_format)))


def _text(trial: Trial, device: torch.device) -> Workload:
    reads = MODELS[trial.model].reads
    data = load(getattr(DATASETS[trial.dataset], reads))(trial)
    blueprint = partial(load(MODELS[trial.model]), data.vocabulary, trial)
    with device:
        model = blueprint()
    if trial.activation_checkpointing != "none":
        checkpoint_blocks(model, selective=trial.activation_checkpointing == "selective")
    loss = torch.compile(next_token_loss) if trial.compiled else next_token_loss
    return Workload(
        model=model,
        blueprint=blueprint,
        dataset=data.dataset,
        loss=None if trial.fused_loss else loss,
        step=_loss_of_model if trial.fused_loss else None,
        optimizer=make_optimizer(trial),
        tokens_per_sample=trial.sequence_length if reads == "tokens" else None,
        collate=identity,
        resident=DATASETS[trial.dataset].on_device,
        batch_indices=partial(streams, trial, data.dataset),
    )


def _loss_of_model(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss that a language model computes together with its output layer."""
    loss: torch.Tensor = model(*batch)
    return loss


def _prepare(
    first: Callable[[Any], torch.Tensor] | None, normalise: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Any], torch.Tensor]:
    return normalise if first is None else lambda inputs: normalise(first(inputs))


def _normalise(memory_format: str) -> Callable[[torch.Tensor], torch.Tensor]:
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format

    def normalise(images: torch.Tensor) -> torch.Tensor:
        """Map uint8 [n, c, h, w] to float32 in [-1, 1]. Floats pass through."""
        if images.dtype == torch.uint8:
            images = torch.add(torch.tensor(-1.0), images.contiguous(memory_format=layout), alpha=1 / 127.5)
        return images

    return normalise
