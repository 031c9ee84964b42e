"""A custom workload: model, data, loss and optimizer in one file. The study supplies the rest.

python -m study.scaling run --workload examples/own_workload.py:tiny --gpus 1,2 --batch-per-gpu 16,64
"""

import torch
from torch import nn
from torch.utils.data import Dataset

from trainables.trial import Trial
from trainables.workload import Workload


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Noisy sine waves of 1 to 4 periods over 256 points. The label is the number of periods minus one."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(4, (), generator=generator)
        wave = torch.sin(torch.linspace(0, 2 * torch.pi, 256) * (label + 1))
        return wave[None] + torch.randn(1, 256, generator=generator), label


def tiny(trial: Trial) -> Workload:
    """Return a small convolutional network. It may depend on any field of the trial."""
    convolutions = [nn.Conv1d(1, 32, 9, stride=2), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU()]
    return Workload(
        model=nn.Sequential(*convolutions, nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(512, 4)),
        dataset=Waves(),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=trial.learning_rate),
    )
