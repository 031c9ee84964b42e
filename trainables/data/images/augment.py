"""Random crops and flips: of a whole batch on the device, or of one image in a loader process."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import pad

from trainables.data.images.decode import Box

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
"""of a crop, against the image's area, and its width / height (Szegedy et al., arXiv:1409.4842, section 6; torchvision's
RandomResizedCrop)"""


def crop_and_flip(images: torch.Tensor, size: int) -> torch.Tensor:
    """A crop at a random place of each image, every second one mirrored: uint8 [n, c, side, side] to [n, c, size, size].

    Place and flip of each image are its own. One pass over the batch; the host waits for nothing.
    """
    n, side = images.shape[0], images.shape[-1]
    device = images.device
    places = torch.randint(side - size + 1, (2, n, 1), device=device)
    mirrored = torch.rand((n, 1), device=device) < 0.5
    if device.type == "cuda":
        from trainables.data.images.gpu.kernels import cropped  # triton comes with torch's builds for CUDA only

        return cropped(images, places, mirrored, size)
    along = torch.arange(size, device=device)
    rows = (places[0] + along)[:, :, None]
    columns = (places[1] + torch.where(mirrored, size - 1 - along, along))[:, None, :]
    image = torch.arange(n, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[image, rows, columns].permute(0, 3, 1, 2)


def padded_crop_and_flip(images: torch.Tensor) -> torch.Tensor:
    """Small images uint8 [n, c, edge, edge], each moved by up to an eighth of its edge in either direction, zeros coming
    in from outside, and every second one mirrored.

    At 28 and 32 pixels the padding is 4, as for CIFAR in He et al. 2016 (https://arxiv.org/abs/1512.03385, section 4.2).
    """
    edge = images.shape[-1]
    return crop_and_flip(pad(images, [round(edge / 8)] * 4), edge)


def generators(seed: int, epoch_and_index: list[tuple[int, int]]) -> Iterator[np.random.Generator]:
    """For each sample random numbers of its own: the same for the same seed, epoch and index, whoever loads it."""
    return (np.random.default_rng((seed, epoch, index)) for epoch, index in epoch_and_index)


def random_resized_crop(width: int, height: int, random: np.random.Generator) -> Box:
    """A crop of random area and shape; after ten that do not fit, the whole image cut to the nearest allowed shape."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(width - w + 1)), int(random.integers(height - h + 1)), w, h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h
