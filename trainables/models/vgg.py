"""Torchvision's VGG (Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556), for any number of channels.

Most of its 140 million weights are in the first linear layer, so its gradients form few, large buckets.
Input [n, channels, image_size, image_size] with an edge of at least 32 pixels (five poolings of stride 2), output
logits [n, classes].
"""

from typing import Any

import torchvision
from torch import nn


def vgg19(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create VGG-19 (configuration E)."""
    return _with_channels(torchvision.models.vgg19(num_classes=classes), channels)


def vgg19_bn(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create VGG-19 with batch normalisation after each convolution."""
    return _with_channels(torchvision.models.vgg19_bn(num_classes=classes), channels)


def _with_channels(model: Any, channels: int) -> nn.Module:
    if channels != 3:
        model.features[0] = nn.Conv2d(channels, 64, kernel_size=3, padding=1)
    return model
