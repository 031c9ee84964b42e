"""Operations on batches: a tensor, or nested tuples, lists and dicts of tensors."""

from collections.abc import Callable
from typing import Any

import torch


def identity(value: Any) -> Any:
    """Return the value unchanged. Collate function of data sets that already yield batches.

    Loader processes import this module when they start, so it imports nothing else of the project.
    """
    return value


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor of a batch. Tuples become lists; other values are kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [map_tensors(function, item) for item in value]
    return value


def to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """Copy a batch to the device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), value)


def byte_size(value: Any) -> int:
    """Return the total bytes of a batch's tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.device.type == "cpu" else 0
    if isinstance(value, dict):
        return sum(byte_size(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(byte_size(item) for item in value)
    return 0
