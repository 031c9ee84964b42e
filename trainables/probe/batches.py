"""The size of a batch whose structure is unknown."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from trainables.batch import tensors_of

BATCH_OF_IMAGES_DIMENSIONS = 4
"""[samples, channels, height, width]"""


def samples(batch: Any) -> int | None:
    """Return the number of samples of a batch, or None if its structure does not show it.

    The leading dimension that most of the batch's tensors share. A list of dicts, and a list inside a batch (images of
    different sizes), have one sample per item, unless its tensors are batches themselves (several views of the images).
    Without such tensors, the size that the batch or one of its items states.
    """
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(item, Mapping) for item in batch):
        return len(batch)
    items = batch if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else [batch]
    return _shared_by(items)


def samples_of_inputs(arguments: Sequence[Any]) -> int | None:
    """Return the number of samples in the arguments of a model's call; None as for `samples`.

    A dict is a batch here, however many arguments there are, and so is the only argument if it is a tuple.
    """
    if len(arguments) == 1 and isinstance(arguments[0], (Mapping, tuple)):
        return samples(arguments[0])
    return _shared_by(arguments)


def _shared_by(fields: Sequence[Any]) -> int | None:
    """Return the number of samples that most fields have; without any, the one that most of them state."""
    size = _most_common(map(_of_field, fields))
    return _most_common(map(_stated, fields)) if size is None else size


def _stated(value: Any) -> Sequence[int]:
    """Return the size that an object states, such as a batch of graphs of PyTorch Geometric."""
    for name in ("num_graphs", "batch_size"):
        size = None
        with contextlib.suppress(Exception):  # a property of code that is not known
            size = getattr(value, name, None)
        if isinstance(size, int) and size > 0:
            return [size]
    return []


def _of_field(value: Any) -> Sequence[int]:
    """Return the numbers of samples that one field of a batch may have, the most probable one first."""
    if isinstance(value, torch.Tensor):
        return [int(value.shape[0])] if value.dim() else []
    if isinstance(value, PackedSequence):
        return [int(value.batch_sizes[0])]
    if dataclasses.is_dataclass(value):
        value = vars(value) if hasattr(value, "__dict__") else {}
    if isinstance(value, Mapping):
        size = _most_common(map(_of_field, value.values()))
        return [] if size is None else [size]
    if isinstance(value, (tuple, list)) and value:
        return _of_list(value)
    return []


def _of_list(items: Sequence[Any]) -> Sequence[int]:
    """Return the items of a list, and the leading dimension that all its tensors share."""
    shared = {int(item.shape[0]) if isinstance(item, torch.Tensor) and item.dim() else None for item in items}
    size = shared.pop() if len(shared) == 1 else None
    if size is None:
        return [len(items)]
    return [size, len(items)] if items[0].dim() >= BATCH_OF_IMAGES_DIMENSIONS else [len(items), size]


def _most_common(fields: Iterable[Sequence[int]]) -> int | None:
    """Return the number that most fields may have; of equally common ones, the first."""
    counts = Counter(size for sizes in fields for size in dict.fromkeys(sizes))
    return counts.most_common(1)[0][0] if counts else None


def tokens(inputs: Any) -> int | None:
    """Return the tokens of a model's inputs: elements of the largest integer tensor [samples, tokens]; None without."""
    sizes = [
        tensor.numel()
        for tensor in tensors_of(inputs)
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
    ]
    return max(sizes, default=None)
