"""A multilayer perceptron: next to no compute for its gradient bytes, so the quickest network to test with."""

from torch import nn


def mlp(classes: int, channels: int, image_size: int) -> nn.Module:
    """One hidden layer of 64 units on flattened images [n, channels, image_size, image_size]; logits [n, classes]."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * image_size * image_size, 64), nn.ReLU(), nn.Linear(64, classes)
    )
