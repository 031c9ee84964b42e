"""3x3 max pooling of stride 2 whose backward pass iterates over windows, on GPUs as one Triton kernel.

A pixel in an even row and an even column belongs to one window, other pixels to two or four. A program reads the
gradients of the four windows around a corner and writes the four pixels there, so each window is read from memory once.
The backward pass is a custom operator, opaque to the compiler, that accepts tensors of any layout.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class WindowedMaxPool(nn.Module):
    """`nn.MaxPool2d(kernel_size=3, stride=2, padding=1)` for compiled steps. Input [n, c, h, w], c a power of two."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _MaxPool.apply(inputs)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Return the maximum of each window. If several pixels are equal, the first gets the gradient, as in torch."""
        rows, columns = ((edge + 1) // 2 for edge in inputs.shape[2:])
        padded = functional.pad(inputs, (1, 1, 1, 1), value=float("-inf"))
        shifted = [
            padded[:, :, down : down + 2 * rows - 1 : 2, right : right + 2 * columns - 1 : 2]
            for down in range(3)
            for right in range(3)
        ]
        largest, offsets = shifted[0], torch.zeros_like(shifted[0], dtype=torch.uint8)
        for offset, pixels in enumerate(shifted[1:], 1):
            larger = (pixels > largest) | pixels.isnan()
            largest = torch.where(larger, pixels, largest)
            offsets = torch.where(larger, offset, offsets).to(torch.uint8)
        ctx.save_for_backward(offsets)
        ctx.shape = inputs.shape
        # No `contiguous` here: if it copies nothing, torch 2.11 compiles a backward pass that starts from zeros.
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (offsets,) = ctx.saved_tensors
        height, width = ctx.shape[2:]
        return max_pool_backward(gradient, offsets, height, width)


@torch.library.custom_op("scaling_study::max_pool_backward", mutates_args=())
def max_pool_backward(gradient: torch.Tensor, offsets: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Map the gradients of windows [n, c, rows, columns] to the gradients of pixels [n, c, height, width].

    `offsets` (uint8) is the position of the maximum among the nine pixels of each window, counted row by row.
    """
    gradient, offsets = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (gradient, offsets))
    n, channels, rows, columns = gradient.shape
    output = _empty_output(gradient, offsets, height, width)
    if gradient.is_cuda:
        from trainables.models.rewritten_stem.pooling_kernel import (
            scatter,  # triton comes with torch's builds for CUDA only
        )

        scatter(gradient, offsets, output)
        return output
    y = 2 * torch.arange(rows)[:, None] - 1 + offsets // 3
    x = 2 * torch.arange(columns) - 1 + offsets % 3
    flat = output.zero_().permute(0, 2, 3, 1).view(n, height * width, channels)
    pixels = (y * width + x).permute(0, 2, 3, 1).reshape(n, rows * columns, channels)
    flat.scatter_add_(1, pixels, gradient.permute(0, 2, 3, 1).reshape(n, rows * columns, channels))
    return output


@max_pool_backward.register_fake
def _empty_output(gradient: torch.Tensor, offsets: torch.Tensor, height: int, width: int) -> torch.Tensor:
    shape = (*gradient.shape[:2], height, width)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
