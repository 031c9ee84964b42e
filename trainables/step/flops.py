"""Floating-point operations of a training step, counted without computing it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Blueprint = Callable[[], nn.Module]
"""makes a workload's model anew, on the current device"""

_KNOWN: dict[tuple[Any, ...], float] = {}


def step_flops(blueprint: Blueprint | None, inputs: Any, model: str, image_size: int) -> float | None:
    """Operations of a forward and a backward pass over `inputs`: two for each multiplication with its addition.

    Images [n, 3, h, w] may come larger than they train, to be cropped on the device: counted are `image_size` x `image_size`.

    Matrix products, convolutions and attention count, as torch's FlopCounterMode has them; what is done element by
    element does not, nor does the optimizer. The model is made on the meta device, which knows shapes and computes
    nothing; `model` names it, so that equal models and shapes are counted once a process. None where it cannot be told:
    a user's own model, or inputs that are no single tensor.
    """
    if blueprint is None or not isinstance(inputs, torch.Tensor):
        return None
    images = inputs.dim() == 4
    shape = (*inputs.shape[:2], image_size, image_size) if images else tuple(inputs.shape)
    key = (model, shape)
    if key not in _KNOWN:
        dtype = torch.float32 if images else inputs.dtype  # images are normalised on the device
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            blueprint()(torch.empty(shape, dtype=dtype)).sum().backward()
        _KNOWN[key] = float(counter.get_total_flops())
    return _KNOWN[key]
