"""torch.nn.DataParallel's forward pass in its parts, so that each can be timed (Paszke et al. 2019; PyTorch,
torch.nn.DataParallel): one process, k GPUs, a thread a replica."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter

from trainables.timing import Begin


def device_indices(model: nn.Module) -> list[int]:
    """The GPUs of a data-parallel model: its own and those after it, `model.replicas` of them."""
    first = next(model.parameters()).device.index
    return list(range(first, first + int(model.replicas)))  # type: ignore[arg-type]


def forward_over_devices(model: nn.Module, prepare: Callable[[Any], Any], inputs: Any, begin: Begin) -> Any:
    """The outputs for a batch on the first GPU, gathered there, as DataParallel computes them.

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
