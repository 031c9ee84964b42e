"""What is trained: model, data, loss and optimizer, from the registries or from a user's own file."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler, default_collate

from trainables.batch import identity


class WorkloadError(Exception):
    """A user's workload file that cannot be used, in one line: what, where, what to do."""

    exit_code = 2


@dataclass(frozen=True)
class OnHost:
    """A part of a batch that stays on the host: `prepare` gets it as the loader made it.

    It counts for nothing in the bytes copied to the device; what `prepare` copies is part of the forward pass.
    """

    value: Any


@dataclass(frozen=True)
class HeldOutSet:
    """Samples that are never trained on; `loss` as a workload's, and `prepare`, which augments nothing."""

    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    prepare: Callable[[Any], Any] = identity


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything of a training step that is not the study's own.

    A batch is a pair (inputs, targets) of tensors, or of tuples, lists or dicts of tensors:
    step = `loss(model(prepare(inputs)), targets)`, backward, optimizer.
    """

    model: nn.Module
    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    """(model's output, targets) -> scalar, averaged over the rank's batch"""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    collate: Callable[[Any], Any] = default_collate
    """turns the data set's samples into a batch, in the loader process"""
    prepare: Callable[[Any], Any] = identity
    """applied to the inputs on the device; timed as part of the forward pass"""
    ahead: Callable[[Any], torch.Tensor] | None = None
    """applied to the inputs of batches to come, in a thread and on the device beside the step (None: nothing is)"""
    resident: bool = False
    """the data set's tensors are on the device already: no loader, no copy"""
    blueprint: Callable[[], nn.Module] | None = None
    """makes the model once more, on the current device, so that its operations can be counted; None: not known"""
    batch_indices: Callable[[int], Sampler[list[int]]] | None = None
    """(rank) -> its endless batches of indices; None: shuffled samples, as `trainables.data.loader` does"""
    validation: HeldOutSet | None = None
    """held-out samples, on which training by epochs is judged; None: it is not"""
    gathered: bool = False
    """`dataset.tensors` (inputs, targets) are on the device already, and a batch is a tensor of indices into them"""

    def select(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch on the device."""
        if not self.gathered:
            return batch
        inputs, targets = self.dataset.tensors  # type: ignore[attr-defined]
        return inputs[batch], targets[batch]
