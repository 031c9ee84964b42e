"""Residual networks (He et al. 2016, https://arxiv.org/abs/1512.03385), for any number of channels.

Input [n, channels, image_size, image_size], output logits [n, classes].
"""

from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck


def resnet18(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create ResNet-18 with the ImageNet stem: 7x7 convolution of stride 2, then pooling of stride 2."""
    return _with_channels(torchvision.models.resnet18(num_classes=classes), channels)


def resnet50(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create ResNet-50 (v1.5: the stride is in the 3x3 convolution) with the ImageNet stem."""
    return _with_channels(torchvision.models.resnet50(num_classes=classes), channels)


def resnet18_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create ResNet-18 for small images: the stem is a 3x3 convolution of stride 1 without pooling.

    This is the usual form for CIFAR. At 28 pixels it computes about 15 times as much per image as `resnet18`.
    """
    return _small_images(torchvision.models.resnet18(num_classes=classes), channels)


def resnet50_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create ResNet-50 for small images, with the stem of `resnet18_small`."""
    return _small_images(torchvision.models.resnet50(num_classes=classes), channels)


def resnet20(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create ResNet-20 for small images (He et al. 2016, section 4.2), with projection shortcuts: 0.27 million weights.

    The smallest residual network of the paper. At batch 16, a step takes about 25 ms on one CPU core.
    """
    blocks: list[nn.Module] = []
    width = 16
    for stage_width in (16, 32, 64):
        for _ in range(3):
            stride = 1 if stage_width == width else 2
            shortcut = None if stride == 1 else _projection(width, stage_width)
            blocks.append(BasicBlock(width, stage_width, stride, shortcut))
            width = stage_width
    stem = (nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _projection(width: int, new_width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(width, new_width, kernel_size=1, stride=2, bias=False), nn.BatchNorm2d(new_width))


def zero_last_gammas(model: nn.Module) -> None:
    """Set the weight of the last batch normalisation of each residual block to zero.

    Each block is then the identity at first (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1).
    """
    for block in model.modules():
        if isinstance(block, BasicBlock):
            nn.init.zeros_(block.bn2.weight)
        elif isinstance(block, Bottleneck):
            nn.init.zeros_(block.bn3.weight)


def _small_images(model: Any, channels: int) -> nn.Module:
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _with_channels(model: nn.Module, channels: int) -> nn.Module:
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model
