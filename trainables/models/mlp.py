"""A multilayer perceptron, the fastest network for tests: few operations per gradient byte."""

from torch import nn


def mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """Create an MLP with one hidden layer of 64 units.

    Input [n, channels, image_size, image_size], output logits [n, classes].
    """
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size * image_size, 64), nn.ReLU(), nn.Linear(64, classes)
    )
