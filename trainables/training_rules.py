"""What does not go together in a trial that trains to an accuracy: one line for each. No torch here."""

from typing import TYPE_CHECKING

from trainables.registry import DDP_WRAPPED, RESIDENT_DATASETS, RESIDUAL_MODELS, TEXT_MODELS

if TYPE_CHECKING:
    from trainables.trial import Trial

NEED_EPOCHS = {
    "target_accuracy": None,
    "lr_rule": "none",
    "warmup": "none",
    "decay": "constant",
    "momentum_correction": True,
    "loss_mean": "global",
    "shared_shuffle": True,
    "resident_data": False,
    "noise_scale": False,
}
"""fields that change nothing in timed windows, with the value that they have there"""

TRAINS_UNDER = ("none", *DDP_WRAPPED, "ddp_delayed")
"""strategies whose ranks hold whole weights, so that rank 0 can validate and keep them"""


def check_training(trial: "Trial") -> None:
    """Raises ValueError, in one line, for the first thing that cannot be."""
    _check_model(trial)
    if trial.epochs:
        _check_epochs(trial)
        return
    for field, default in NEED_EPOCHS.items():
        value = getattr(trial, field)
        if value != default:
            raise ValueError(
                f"{field} {value!r} is about training by epochs, and epochs is 0, which times windows: "
                f"give epochs, or leave {field} out"
            )


def _check_model(trial: "Trial") -> None:
    """What a model's own fields ask of it, with or without epochs."""
    if trial.zero_gamma and (trial.workload or trial.model not in RESIDUAL_MODELS):
        raise ValueError(
            f"zero_gamma is about residual blocks, and {_what(trial)} has none that are known here; "
            f"allowed models: {', '.join(RESIDUAL_MODELS)}"
        )
    if trial.label_smoothing and (trial.workload or trial.model in TEXT_MODELS):
        raise ValueError(
            f"label_smoothing {trial.label_smoothing:g} is of the loss of image models; {_what(trial)} has its own: use 0"
        )


def _check_epochs(trial: "Trial") -> None:
    if not trial.workload and trial.model in TEXT_MODELS:
        raise ValueError(
            f"epochs {trial.epochs} needs images with labels; model {trial.model!r} reads an endless text: "
            "use epochs 0, or an image model"
        )
    if not trial.workload and trial.dataset in ("synthetic", "synthetic_loader"):
        raise ValueError(
            f"epochs {trial.epochs} has nothing to learn from dataset {trial.dataset!r}, which is random: use one of images"
        )
    if trial.parallel not in TRAINS_UNDER:
        raise ValueError(
            f"parallel {trial.parallel!r} is for timed windows; with epochs allowed: {', '.join(TRAINS_UNDER)}"
        )
    if trial.profile_ranks:
        raise ValueError(f"profile_ranks {trial.profile_ranks!r} is for timed windows: leave it out with epochs")
    if trial.workload and trial.captured:
        raise ValueError(
            f"execution {trial.execution!r} with epochs warms up and takes its steps back, which a workload's own "
            "optimizer may not allow: use 'eager' or 'compile'"
        )
    if not trial.momentum_correction and not (trial.optimizer in ("sgd", "nesterov", "lars") and trial.momentum):
        raise ValueError(
            f"momentum_correction False needs momentum; optimizer {trial.optimizer!r} with momentum {trial.momentum:g} "
            "has none that follows the learning rate: use 'sgd', 'nesterov' or 'lars' with momentum above 0"
        )
    if trial.resident_data:
        _check_resident(trial)
    if trial.noise_scale and trial.processes == 1 and trial.accumulation_steps == 1:
        raise ValueError(
            "noise_scale compares gradients of two batch sizes, and one rank with accumulation_steps 1 has one: "
            "use accumulation_steps 2 or more, or more ranks"
        )
    if trial.noise_scale and trial.processes > 1 and trial.parallel not in DDP_WRAPPED:
        raise ValueError(
            f"noise_scale needs to see a rank's own gradients, which parallel {trial.parallel!r} shows nobody; "
            f"allowed: {', '.join(DDP_WRAPPED)}"
        )


def _check_resident(trial: "Trial") -> None:
    if trial.workload or trial.dataset not in RESIDENT_DATASETS:
        raise ValueError(
            f"resident_data holds all images as one array; allowed data sets: {', '.join(RESIDENT_DATASETS)}, "
            f"not {_what(trial) if trial.workload else repr(trial.dataset)}"
        )
    if trial.loader_workers:
        raise ValueError(
            f"loader_workers {trial.loader_workers} has nothing to load with resident_data, which gathers batches on the "
            "device; allowed: 0"
        )


def _what(trial: "Trial") -> str:
    return f"workload {trial.workload!r}" if trial.workload else f"model {trial.model!r}"
