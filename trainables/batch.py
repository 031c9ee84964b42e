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
