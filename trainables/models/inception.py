"""Inception for any number of channels: torchvision's v3 (Szegedy et al. 2015, https://arxiv.org/abs/1512.00567), and
timm's v4 (Szegedy et al. 2016, https://arxiv.org/abs/1602.07261).

Input [n, channels, image_size, image_size] with an edge of at least 75 pixels, output logits [n, classes].
"""

import torchvision
from torch import nn


def inception_v3(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create Inception v3 without its auxiliary classifier, so that it has one loss like all models here.

    Weights keep the initialisation of PyTorch's layers. Torchvision's truncated normal distribution takes seconds on a
    CPU, and no timing depends on it.
    """
    model = torchvision.models.inception_v3(weights=None, num_classes=classes, aux_logits=False, init_weights=False)
    if channels != 3:
        model.Conv2d_1a_3x3.conv = nn.Conv2d(channels, 32, kernel_size=3, stride=2, bias=False)
    return model


def inception_v4(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create Inception v4 with random weights. Requires timm."""
    import timm

    model: nn.Module = timm.create_model("inception_v4", num_classes=classes, in_chans=channels)
    return model
