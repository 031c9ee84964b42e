"""How ranks share the work: functions `(model on its device, process group) -> model to train`."""

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def none(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """The bare model: the baseline that shows what DDP itself costs on one rank."""
    return model


def ddp(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """DistributedDataParallel with its own defaults (Li et al. 2020, https://arxiv.org/abs/2006.15704).

    Gradients are averaged over `group` while the backward pass runs, in buckets of 25 MiB.
    """
    device = next(model.parameters()).device
    device_ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group)
