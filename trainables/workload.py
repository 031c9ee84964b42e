"""The interface of a workload: model, data, loss and optimizer, from the registry or from a user's file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler, default_collate

from trainables.batch import identity


class WorkloadError(Exception):
    """A user's workload cannot be used. The message is one line: the problem, the file and the fix."""

    exit_code = 2


@dataclass(frozen=True)
class OnHost:
    """A part of a batch that stays on the host until `prepare` gets it, as the loader made it.

    It does not count as bytes copied to the device. Copies that `prepare` makes are timed as part of the forward pass.
    """

    value: Any


@dataclass(frozen=True)
class HeldOutSet:
    """Validation samples, which are never trained on. `loss` and `prepare` as in `Workload`, without augmentation."""

    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    prepare: Callable[[Any], Any] = identity


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, data, loss and optimizer of a training step.

    A batch is a pair (inputs, targets); each is a tensor, or tuples, lists or dicts of tensors. A step computes
    `loss(model(prepare(inputs)), targets)`, runs the backward pass and updates the weights.
    """

    model: nn.Module
    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    """(model output, targets) -> scalar, averaged over the rank's batch"""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    collate: Callable[[Any], Any] = default_collate
    """combines samples of the data set into a batch, in the loader process"""
    prepare: Callable[[Any], Any] = identity
    """applied to the inputs on the device; timed as part of the forward pass"""
    ahead: Callable[[Any], torch.Tensor] | None = None
    """applied to the inputs of upcoming batches, in a thread, on the device and concurrently with the step"""
    resident: bool = False
    """the data set's tensors are on the device already: no loader, no copy"""
    blueprint: Callable[[], nn.Module] | None = None
    """creates the model again on the current device, to count its operations; None: they are not counted"""
    batch_indices: Callable[[int], Sampler[list[int]]] | None = None
    """(rank) -> endless batches of indices for that rank; None: shuffled samples, see `trainables.data.loader`"""
    validation: HeldOutSet | None = None
    """held-out samples for validation after each epoch; None: no validation"""
    gathered: bool = False
    """`dataset.tensors` (inputs, targets) are on the device, and a batch is a tensor of indices into them"""

    def select(self, batch: Any) -> tuple[Any, Any]:
        """Return (inputs, targets) of a batch on the device."""
        if not self.gathered:
            return batch
        inputs, targets = self.dataset.tensors  # type: ignore[attr-defined]
        return inputs[batch], targets[batch]
