"""Operations on batches: a tensor, or nested tuples, lists, dicts and dataclasses of tensors."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def identity(value: Any) -> Any:
    """Return the value unchanged. Collate function of data sets that already yield batches.

    Loader processes import this module when they start, so it imports nothing else of the project.
    """
    return value


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor of a batch; other values are kept.

    Mappings become dicts, and tuples without field names become lists.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return [map_tensors(function, item) for item in value]
    if is_record(value):
        mapped = copy.copy(value)  # without __init__, which may check or compute something
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(value, field.name)))  # even if frozen
        return mapped
    return value


def is_record(value: Any) -> bool:
    """Return True for an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)
    elif is_record(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def to_device(value: Any, device: torch.device, non_blocking: bool) -> Any:
    """Copy a batch to the device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), value)


def byte_size(value: Any) -> int:
    """Return the total bytes of a batch's tensors in host memory."""
    return sum(tensor.nbytes for tensor in tensors_of(value) if tensor.device.type == "cpu")


def sample_count(value: Any) -> int | None:
    """Return the number of samples in a batch: the first dimension that all its tensors share. None if they differ."""
    sizes = {len(tensor) for tensor in tensors_of(value) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None
