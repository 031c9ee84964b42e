"""Residual networks (He et al. 2016, https://arxiv.org/abs/1512.03385), torchvision's, for any number of channels.

Input [n, channels, image_size, image_size], output logits [n, classes].
"""

from typing import Any

import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck


def resnet18(classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet-18 with ImageNet's stem: 7x7 convolution of stride 2, then pooling of stride 2."""
    return _with_channels(torchvision.models.resnet18(num_classes=classes), channels)


def resnet50(classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet-50 (v1.5: the stride sits in the 3x3 convolution) with ImageNet's stem."""
    return _with_channels(torchvision.models.resnet50(num_classes=classes), channels)


def resnet18_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet-18 for small images: a 3x3 convolution of stride 1 and no pooling before the first block.

    The usual form for CIFAR; at 28 pixels it computes about 15 times as much per image as `resnet18`.
    """
    return _small_images(torchvision.models.resnet18(num_classes=classes), channels)


def resnet50_small(classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet-50 for small images: its stem as that of `resnet18_small`."""
    return _small_images(torchvision.models.resnet50(num_classes=classes), channels)


def zero_last_gammas(model: nn.Module) -> None:
    """The last batch normalisation of each residual block begins at zero, so that at first each block passes on what it
    gets (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1).
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
