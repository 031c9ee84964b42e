"""The interface of a workload: model, data, loss and optimizer, from the registry or from a user's file."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from trainables.batch import identity
from trainables.trial import Trial


class WorkloadError(Exception):
    """A user's workload cannot be used. The message is one line: the problem, the file and the fix."""

    exit_code = 2


@dataclass(frozen=True)
class OnHost:
    """A part of a batch that stays on the host until `prepare` gets it, as the loader made it.

    It does not count as bytes copied to the device. Copies that `prepare` makes are timed as part of the forward pass.
    """

    value: Any


Loss = Callable[[Any, Any], torch.Tensor]
"""(model output, targets) -> scalar, averaged over the rank's batch"""

LossOfBatch = Callable[[nn.Module, Any], torch.Tensor]
"""(model, batch on the device) -> scalar, averaged over the rank's batch"""


@dataclass(frozen=True)
class HeldOutSet:
    """Validation samples, which are never trained on.

    `loss`, `prepare` and `step` as in `Workload`, without augmentation. Give `step` or `loss`. Accuracy is computed
    with `loss` only, from class scores and class indices.
    """

    dataset: Dataset
    loss: Loss | None = None
    prepare: Callable[[Any], Any] = identity
    step: LossOfBatch | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, data, loss and optimizer of a training step.

    A batch is a tensor, or tuples, lists or dicts of tensors. A training step computes `step(model, batch)`, runs the
    backward pass and updates the weights. Instead of `step`, `loss` may be given for batches that are pairs (inputs,
    targets); the step then computes `loss(model(prepare(inputs)), targets)`.
    """

    model: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    step: LossOfBatch | None = None
    """the forward pass, for example `lambda model, batch: model(**batch).loss`; it must call the `model` that it
    receives, which is wrapped by the parallel strategy"""
    loss: Loss | None = None
    """shorthand for `step` if batches are pairs; forward pass and loss are then timed separately"""
    dataset: Dataset | None = None
    """map-style, which the ranks share, or an IterableDataset, over which each rank iterates by itself"""
    loader: Callable[[Trial, int, int], Iterable[Any]] | None = None
    """(trial, rank, number of ranks) -> the rank's batches of `trial.batch_per_gpu` samples, instead of `dataset`;
    repeated when it ends, without a smaller last batch"""
    after_backward: Callable[[nn.Module], Any] | None = None
    """called between backward pass and optimizer step, for example `lambda model: clip_gradients(model, 1.0)`; finds
    gradients that are averaged over the ranks, without loss scale; timed as a part of its own"""
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    """creates the learning rate schedule, which takes one step per optimizer step; replaces that of the trial"""
    tokens_per_sample: float | None = None
    """tokens, or other units of work, per sample; reports then show tokens per second"""
    collate: Callable[[Any], Any] = default_collate
    """combines samples of the data set into a batch, in the loader process; with loader processes, it must be defined
    at the top level of a module"""
    prepare: Callable[[Any], Any] = identity
    """with `loss`: applied to the inputs on the device; timed as part of the forward pass"""
    ahead: Callable[[Any], torch.Tensor] | None = None
    """with `loss`: applied to the inputs of upcoming batches, in a thread, on the device and concurrently with the
    step"""
    resident: bool = False
    """the data set's tensors are on the device already: no loader, no copy"""
    blueprint: Callable[[], nn.Module] | None = None
    """creates the model again on the current device, to count its operations without executing them; None: they are
    counted in an extra step of the model itself"""
    batch_indices: Callable[[int], Sampler[list[int]]] | None = None
    """(rank) -> endless batches of indices for that rank; None: shuffled samples, see `trainables.data.loader`"""
    validation: HeldOutSet | None = None
    """held-out samples for validation after each epoch; None: no validation"""
    gathered: bool = False
    """`dataset.tensors` (inputs, targets) are on the device, and a batch is a tensor of indices into them"""

    def select(self, batch: Any) -> tuple[Any, Any]:
        """Return (inputs, targets) of a batch on the device. Raises WorkloadError if it is no pair."""
        if not self.gathered:
            return pair(batch)
        inputs, targets = self.dataset.tensors  # type: ignore[union-attr]
        return inputs[batch], targets[batch]

    @property
    def samples(self) -> int | None:
        """Samples per epoch. None for a stream, for a custom loader, and for one resident batch."""
        if self.resident or self.dataset is None or isinstance(self.dataset, IterableDataset):
            return None
        return len(self.dataset)  # type: ignore[arg-type]


def pair(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch. Raises WorkloadError if it is no pair."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise WorkloadError(
        f"a batch must be (inputs, targets); this one is {_described(batch)}: "
        "give Workload.step, for example step=lambda model, batch: model(**batch).loss"
    )


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with keys {', '.join(map(str, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their total 2-norm is at most `max_norm`. For `Workload.after_backward`.

    Returns the norm before clipping, a scalar on the device. It is the norm of the complete averaged gradient under
    every parallel strategy, also if each rank holds a part of the gradients (fsdp2) or updates a part of the weights
    (zero1). Collective under fsdp2; otherwise nothing synchronises.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
    if hasattr(norm, "full_tensor"):  # a DTensor that sums the ranks' parts
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
