"""Count the floating-point operations of a training step without executing it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Blueprint = Callable[[], nn.Module]
"""creates a workload's model on the current device"""

_CACHE: dict[tuple[Any, ...], float] = {}


def step_flops(blueprint: Blueprint | None, inputs: Any, model: str, image_size: int) -> float | None:
    """Return the operations of a forward and a backward pass over `inputs`; a multiply-add counts as two.

    Counts matrix products, convolutions and attention, with torch's FlopCounterMode. Element-wise operations and the
    optimizer are not counted. Images [n, c, h, w] are counted at `image_size` x `image_size`, to which the device may
    crop them. The model is created on the meta device, which propagates shapes only. Results are cached per process by
    the name `model` and the shape. None if unknown: a user's own model, or inputs that are not a single tensor.
    """
    if blueprint is None or not isinstance(inputs, torch.Tensor):
        return None
    images = inputs.dim() == 4
    shape = (*inputs.shape[:2], image_size, image_size) if images else tuple(inputs.shape)
    key = (model, shape)
    if key not in _CACHE:
        dtype = torch.float32 if images else inputs.dtype  # images are normalised on the device
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            blueprint()(torch.empty(shape, dtype=dtype)).sum().backward()
        _CACHE[key] = float(counter.get_total_flops())
    return _CACHE[key]
