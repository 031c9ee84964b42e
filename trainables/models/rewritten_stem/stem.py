"""Faster equivalents of the first convolution and the pooling of `resnet18` and `resnet50` for GPUs.

In a compiled step of torchvision's ResNet-50 (H200, bf16, batch 512; benchmarks/results/resnet50-modes) these two
layers take 9.1 of 71.5 ms and reach only 5 to 10 % of what the device can do. cuDNN's kernels for a 7x7 window over 3
channels are slow, even with zero padding to 8 channels. The compiler's backward pass of max pooling checks four windows
for each pixel.
"""

import torch
from torch import nn
from torch.nn import functional

from trainables.models.rewritten_stem.pooling import WindowedMaxPool

CHANNEL_MULTIPLE = 16
"""The convolution's input is padded with zeros to a multiple of this many channels: its kernels read 8 bf16 numbers at
once."""


def rewrite_stem(model: nn.Module) -> None:
    """Replace the stem of an ImageNet ResNet by `SpaceToDepthConv`, with the same weight, and `WindowedMaxPool`."""
    model.conv1 = SpaceToDepthConv(model.conv1)  # type: ignore[arg-type]
    model.maxpool = WindowedMaxPool()


class SpaceToDepthConv(nn.Conv2d):
    """A 7x7 convolution of stride 2, computed as a 4x4 convolution of stride 1 after space-to-depth of 2x2 pixels.

    Input [n, c, h, w] with even h and w, output [n, out_channels, h / 2, w / 2]. The sums are those of the 7x7
    convolution, in a different order and with additional zeros.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__(
            conv.in_channels, conv.out_channels, kernel_size=7, stride=2, padding=3, bias=False, device="meta"
        )
        self.weight = conv.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        n, c, h, w = inputs.shape
        cells = inputs.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(n, 4 * c, h // 2, w // 2)
        # 2 cells before and 1 after, because the kernel's first row and column are zeros
        cells = functional.pad(cells, (2, 1, 2, 1, 0, -4 * c % CHANNEL_MULTIPLE))
        return functional.conv2d(cells.contiguous(memory_format=torch.channels_last), self._rearranged())

    def _rearranged(self) -> torch.Tensor:
        """Return the weight [o, c, 7, 7] as [o, channels, 4, 4]."""
        weight = functional.pad(self.weight, (1, 0, 1, 0))
        o, c = weight.shape[:2]
        weight = weight.view(o, c, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(o, 4 * c, 4, 4)
        weight = functional.pad(weight, (0, 0, 0, 0, 0, -4 * c % CHANNEL_MULTIPLE))
        return weight.contiguous(memory_format=torch.channels_last)
