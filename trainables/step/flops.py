"""Count the floating-point operations of a training step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from trainables.models.blocks import checkpoint_blocks

Blueprint = Callable[[], nn.Module]
"""creates a workload's model on the current device"""

_CACHE: dict[tuple[Any, ...], float] = {}


def step_flops(blueprint: Blueprint, inputs: torch.Tensor, model: str, image_size: int) -> float:
    """Return the operations of a forward and a backward pass over `inputs`, without executing them.

    Images [n, c, h, w] are counted at `image_size` x `image_size`, to which the device may crop them. The model is
    created on the meta device, which propagates shapes only. Results are cached per process by the name `model` and the
    shape. See `counted_flops`.
    """
    images = inputs.dim() == 4
    shape = (*inputs.shape[:2], image_size, image_size) if images else tuple(inputs.shape)
    key = (model, shape)
    if key not in _CACHE:
        dtype = torch.float32 if images else inputs.dtype  # images are normalised on the device
        with torch.device("meta"):
            network = blueprint()
            _CACHE[key] = counted_flops(lambda: network(torch.empty(shape, dtype=dtype)).sum()) or 0.0
    return _CACHE[key]


class _CausalAttention(TorchFunctionMode):
    """Sums the operations of the forward pass of causal attention, masked ones included."""

    flops = 0.0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention and kwargs.get("is_causal"):
            query, key = args[:2]
            self.flops += 4.0 * query.numel() * key.shape[-2]
        return function(*args, **kwargs)


def causal_attention_flops(blueprint: Blueprint, inputs: torch.Tensor) -> float:
    """Return the operations of causal attention in a forward and a backward pass over `inputs`.

    They are a part of `step_flops`, in which half of them are masked (Dao 2023, "FlashAttention-2", section 4.1, counts
    the other half only). The backward pass has twice as many products as the forward pass.
    """
    with torch.device("meta"), _CausalAttention() as counted:
        blueprint()(torch.empty(inputs.shape, dtype=inputs.dtype))
    return 3 * counted.flops


def recomputed_flops(blueprint: Blueprint, inputs: torch.Tensor, *, selective: bool) -> float:
    """Return the operations that activation checkpointing repeats in a backward pass over `inputs`."""
    with torch.device("meta"):
        network = blueprint()
        tokens = torch.empty(inputs.shape, dtype=inputs.dtype)
        once = counted_flops(lambda: network(tokens).sum()) or 0.0
        checkpoint_blocks(network, selective=selective)
        return (counted_flops(lambda: network(tokens).sum()) or 0.0) - once


def counted_flops(loss: Callable[[], torch.Tensor]) -> float | None:
    """Return the operations of computing `loss()` and of its backward pass; a multiply-add counts as two.

    Counts matrix products, convolutions and attention, with torch's FlopCounterMode. Element-wise operations and the
    user's own kernels are not counted. Compiled models are executed op by op. None if nothing was counted.
    """
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        loss().backward()
    return float(counter.get_total_flops()) or None
