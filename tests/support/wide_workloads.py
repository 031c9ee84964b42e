"""User workloads in every form that the factory accepts: own steps, dict batches, streams, loaders, clipping."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainables.trial import Trial
from trainables.workload import HeldOutSet, Workload, clip_gradients

SAMPLES, FEATURES = 64, 6
MAX_NORM = 0.05
FP16_FACTOR = 1e-3
NORMS: list[float] = []
"""total norms before clipping, one per step of `clipped`"""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Dict samples, as of a tokenizer."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(FEATURES, generator=generator)
        return {"inputs": inputs, "mask": torch.ones(FEATURES), "labels": inputs.sum()[None]}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """A finite stream of dict samples, whose length is not known, and whose last batch is incomplete."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens = Tokens()
        return iter([tokens[index] for index in range(SAMPLES - 3)])


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class LossInside(nn.Module):
    """A model that takes a batch as keywords and computes its own loss, like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output(nn.functional.mse_loss(self.body(inputs * mask).float(), labels))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def dicts(trial: Trial) -> Workload:
    """Dict batches of a map-style data set, a held-out set, a schedule and clipping."""
    return Workload(
        model=LossInside(),
        dataset=Tokens(),
        step=lambda model, batch: model(**batch).loss,
        optimizer=adamw,
        after_backward=lambda model: clip_gradients(model, 1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        validation=HeldOutSet(Tokens(), step=loss_of),
        tokens_per_sample=FEATURES,
    )


def stream(trial: Trial) -> Workload:
    return Workload(model=LossInside(), dataset=Stream(), step=loss_of, optimizer=adamw)


def own_loader(trial: Trial) -> Workload:
    """A DataLoader with a DistributedSampler, as scripts have one."""

    def loader(trial: Trial, rank: int, world: int) -> DataLoader[Any]:
        sampler: Any = torch.utils.data.DistributedSampler(Tokens(), num_replicas=world, rank=rank)
        return DataLoader(Tokens(), batch_size=trial.batch_per_gpu, sampler=sampler)

    return Workload(model=LossInside(), loader=loader, step=loss_of, optimizer=adamw)


def generator(trial: Trial) -> Workload:
    """An endless generator without a length."""

    def loader(trial: Trial, rank: int, world: int) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            inputs = torch.randn(trial.batch_per_gpu, FEATURES, generator=generator)
            yield {"inputs": inputs, "mask": torch.ones_like(inputs), "labels": inputs.sum(1, keepdim=True)}

    return Workload(model=LossInside(), loader=loader, step=loss_of, optimizer=adamw)


def clipped(trial: Trial) -> Workload:
    """Clip to a norm that every step exceeds, and record the norms.

    With fp16, loss and norm are smaller and the rate is larger, so that scaled gradients do not overflow.
    """
    factor = FP16_FACTOR if "fp16" in trial.precision else 1.0
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1))
    return Workload(
        model=nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)),
        dataset=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        loss=lambda outputs, targets: factor * nn.functional.mse_loss(outputs.float(), targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0 / factor, momentum=0.9),
        after_backward=lambda model: NORMS.append(float(clip_gradients(model, MAX_NORM * factor)) / factor),
    )


class TwoHeads(nn.Module):
    """A model of which a step uses one head only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Output:
        return Output((self.used(inputs) - labels).square().mean())


def unused_parameters(trial: Trial) -> Workload:
    return dataclasses.replace(stream(trial), model=TwoHeads())
