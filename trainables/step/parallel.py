"""Parallel strategies: each wraps a model on its device and defines the parts of a step that it changes."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
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
from trainables.step.timing import StartPart
from trainables.trial import Trial

Group = dist.ProcessGroup | None
"""the ranks that average gradients; None: the default group"""

Prepare = Callable[[Any], Any]


def forward(model: nn.Module, prepare: Prepare, inputs: Any, start_part: StartPart) -> Any:
    """Return the model's output for a batch on its device."""
    start_part("forward")
    return model(prepare(inputs))


def replicated_optimizer(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """Create an optimizer with which each rank updates all weights."""
    return make(parameters)


@contextmanager
def ddp_no_sync(model: nn.Module) -> Iterator[None]:
    """Skip the all-reduce of DDP."""
    assert isinstance(model, DistributedDataParallel)
    with model.no_sync():
        yield


@dataclass(frozen=True)
class Strategy:
    """A parallel strategy: the model wrapper and the parts of a step that it replaces.

    wrap: (model on its device, trial, group) -> the model to train; broadcasts rank 0's weights.
    forward: (model, prepare, inputs, start_part) -> outputs.
    optimizer: creates the optimizer, as `replicated_optimizer` does.
    unsynchronised: context in which gradients are not averaged.
    reduce: (model, group, trial), communication after the backward pass.
    session: context of the complete trial. Collective.
    buckets: the wrapper is DistributedDataParallel, which reduces gradients in buckets during the backward pass.
    gradient_type: dtype in which the buckets are sent; None: unchanged.
    """

    wrap: Callable[[nn.Module, Trial, Group], nn.Module]
    forward: Callable[[nn.Module, Prepare, Any, StartPart], Any] = forward
    optimizer: Callable[[MakeOptimizer, list[nn.Parameter], Group], torch.optim.Optimizer] = replicated_optimizer
    unsynchronised: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    reduce: Callable[[nn.Module, Group, Trial], None] | None = None
    session: Callable[[Trial, Group], AbstractContextManager[Any]] = lambda trial, group: nullcontext()
    buckets: bool = False
    gradient_type: torch.dtype | None = None

    def wrap_model(self, model: nn.Module, trial: Trial, group: Group, *, compression: bool = True) -> nn.Module:
        """Wrap the model for training. Without `compression`, another communication hook can be registered."""
        model = self.wrap(model, trial, group)
        if self.gradient_type is not None and compression:
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(group or dist.group.WORLD, _COMPRESSION[self.gradient_type])
        return model


_COMPRESSION: dict[torch.dtype, Any] = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}
"""cast, divide by the number of ranks, all-reduce, cast back (PyTorch, "DDP Communication Hooks")"""


def _unwrapped(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    return model


def _over_devices(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    model.replicas = trial.world_size  # type: ignore[assignment]
    return model


def _ddp(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    device = next(model.parameters()).device
    sizes: dict[str, Any] = {"bucket_cap_mb": trial.bucket_mb}
    if trial.first_bucket_mb is not None:
        _require_bucket_sizes()
        sizes["bucket_cap_mb_list"] = [trial.first_bucket_mb, trial.bucket_mb]  # the last one is that of all others
    wrapped = DistributedDataParallel(
        with_sync_batch_norm(model, trial, group),
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        **sizes,
        gradient_as_bucket_view=trial.gradient_as_bucket_view,
        static_graph=trial.static_graph,
        find_unused_parameters=trial.find_unused_parameters,
    )
    wrapped.broadcast_buffers = trial.broadcast_buffers  # the constructor argument is deprecated in new versions
    return wrapped


def _require_bucket_sizes() -> None:
    """Raise ValueError if this version of torch has one size for all buckets of DDP."""
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        raise ValueError(f"first_bucket_mb requires a newer torch than {torch.__version__}; omit first_bucket_mb")


def with_sync_batch_norm(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    """Return the model, with synchronised batch normalisation if the trial asks for it."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(model, group) if trial.sync_batch_norm else model


class Delayed(nn.Module):
    """A replica whose gradients `reduce_after_backward` averages. Broadcasts buffers before each forward pass."""

    def __init__(self, model: nn.Module, trial: Trial, group: Group):
        super().__init__()
        self.module = with_sync_batch_norm(model, trial, group)
        self.group = group
        self.broadcast_buffers = trial.broadcast_buffers
        broadcast_from_rank0([*self.module.parameters(), *self.module.buffers()], group)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        if self.broadcast_buffers and self.training:
            broadcast_from_rank0(list(self.module.buffers()), self.group)
        return self.module(*inputs, **named_inputs)


@torch.no_grad()
def broadcast_from_rank0(tensors: list[torch.Tensor], group: Group) -> None:
    """Overwrite the tensors with rank 0's values, one message per dtype."""
    ranks: Any = group or dist.group.WORLD
    first = dist.get_global_rank(ranks, 0)
    for same in _by_type(tensors):
        flat = _flatten_dense_tensors(same)
        dist.broadcast(flat, src=first, group=group)
        torch._foreach_copy_(same, list(_unflatten_dense_tensors(flat, same)))


def reduce_after_backward(model: nn.Module, group: Group, trial: Trial) -> None:
    """Average all gradients over the ranks after the backward pass, `bucket_mb` MiB per message."""
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
    """Split the tensors, in the order of the backward pass (last first), into buckets of at most `limit_bytes`."""
    buckets: list[list[torch.Tensor]] = [[]]
    size_bytes = 0
    for tensor in reversed(tensors):
        if buckets[-1] and size_bytes + tensor.nbytes > limit_bytes:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(tensor)
        size_bytes += tensor.nbytes
    return buckets


def _sharded_optimizer(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """Create the optimizer of all parameters, then reduce each of its groups to this rank's share."""
    optimizer = make(parameters)

    def shard(shares: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for param_group, share in zip(optimizer.param_groups, shares, strict=True):
            param_group["params"] = share["params"]
        return optimizer

    groups = [{"params": param_group["params"]} for param_group in optimizer.param_groups]
    return ZeroRedundancyOptimizer(groups, optimizer_class=shard, process_group=group)  # type: ignore[arg-type]


def _fully_sharded(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    """Shard the model over all ranks."""
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, _device_type(model))  # type: ignore[arg-type]
    return _sharded_over(mesh, model, trial, group)


def _hybrid_sharded(model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    """Shard the model over consecutive ranks, and keep a copy of it in each such group of ranks."""
    mesh = _hybrid_mesh(group or dist.group.WORLD, trial.shard_group_ranks, _device_type(model))
    return _sharded_over(mesh, model, trial, group)


@cache
def _hybrid_mesh(group: Any, shard_ranks: int, device_type: str) -> DeviceMesh:
    """Return the mesh [copies, ranks of a copy] of the group's ranks. Collective over these ranks.

    A warm worker group keeps its process groups, because each one that it creates takes memory and time.
    """
    mesh = torch.tensor(dist.get_process_group_ranks(group)).view(-1, shard_ranks)
    name = f"{group.group_name} sharded over {shard_ranks}"
    rows = {"replicate": mesh.t().tolist(), "shard": mesh.tolist()}
    groups = [_group_of_this_rank(ranks, f"{name}, {dimension}") for dimension, ranks in rows.items()]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=tuple(rows))


def _group_of_this_rank(rows: list[list[int]], name: str) -> dist.ProcessGroup:
    """Create the process group of the row that contains this rank. Other ranks of the worker group do not take part.

    torch names groups after the number of groups that a rank has created so far. It differs between ranks that took
    part in different trials, which would then wait for one another forever.
    """
    [ranks] = [row for row in rows if dist.get_rank() in row]
    functions: Any = dist.distributed_c10d
    original = functions._process_group_name
    functions._process_group_name = lambda *_, **__: f"{name}, from rank {ranks[0]}"
    try:
        group = dist.new_group(ranks, use_local_synchronization=True)
    finally:
        functions._process_group_name = original
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def _sharded_over(mesh: DeviceMesh, model: nn.Module, trial: Trial, group: Group) -> nn.Module:
    """Shard the model. Each child of a Sequential or ModuleList is gathered separately, the rest with the root."""
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_from_rank0([tensor.data for tensor in tensors], group)
    model = with_sync_batch_norm(model, trial, group)
    for module in reversed(list(model.modules())):  # inner modules first
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for child in module.children():
                if any(True for _ in child.parameters()) and not isinstance(child, FSDPModule):
                    fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def _fused_if_sharded(make: MakeOptimizer, parameters: list[nn.Parameter], group: Group) -> torch.optim.Optimizer:
    """Create the optimizer, without its fused kernel if that does not support sharded tensors (torch 2.15).

    Adam's does. Without it the host took 79 of 157 ms for the update of GPT-2 124M on four H100 (one trial); with it
    4 to 7 of 88 ms (one trial, `benchmarks/results/sharding-4gpu`).
    """
    optimizer = make(parameters)
    if isinstance(optimizer, torch.optim.Adam):
        return optimizer
    for param_group in optimizer.param_groups:
        param_group.update({"fused": False} if param_group.get("fused") else {})
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
    """Return the GPU indices of a data-parallel model: its own and the following ones, `model.replicas` in total."""
    first = next(model.parameters()).device.index
    return list(range(first, first + int(model.replicas)))  # type: ignore[arg-type]


def forward_over_devices(model: nn.Module, prepare: Callable[[Any], Any], inputs: Any, start_part: StartPart) -> Any:
    """Compute the outputs of a batch on the first GPU as torch.nn.DataParallel does (Paszke et al. 2019).

    Repeats DataParallel's forward pass part by part, to time each: scatter the batch, broadcast the weights, run a
    replica on each GPU in a thread of its own, gather the outputs on the first GPU. In the backward pass, the broadcast
    of the weights becomes the sum of the replicas' gradients. It starts after all replicas and is the part `reduce`.
    """
    devices = device_indices(model)
    start_part("scatter")
    scattered = [
        _prepare_on(device, prepare, part) for part, device in zip(scatter(inputs, devices), devices, strict=False)
    ]
    start_part("replicate")
    replicas = replicate(model, devices[: len(scattered)])
    _before_gradient_sum(replicas, lambda: start_part("reduce"))
    start_part("forward")
    computing = [in_callers_autocast(replica, "cuda") for replica in replicas]
    outputs = parallel_apply(computing, [(part,) for part in scattered], None, devices[: len(scattered)])
    start_part("gather")
    return gather(outputs, devices[0])


def in_callers_autocast(function: Callable[..., Any], device_type: str) -> Any:
    """Return the function, bound to the caller's autocast state, to be run in any thread.

    Autocast state is per thread. `parallel_apply` passes on whether autocast is enabled, but not its dtype: its threads
    would compute in fp16 instead of bf16 (PyTorch, "Automatic Mixed Precision examples", DataParallel).
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def run(*args: Any) -> Any:
        with torch.autocast(device_type, dtype, enabled):
            return function(*args)

    return run


def _prepare_on(device: int, prepare: Callable[[Any], Any], part: Any) -> Any:
    with torch.cuda.device(device):
        return prepare(part)


def _before_gradient_sum(replicas: list[nn.Module], callback: Callable[[], None]) -> None:
    """Call `callback` in the backward pass, before the replicas' gradients are summed."""
    parameters: Iterator[dict[str, torch.Tensor]] = (
        vars(module)["_former_parameters"] for module in replicas[0].modules()
    )
    broadcast = next(weight for by_name in parameters for weight in by_name.values()).grad_fn
    if broadcast is not None:
        broadcast.register_prehook(lambda gradients: callback())


none = Strategy(_unwrapped)
"""the unwrapped model, the baseline for the overhead of DDP on one rank"""

dp = Strategy(_over_devices, forward=forward_over_devices)
"""torch's DataParallel: one process, one thread per GPU"""

ddp = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True)
"""DistributedDataParallel (Li et al. 2020, https://arxiv.org/abs/2006.15704): averages gradients in buckets during the
backward pass"""

ddp_fp16 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, gradient_type=torch.float16)
ddp_bf16 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, gradient_type=torch.bfloat16)

ddp_delayed = Strategy(Delayed, reduce=reduce_after_backward)
"""all communication after the backward pass, without overlap (delay_allreduce in Apex)"""

zero1 = Strategy(_ddp, unsynchronised=ddp_no_sync, buckets=True, optimizer=_sharded_optimizer)
"""DDP with sharded optimizer state (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stage 1): each rank
updates its share of the weights and sends it to the others"""

fsdp2 = Strategy(_fully_sharded, unsynchronised=_fsdp_no_sync, optimizer=_fused_if_sharded)
"""sharded weights, gradients and optimizer state (PyTorch, torch.distributed.fsdp.fully_shard)"""

hsdp = Strategy(_hybrid_sharded, unsynchronised=_fsdp_no_sync, optimizer=_fused_if_sharded)
"""hybrid sharding: as fsdp2 within groups of ranks, over which gradients are then averaged (Zhao et al. 2023,
https://arxiv.org/abs/2304.11277, section 3.2.2)"""
