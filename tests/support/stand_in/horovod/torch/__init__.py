"""Asynchronous averages of named tensors, each reported once per name, as in Horovod."""

import os
from typing import Any

import torch
import torch.distributed as dist

Average = "average"
settings: list[dict[str, str]] = []
"""the environment of each `init`"""

_running = False
_in_work: set[str] = set()


def init() -> None:
    global _running
    assert not _running
    settings.append({name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")})
    _running = True


def shutdown() -> None:
    global _running
    _running = False
    _in_work.clear()


def allreduce_async_(tensor: torch.Tensor, name: str, op: str) -> Any:
    assert _running
    assert op == Average
    assert name not in _in_work, f"{name} is being averaged already"
    _in_work.add(name)
    return name, tensor, dist.all_reduce(tensor, async_op=True)


def synchronize(handle: Any) -> None:
    name, tensor, work = handle
    work.wait()
    tensor.div_(dist.get_world_size())
    _in_work.remove(name)
