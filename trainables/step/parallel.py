"""How ranks share the work: a strategy wraps a model on its device, and says what else of a step it changes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel, gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter

from trainables.step.precision import MakeOptimizer
from trainables.step.timing import Begin
from trainables.trial import Trial

Group = dist.ProcessGroup | None
"""the ranks that average gradients; None: the default group"""

Prepare = Callable[[Any], Any]


def forward(model: nn.Module, prepare: Prepare, inputs: Any, begin: Begin) -> Any:
    """The model's output for a batch on its device."""
    begin("forward")
    return model(prepare(inputs))


def own_optimizer(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """Each rank updates all weights."""
    return make(parameters)


@contextmanager
def ddp_no_sync(model: nn.Module) -> Iterator[None]:
    """DDP's own way to leave the all-reduce out."""
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        yield


@dataclass(frozen=True)
class Strategy:
    """What a parallel strategy makes of a step.

    wrap: (model on its device, trial, group) -> the model to train; made anew, it gives every rank rank 0's weights.
    forward: (model, prepare, inputs, begin) -> outputs. optimizer: see `own_optimizer`. unsynchronised: the context in
    which gradients stay the rank's own. reduce: (model, group, trial), communication after the backward pass.
    buckets: the wrapped model is DistributedDataParallel, which reduces gradients in buckets while the backward pass
    runs. gradient_type: what those are sent as; None: as they are.
    """

    wrap: Callable[[nn.Module, Trial, Group], nn.Module]
    forward: Callable[[nn.Module, Prepare, Any, Begin], Any] = forward
    optimizer: Callable[[MakeOptimizer, list[nn.Parameter], Group], torch.optim.Optimizer] = own_optimizer
    unsynchronised: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    reduce: Callable[[nn.Module, Group, Trial], None] | None = None
    buckets: bool = False
    gradient_type: torch.dtype | None = None

    def wrapped(self, model: nn.Module, trial: Trial, group: Group, *, bare: bool = False) -> nn.Module:
        """The model to train. `bare`: without the strategy's own communication hook, for one that an account brings."""
        model = self.wrap(model, trial, group)
        if self.gradient_type is not None and not bare:
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(group or dist.group.WORLD, _COMPRESSION[self.gradient_type])
        return model


_COMPRESSION: dict[torch.dtype, Any] = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}
"""PyTorch, "DDP Communication Hooks": cast, divide by the number of ranks, all-reduce, cast back"""


def _as_it_is(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    return model


def _over_devices(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    model.replicas = trial.world_size  # type: ignore[assignment]
    return model


def _ddp(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        _normalised_over_ranks(model, trial, group),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=trial.bucket_mb,
        gradient_as_bucket_view=trial.gradient_as_bucket_view,
        static_graph=trial.static_graph,
    )
    wrapped.broadcast_buffers = trial.broadcast_buffers  # the argument of this name warns in new versions
    return wrapped


def _normalised_over_ranks(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, group) if trial.sync_batch_norm else model


class Delayed(nn.Module):
    """A replica whose gradients stay its own until `reduce_after_backward`; buffers are rank 0's before each forward."""

    def __init__(self, model: nn.Module, trial: Trial, group: Group):
        super().__init__()
        self.module = _normalised_over_ranks(model, trial, group)
        self.group = group
        self.broadcast_buffers = trial.broadcast_buffers
        broadcast_from_first([*self.module.parameters(), *self.module.buffers()], group)

    def forward(self, *inputs: Any) -> Any:
        if self.broadcast_buffers and self.training:
            broadcast_from_first(list(self.module.buffers()), self.group)
        return self.module(*inputs)


@torch.no_grad()
def broadcast_from_first(tensors: list[torch.Tensor], group: Group) -> None:
    """Rank 0's values for all ranks, one message for each type."""
    ranks: Any = group or dist.group.WORLD
    first = dist.get_global_rank(ranks, 0)
    for same in _by_type(tensors):
        flat = _flatten_dense_tensors(same)
        dist.broadcast(flat, src=first, group=group)
        torch._foreach_copy_(same, list(_unflatten_dense_tensors(flat, same)))


def reduce_after_backward(model: nn.Module, group: Group, trial: Trial) -> None:
    """Averages all gradients over the ranks, `bucket_mb` of them in a message, once the backward pass has been issued."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    count = dist.get_world_size(group)
    for same in _by_type(gradients):
        for bucket in _in_buckets(same, trial.bucket_mb * 2**20):
            flat = _flatten_dense_tensors(bucket).div_(count)
            dist.all_reduce(flat, group=group)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))


def _by_type(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]


def _in_buckets(tensors: list[torch.Tensor], limit_bytes: float) -> list[list[torch.Tensor]]:
    """Tensors in the order of the backward pass, the last first, so many that a bucket holds the limit at most."""
    buckets: list[list[torch.Tensor]] = [[]]
    held = 0
    for tensor in reversed(tensors):
        if buckets[-1] and held + tensor.nbytes > limit_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(tensor)
        held += tensor.nbytes
    return buckets


def _sharded_optimizer(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """The optimizer of all parameters, left with this rank's share of each of its groups."""
    optimizer = make(parameters)

    def shard(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for held, share in zip(optimizer.param_groups, groups, strict=True):
            held["params"] = share["params"]
        return optimizer

    divided = [{"params": held["params"]} for held in optimizer.param_groups]
    return ZeroRedundancyOptimizer(divided, optimizer_class=shard, process_group=group)  # type: ignore[arg-type]


def _fully_sharded(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    """Each child of a Sequential or ModuleList is gathered by itself, and what is left over with the root."""
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_from_first([tensor.data for tensor in tensors], group)
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, next(model.parameters()).device.type)  # type: ignore[arg-type]
    model = _normalised_over_ranks(model, trial, group)
    for module in reversed(list(model.modules())):  # what lies inside is sharded before what holds it
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for child in module.children():
                if any(True for _ in child.parameters()) and not isinstance(child, FSDPModule):
                    fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def _without_fused_kernel(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """The optimizer without its fused kernel, which knows no sharded tensors (torch 2.15)."""
    optimizer = make(parameters)
    for held in optimizer.param_groups:
        held.update({"fused": False} if held.get("fused") else {})
    vars(optimizer).pop("_step_supports_amp_scaling", None)
    return optimizer


@contextmanager
def _fsdp_no_sync(model: nn.Module) -> Iterator[None]:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def device_indices(model: nn.Module) -> list[int]:
    """The GPUs of a data-parallel model: its own and those after it, `model.replicas` of them."""
    first = next(model.parameters()).device.index
    return list(range(first, first + int(model.replicas)))  # type: ignore[arg-type]


def forward_over_devices(model: nn.Module, prepare: Callable[[Any], Any], inputs: Any, begin: Begin) -> Any:
    """The outputs for a batch on the first GPU, gathered there, as torch.nn.DataParallel computes them (Paszke et al. 2019).

    DataParallel's forward pass in its parts, so that each can be timed: one process, k GPUs, a thread a replica.
    Scatter the batch, broadcast the weights, run a replica on each GPU in a thread of its own, gather the outputs. In the
    backward pass the weights' broadcast turns into the sum of the replicas' gradients, which begins when all replicas are
    done: that is the part `reduce`.
    """
    devices = device_indices(model)
    begin("scatter")
    scattered = [
        _prepared(prepare, part, device) for part, device in zip(scatter(inputs, devices), devices, strict=False)
    ]
    begin("replicate")
    replicas = replicate(model, devices[: len(scattered)])
    _when_gradients_are_summed(replicas, lambda: begin("reduce"))
    begin("forward")
    computing = [in_callers_autocast(replica, "cuda") for replica in replicas]
    outputs = parallel_apply(computing, [(part,) for part in scattered], None, devices[: len(scattered)])
    begin("gather")
    return gather(outputs, devices[0])


def in_callers_autocast(function: Callable[..., Any], device_type: str) -> Any:
    """The function, in whichever thread it runs, under the autocast of the thread that calls this.

    Autocast's state is a thread's own. `parallel_apply` hands on whether it is on, but not its type: its threads would
    compute in fp16 where bf16 was asked for (PyTorch, "Automatic Mixed Precision examples", DataParallel).
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def run(*given: Any) -> Any:
        with torch.autocast(device_type, dtype, enabled):
            return function(*given)

    return run


def _prepared(prepare: Callable[[Any], Any], part: Any, device: int) -> Any:
    with torch.cuda.device(device):
        return prepare(part)


def _when_gradients_are_summed(replicas: list[nn.Module], tell: Callable[[], None]) -> None:
    formers: Iterator[dict[str, torch.Tensor]] = (
        vars(module)["_former_parameters"] for module in replicas[0].modules()
    )
    broadcast = next(weight for former in formers for weight in former.values()).grad_fn
    if broadcast is not None:
        broadcast.register_prehook(lambda gradients: tell())


none = Strategy(_as_it_is)
"""the bare model: the baseline that shows what DDP itself costs on one rank"""

dp = Strategy(_over_devices, forward=forward_over_devices)
"""torch's DataParallel: one process, a thread a GPU"""

ddp = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True)
"""DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704): gradients are averaged while the backward
pass runs, in buckets"""

ddp_fp16 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, gradient_type=torch.float16)
ddp_bf16 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, gradient_type=torch.bfloat16)

ddp_delayed = Strategy(Delayed, reduce=reduce_after_backward)
"""all communication after the backward pass, hidden behind nothing; Apex calls it delay_allreduce"""

zero1 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, optimizer=_sharded_optimizer)
"""DDP with the optimizer's state divided among the ranks (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054,
stage 1): each updates its share of the weights and sends it to the others"""

fsdp2 = Strategy(_fully_sharded, unsynchronised=_fsdp_no_sync, optimizer=_without_fused_kernel)
"""weights, gradients and optimizer state divided among the ranks (PyTorch, torch.distributed.fsdp.fully_shard)"""
