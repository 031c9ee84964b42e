"""The size of a batch whose structure is unknown."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from trainables.batch import tensors_of


def samples(batch: Any) -> int | None:
    """Return the number of samples of a batch, or None if its structure does not show it.

    The leading dimension that most of the batch's tensors share. A list of dicts, and a list inside a batch (images of
    different sizes), have one sample per item.
    """
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(item, Mapping) for item in batch):
        return len(batch)
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        return _most_common(_of_field(item) for item in batch)
    return _of_field(batch)


def _of_field(value: Any) -> int | None:
    """Return the samples of one field of a batch."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Mapping):
        return _most_common(_of_field(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return len(value) or None
    return None


def _most_common(sizes: Iterable[int | None]) -> int | None:
    counts = Counter(size for size in sizes if size is not None)
    return counts.most_common(1)[0][0] if counts else None


def tokens(inputs: Any) -> int | None:
    """Return the tokens of a model's inputs: elements of the largest integer tensor [samples, tokens]; None without."""
    sizes = [
        tensor.numel()
        for tensor in tensors_of(inputs)
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
    ]
    return max(sizes, default=None)
