"""Workloads with an injected fault that the measurements must find: a late rank, and a slow loader.

Model, image size and batch are those of the trial; images are random. Use one with
`--workload benchmarks/harness/faulty_workloads.py:late_rank`.
"""

import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from trainables.batch import identity
from trainables.build import build_workload
from trainables.data.synthetic import CHANNELS, CLASSES, resident
from trainables.models.optimizers import make_optimizer
from trainables.registry import MODELS, load
from trainables.step.timing import CudaClock
from trainables.trial import Trial
from trainables.workload import Workload

LATE_RANK = 1
LATE_S, VERY_LATE_S = 0.02, 0.06
LOAD_S = 0.05


def resident_batch(trial: Trial) -> tuple[torch.Tensor, ...]:
    """Return images [batch_per_gpu, 3, image_size, image_size] and labels [batch_per_gpu] on the trial's device."""
    dataset = resident(trial).dataset
    assert isinstance(dataset, TensorDataset)
    return dataset.tensors


def sound(trial: Trial) -> Workload:
    """Return a workload without a fault: one batch that stays on the device."""
    return Workload(
        model=load(MODELS[trial.model])(CLASSES, CHANNELS, trial.image_size),
        dataset=TensorDataset(*resident_batch(trial)),
        loss=nn.functional.cross_entropy,
        optimizer=make_optimizer(trial),
        collate=identity,
        resident=True,
    )


def late_rank(trial: Trial) -> Workload:
    """Return a workload in which rank 1 starts each backward pass 20 ms late, because its device is kept busy."""
    return _late(sound(trial), trial, LATE_S)


def very_late_rank(trial: Trial) -> Workload:
    """Return a workload with a delay of 60 ms, for hosts on which other processes delay ranks by milliseconds."""
    return _late(sound(trial), trial, VERY_LATE_S)


def _late(workload: Workload, trial: Trial, late_s: float) -> Workload:
    sleep = CudaClock(torch.device("cuda")).hold if trial.device == "cuda" else time.sleep
    late = dist.is_initialized() and dist.get_rank() == LATE_RANK
    original = workload.loss
    assert original is not None

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if late:
            sleep(late_s)
        return original(outputs, targets)

    return replace(workload, loss=loss)


def language_model(trial: Trial) -> Workload:
    """Return the trial's own language model on one random batch, without a fault."""
    return build_workload(trial.but(workload=""), torch.device(trial.device))


def late_language_model(trial: Trial) -> Workload:
    """Return a workload in which rank 1 starts each backward pass 20 ms late, see `late_rank`."""
    return _late(language_model(trial), trial, LATE_S)


def slow_loader(trial: Trial) -> Workload:
    """Return a workload in which every batch takes 50 ms to load, on every rank."""
    return replace(sound(trial), dataset=SlowImages(trial), resident=False)


class SlowImages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One batch of random images on the host, returned after LOAD_S seconds for any number of indices."""

    def __init__(self, trial: Trial) -> None:
        self.batch = resident_batch(trial.but(device="cpu", interconnect="auto"))

    def __len__(self) -> int:
        return 1 << 20

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        time.sleep(LOAD_S)
        return self.batch
