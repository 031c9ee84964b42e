"""The training as a workload."""

import torch
from torch.utils.data import TensorDataset

from benchmarks.harness.doors.training import ModelWithLoss, optimizer_of, resident_batch
from trainables.data.loader import device_of
from trainables.trial import Trial
from trainables.workload import Workload


def resnet50(trial: Trial) -> Workload:
    """Return ResNet-50 with one resident batch."""
    return _workload(trial, "resnet50", bf16=True)


def vit_b_16(trial: Trial) -> Workload:
    """Return a vision transformer with one resident batch."""
    return _workload(trial, "vit_b_16", bf16=True)


def resnet18_fp32(trial: Trial) -> Workload:
    """Return ResNet-18 in fp32, the small form for CPU ranks."""
    return _workload(trial, "resnet18", bf16=False)


def _workload(trial: Trial, model: str, bf16: bool) -> Workload:
    torch.manual_seed(0)
    return Workload(
        model=ModelWithLoss(model, bf16),
        step=lambda model, batch: model(*batch),
        dataset=TensorDataset(*resident_batch(trial.batch_per_gpu, trial.image_size, device_of(trial))),
        resident=True,
        optimizer=optimizer_of,
    )
