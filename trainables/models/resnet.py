"""Torchvision's residual networks (He et al. 2016, https://arxiv.org/abs/1512.03385), for any number of channels.

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
