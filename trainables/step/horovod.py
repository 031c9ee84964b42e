"""Horovod as a parallel strategy: a thread of its own averages gradients during the backward pass.

Sergeev and Del Balso 2018, https://arxiv.org/abs/1802.05799. The ranks are those of any other strategy. Only their
gradients go through Horovod, in the way of its DistributedOptimizer. `scripts/build_horovod.py` installs it.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from trainables.scratch import variables_set
from trainables.step.parallel import Group, Strategy, broadcast_from_rank0, with_sync_batch_norm
from trainables.trial import Trial


class Averaged(nn.Module):
    """A replica that hands each gradient to Horovod as soon as the backward pass has computed it."""

    def __init__(self, model: nn.Module, trial: Trial, group: Group):
        super().__init__()
        self.module = with_sync_batch_norm(model, trial, group)
        self.horovod = _horovod()
        self.active = True
        self.pending: list[Any] = []
        broadcast_from_rank0([*self.module.parameters(), *self.module.buffers()], group)
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._send, name))

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        return self.module(*inputs, **named_inputs)

    def _send(self, name: str, parameter: torch.Tensor) -> None:
        if self.active:
            handle = self.horovod.allreduce_async_(parameter.grad, name=name, op=self.horovod.Average)
            self.pending.append(handle)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank."""
        self.active = False
        try:
            yield
        finally:
            self.active = True


def _await(model: nn.Module, group: Group, trial: Trial) -> None:
    """Wait until all gradients are averaged."""
    assert isinstance(model, Averaged)
    for handle in model.pending:
        model.horovod.synchronize(handle)
    model.pending.clear()


def _no_sync(model: nn.Module) -> AbstractContextManager[None]:
    assert isinstance(model, Averaged)
    return model.no_sync()


@contextmanager
def running(trial: Trial, group: Group) -> Iterator[None]:
    """Run Horovod among the ranks of `group` (None: the default group). Collective.

    Rank 0 serves the addresses over which they find each other, as `horovodrun` does.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    address, interface = _own_address()
    hosts: list[Any] = [None] * ranks
    dist.all_gather_object(hosts, (address, socket.gethostname()), group=group)
    names = [name for _, name in hosts]
    plan = get_host_assignments([HostInfo(name, names.count(name)) for name in dict.fromkeys(names)], ranks)
    slot = [slot for slot in plan if slot.hostname == names[rank]][names[:rank].count(names[rank])]
    with ExitStack() as ends:
        port = [0]
        if rank == 0:
            server = RendezvousServer()
            port = [server.start()]
            ends.callback(server.stop)
            server.init(plan)
        ranks_of_trial: Any = group or dist.group.WORLD
        dist.broadcast_object_list(port, src=dist.get_global_rank(ranks_of_trial, 0), group=group)
        settings = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0][0],
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port[0]),
            "HOROVOD_GLOO_IFACE": interface,
            "HOROVOD_FUSION_THRESHOLD": str(int(trial.bucket_mb * 2**20)),
            **{f"HOROVOD_{name.upper()}": str(value) for name, value in vars(slot).items()},
        }
        ends.enter_context(variables_set(settings))
        _horovod().init()
        ends.callback(_horovod().shutdown)
        yield


def _horovod() -> Any:
    """Return the package, which is imported only where a trial uses it."""
    import horovod.torch

    return horovod.torch


def _own_address() -> tuple[str, str]:
    """Return the IPv4 address from which this process reaches the first rank, and the interface that has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        address = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return address, next(name for name, entries in interfaces if any(entry.address == address for entry in entries))


horovod = Strategy(Averaged, unsynchronised=_no_sync, reduce=_await, session=running)
