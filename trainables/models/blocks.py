"""Change how the blocks of a language model run: compiled, or with activation checkpointing.

Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): the backward pass of a
block computes its activations again, so that they need not be stored. Selective checkpointing
(Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198) stores those that are expensive to compute.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

_ATEN = torch.ops.aten
STORED = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
"""operations whose results selective checkpointing stores"""


def checkpoint_blocks(model: nn.Module, *, selective: bool) -> nn.Module:
    """Make each module of `model.blocks` compute its activations again in the backward pass. Returns the model."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, STORED)
    assert isinstance(model.blocks, nn.ModuleList)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, **options)
    return model


def compile_blocks(model: nn.Module) -> nn.Module:
    """Compile the forward pass of each module of `model.blocks`. Returns the model.

    Blocks have equal code, so that torch compiles the first one and the others use it, in far less time than for the
    complete model. What wraps a block, such as the hooks of FSDP, stays outside of the compiled code.
    """
    assert isinstance(model.blocks, nn.ModuleList)
    for block in model.blocks:
        block.forward = torch.compile(block.forward)
    return model
