"""What is done to every tensor of a batch: a tensor, or tuples, lists and dicts of tensors."""

from collections.abc import Callable
from typing import Any

import torch


def identity(value: Any) -> Any:
    """The value itself: the collate function of data sets that already deliver batches.

    Here, for loader processes import the module that it lies in, at their start.
    """
    return value


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The batch with each tensor replaced by what `function` makes of it; tuples become lists, all else stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [map_tensors(function, item) for item in value]
    return value


def to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """A batch (a tensor, or tuples, lists and dicts of tensors) on the device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), value)


def byte_size(value: Any) -> int:
    """Bytes of all tensors in a batch that are on the host."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.device.type == "cpu" else 0
    if isinstance(value, dict):
        return sum(byte_size(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(byte_size(item) for item in value)
    return 0
