"""The first convolution and the pooling of ResNets (`resnet18`, `resnet50`) in other forms of the same arithmetic, for speed on GPUs.

In a compiled step of torchvision's ResNet-50 (H200, bf16, batch 512; benchmarks/results/resnet50-modes) these two take 9.1 of
71.5 ms, at a twentieth to a tenth of what the device could: cuDNN's kernels for a 7x7 window over 3 channels are slow, over
8 with zeros no less, and the compiler's backward pass of max pooling asks for each pixel in four windows whether it was
the largest there.
"""

import torch
from torch import nn
from torch.nn import functional

from trainables.models.rewritten_stem.pooling import WindowedMaxPool

CHANNEL_MULTIPLE = 16
"""channels that the convolution's input is filled up to with zeros: its kernels read 8 bf16 numbers at once"""


def rewrite_stem(model: nn.Module) -> None:
    """Gives a ResNet with ImageNet's stem `SpaceToDepthConv`, with the weight that it has, and `WindowedMaxPool`."""
    model.conv1 = SpaceToDepthConv(model.conv1)  # type: ignore[arg-type]
    model.maxpool = WindowedMaxPool()


class SpaceToDepthConv(nn.Conv2d):
    """A 7x7 convolution of stride 2 as a 4x4 one of stride 1 on 2x2 pixels as channels ("space to depth").

    Input [n, c, h, w] of even h and w, output [n, out_channels, h / 2, w / 2]. The sums are those of the 7x7 convolution,
    in another order and with zeros in between.
    """

    def __init__(self, conv: nn.Conv2d):
        super().__init__(
            conv.in_channels, conv.out_channels, kernel_size=7, stride=2, padding=3, bias=False, device="meta"
        )
        self.weight = conv.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        n, c, h, w = inputs.shape
        cells = inputs.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(n, 4 * c, h // 2, w // 2)
        # 2 cells before and 1 after, as the kernel's first row and column are zeros
        cells = functional.pad(cells, (2, 1, 2, 1, 0, -4 * c % CHANNEL_MULTIPLE))
        return functional.conv2d(cells.contiguous(memory_format=torch.channels_last), self._rearranged())

    def _rearranged(self) -> torch.Tensor:
        """The weight [o, c, 7, 7] as [o, channels, 4, 4]."""
        weight = functional.pad(self.weight, (1, 0, 1, 0))
        o, c = weight.shape[:2]
        weight = weight.view(o, c, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(o, 4 * c, 4, 4)
        weight = functional.pad(weight, (0, 0, 0, 0, 0, -4 * c % CHANNEL_MULTIPLE))
        return weight.contiguous(memory_format=torch.channels_last)
