"""3x3 max pooling of stride 2 whose backward pass goes by windows, on GPUs as one Triton kernel.

Each pixel of an even row and column lies in one window, others in two or four. A program reads the gradients of the four
windows around a corner and writes the four pixels there; each window is read from memory once. The compiler does not look
into it: the backward pass is an operator of its own, which finds its tensors in whatever layout they come.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class WindowedMaxPool(nn.Module):
    """`nn.MaxPool2d(kernel_size=3, stride=2, padding=1)` for a compiled step: input [n, c, h, w], c a power of two."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _MaxPool.apply(inputs)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        """The largest of each window; where several are, the first one gets the gradient, as in torch."""
        rows, columns = ((edge + 1) // 2 for edge in inputs.shape[2:])
        padded = functional.pad(inputs, (1, 1, 1, 1), value=float("-inf"))
        nine = [
            padded[:, :, down : down + 2 * rows - 1 : 2, right : right + 2 * columns - 1 : 2]
            for down in range(3)
            for right in range(3)
        ]
        largest, offsets = nine[0], torch.zeros_like(nine[0], dtype=torch.uint8)
        for offset, here in enumerate(nine[1:], 1):
            larger = (here > largest) | here.isnan()
            largest = torch.where(larger, here, largest)
            offsets = torch.where(larger, offset, offsets).to(torch.uint8)
        ctx.save_for_backward(offsets)
        ctx.shape = inputs.shape
        # as it is: where a Function's output went through a `contiguous` that copied nothing, torch 2.11 compiles a backward
        # pass that begins with zeros
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (offsets,) = ctx.saved_tensors
        height, width = ctx.shape[2:]
        return max_pool_backward(gradient, offsets, height, width)


@torch.library.custom_op("scaling_study::max_pool_backward", mutates_args=())
def max_pool_backward(gradient: torch.Tensor, offsets: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Gradients [n, c, rows, columns] of windows to those of their pixels [n, c, height, width].

    `offsets`, uint8, tell which of its nine pixels, counted row by row, is the largest of each window.
    """
    gradient, offsets = (each.contiguous(memory_format=torch.channels_last) for each in (gradient, offsets))
    n, channels, rows, columns = gradient.shape
    given = _given(gradient, offsets, height, width)
    if gradient.is_cuda:
        from trainables.models.rewritten_stem.pooling_kernel import (
            scatter,  # triton comes with torch's builds for CUDA only
        )

        scatter(gradient, offsets, given)
        return given
    y = 2 * torch.arange(rows)[:, None] - 1 + offsets // 3
    x = 2 * torch.arange(columns) - 1 + offsets % 3
    flat = given.zero_().permute(0, 2, 3, 1).view(n, height * width, channels)
    pixels = (y * width + x).permute(0, 2, 3, 1).reshape(n, rows * columns, channels)
    flat.scatter_add_(1, pixels, gradient.permute(0, 2, 3, 1).reshape(n, rows * columns, channels))
    return given


@max_pool_backward.register_fake
def _given(gradient: torch.Tensor, offsets: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """What `max_pool_backward` gives, with nothing in it."""
    shape = (*gradient.shape[:2], height, width)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
