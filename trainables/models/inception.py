"""Inception v3 (Szegedy et al. 2015, https://arxiv.org/abs/1512.00567), torchvision's, for any number of channels.

Torchvision keeps no v4; timm does, which would be one more dependency of everyone for one model.

Input [n, channels, image_size, image_size] of at least 75 pixels, output logits [n, classes].
"""

import torchvision
from torch import nn


def inception_v3(classes: int, channels: int, image_size: int) -> nn.Module:
    """Inception v3 without its auxiliary classifier, so that it has one loss as every model here.

    Weights begin as PyTorch's layers make them: the truncated normal distribution that torchvision offers takes seconds
    on a CPU, and no timing depends on it.
    """
    model = torchvision.models.inception_v3(weights=None, num_classes=classes, aux_logits=False, init_weights=False)
    if channels != 3:
        model.Conv2d_1a_3x3.conv = nn.Conv2d(channels, 32, kernel_size=3, stride=2, bias=False)
    return model
