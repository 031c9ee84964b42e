"""Crop and flip at random: a batch on the device, or one image in a loader process."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import pad

from trainables.data.images.decode import Box

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
"""limits of a crop's area / image area, and of its width / height (Szegedy et al., arXiv:1409.4842, section 6, and
torchvision's RandomResizedCrop)"""


def crop_and_flip(images: torch.Tensor, size: int) -> torch.Tensor:
    """Crop each image at its own random position and mirror it with probability 0.5, without synchronising the host.

    Input uint8 [n, c, side, side], output uint8 [n, c, size, size]. One pass over the batch.
    """
    n, side = images.shape[0], images.shape[-1]
    device = images.device
    offsets = torch.randint(side - size + 1, (2, n, 1), device=device)
    mirrored = torch.rand((n, 1), device=device) < 0.5
    if device.type == "cuda":
        from trainables.data.images.gpu.kernels import crop  # only CUDA builds of torch have triton

        return crop(images, offsets, mirrored, size)
    along = torch.arange(size, device=device)
    rows = (offsets[0] + along)[:, :, None]
    columns = (offsets[1] + torch.where(mirrored, size - 1 - along, along))[:, None, :]
    image = torch.arange(n, device=device)[:, None, None]
    return images.permute(0, 2, 3, 1)[image, rows, columns].permute(0, 3, 1, 2)


def padded_crop_and_flip(images: torch.Tensor) -> torch.Tensor:
    """Pad small images uint8 [n, c, edge, edge] with zeros by an eighth of their edge, then crop and flip them.

    At 28 and 32 pixels the padding is 4, as for CIFAR-10 in He et al. 2016 (arXiv:1512.03385, section 4.2).
    """
    edge = images.shape[-1]
    return crop_and_flip(pad(images, [round(edge / 8)] * 4), edge)


def sample_generators(seed: int, epochs_and_indices: list[tuple[int, int]]) -> Iterator[np.random.Generator]:
    """Yield one random generator per sample. It depends only on seed, epoch and index, not on the loading process."""
    return (np.random.default_rng((seed, epoch, index)) for epoch, index in epochs_and_indices)


def random_resized_crop(width: int, height: int, random: np.random.Generator) -> Box:
    """Return a box of random area and shape. After ten misfits, crop the centre to the nearest allowed ratio."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(random.integers(width - w + 1)), int(random.integers(height - h + 1)), w, h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h
