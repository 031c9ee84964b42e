"""3x3 max pooling of stride 2 whose backward pass goes by windows, as one Triton kernel.

Each pixel of an even row and column lies in one window, others in two or four. A program reads the gradients of the four
windows around a corner and writes the four pixels there; each window is read from memory once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from torch.nn import functional

WINDOWS = 16
"""windows of one program, with all their channels: the fastest of 4, 8, 16 and 32 on an H200"""


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
        ctx.save_for_backward(offsets.contiguous(memory_format=torch.channels_last))
        ctx.shape = inputs.shape
        return largest.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (offsets,) = ctx.saved_tensors
        n, channels, height, width = ctx.shape
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        given = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
        rows, columns = gradient.shape[2:]
        windows = n * rows * columns
        _scatter[(triton.cdiv(windows, WINDOWS),)](
            gradient, offsets, given, windows, height, width, rows, columns, C=channels, BLOCK=WINDOWS
        )
        return given


@triton.jit
def _scatter(gradient, offsets, given, windows, height, width, rows, columns, C: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`gradient` and `offsets` [n, rows, columns, C] to `given` [n, height, width, C], all in one piece."""
    window = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (window < windows)[:, None]
    i = (window // columns) % rows
    j = window % columns
    n = window // (rows * columns)
    right = (j + 1 < columns)[:, None] & live
    below = (i + 1 < rows)[:, None] & live
    channel = tl.arange(0, C)[None, :]
    read = window[:, None] * C + channel
    k00 = tl.load(offsets + read, mask=live, other=9)
    g00 = tl.load(gradient + read, mask=live, other=0).to(tl.float32)
    k01 = tl.load(offsets + read + C, mask=right, other=9)
    g01 = tl.load(gradient + read + C, mask=right, other=0).to(tl.float32)
    k10 = tl.load(offsets + read + columns * C, mask=below, other=9)
    g10 = tl.load(gradient + read + columns * C, mask=below, other=0).to(tl.float32)
    k11 = tl.load(offsets + read + (columns + 1) * C, mask=right & below, other=9)
    g11 = tl.load(gradient + read + (columns + 1) * C, mask=right & below, other=0).to(tl.float32)
    own = tl.where(k00 == 4, g00, 0.0)
    beside = tl.where(k00 == 5, g00, 0.0) + tl.where(k01 == 3, g01, 0.0)
    under = tl.where(k00 == 7, g00, 0.0) + tl.where(k10 == 1, g10, 0.0)
    across = tl.where(k00 == 8, g00, 0.0) + tl.where(k01 == 6, g01, 0.0)
    across += tl.where(k10 == 2, g10, 0.0) + tl.where(k11 == 0, g11, 0.0)
    write = ((n * height + 2 * i) * width + 2 * j)[:, None] * C + channel
    wide = (2 * j + 1 < width)[:, None] & live
    high = (2 * i + 1 < height)[:, None] & live
    kind = given.dtype.element_ty
    tl.store(given + write, own.to(kind), mask=live)
    tl.store(given + write + C, beside.to(kind), mask=wide)
    tl.store(given + write + width * C, under.to(kind), mask=high)
    tl.store(given + write + (width + 1) * C, across.to(kind), mask=wide & high)
