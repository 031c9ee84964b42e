"""A user's workload for `benchmarks.truth.improve`: a U-Net on random images."""

import torch
from torch import nn
from torch.utils.data import Dataset

from trainables.trial import Trial
from trainables.workload import Workload

CLASSES = 21


class RandomScenes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images [3, 256, 256] with a class per pixel."""

    def __len__(self) -> int:
        return 2_048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 256, 256, generator=generator)
        return image, torch.randint(CLASSES, (256, 256), generator=generator)


def _double(before: int, after: int) -> nn.Sequential:
    layers = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) with padded convolutions. Images [n, 3, h, w] to logits [n, classes, h, w]."""

    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(_double(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        levels = []
        for number, block in enumerate(self.down):
            image = block(nn.functional.max_pool2d(image, 2) if number else image)
            levels.append(image)
        for up, join, level in zip(self.up, self.join, levels[-2::-1], strict=True):
            image = join(torch.cat([up(image), level], dim=1))
        return self.head(image)


def unet(trial: Trial) -> Workload:
    """Return the U-Net with SGD."""
    return Workload(
        model=UNet(),
        dataset=RandomScenes(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=trial.learning_rate, momentum=0.9),
    )
