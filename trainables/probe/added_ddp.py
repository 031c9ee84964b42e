"""Make a script for one GPU data-parallel without changing it: put the modules that its loop calls into DDP."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

SEARCHED_STEPS = 2
"""steps in which modules are found; the probe's own search starts after them (`job.MIN_WARMUP_STEPS`)"""


class NotDataParallel(RuntimeError):
    """The ranks of the script cannot be made one data-parallel training."""


class _Added:
    """A module whose calls pass through DDP, which calls it in turn."""

    def __init__(self, module: nn.Module, ids: set[int]) -> None:
        self.module = module
        self.ids = ids
        """of its parameters with gradients"""

        # until it is known whether a step uses all parameters
        self.ddp = DistributedDataParallel(module, find_unused_parameters=True)
        self._own = module._compiled_call_impl or module._call_impl
        self._is_inside = False
        # not as an ordinary attribute, which `torch.compile`'s modules would set on the module that they contain
        object.__setattr__(module, "_compiled_call_impl", self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return self._own(*args, **kwargs)
        self._is_inside = True
        try:
            return self.ddp(*args, **kwargs)
        finally:
            self._is_inside = False

    def expect_all_gradients(self) -> None:
        """Stop searching for unused parameters in each step. Collective."""
        del self.ddp  # its hooks on the parameters end with it
        self.ddp = DistributedDataParallel(self.module)


class AddedDdp:
    """Put each module that the loop calls itself, and that learns, into DDP when it is called for the first time.

    The script's own objects stay what they are: only the call of a module passes through DDP, which averages the
    gradients of its parameters during the backward pass. The process group is that of torchrun's environment variables.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._added: list[_Added] = []
        self._with_gradient: set[int] = set()
        """ids of the parameters that had a gradient when an optimizer was called"""

        self._is_inside = False
        self._restore: list[Callable[[], None]] = []

    def install(self) -> None:
        """Watch the calls of modules and of optimizers until `end_search`."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.compiler.is_compiling() or threading.get_ident() != self.thread:
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                if torch.is_grad_enabled():
                    self._add_to(module)
                return original(module, *args, **kwargs)
            finally:
                self._is_inside = False

        nn.Module.__call__ = call  # type: ignore[method-assign]
        self._restore.append(lambda: setattr(nn.Module, "__call__", original))
        self._restore.append(register_optimizer_step_pre_hook(self._check).remove)

    def end_search(self) -> None:
        """Remove what watches. The modules that were found stay in DDP. Collective when called for the first time."""
        if not self._restore:
            return
        while self._restore:
            self._restore.pop()()
        for added in self._added:
            if added.ids <= self._with_gradient:
                added.expect_all_gradients()

    @property
    def _covered(self) -> set[int]:
        return {key for added in self._added for key in added.ids}

    def _add_to(self, module: nn.Module) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        ids = set(map(id, parameters))
        if not ids or ids & self._covered:
            return
        if not self._added:
            _start_group(parameters[0].device)
        self._added.append(_Added(module, ids))

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step with gradients that were not averaged, as after calls of a module's methods or functions."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        updated = {id(parameter) for parameter in parameters if parameter.grad is not None}
        if alone := updated - self._covered:
            raise NotDataParallel(
                f"--add-ddp: {len(alone)} parameters have gradients, but are in no module that the loop calls as "
                "`module(inputs)`; put the model into DistributedDataParallel in the script"
            )
        modules = [parameter for added in self._added for parameter in added.module.parameters()]
        self._with_gradient |= {id(parameter) for parameter in modules if parameter.grad is not None}

    _check._torchdynamo_disable = True  # type: ignore[attr-defined] # not part of a compiled optimizer step


def _start_group(device: torch.device) -> None:
    if dist.is_initialized():
        raise NotDataParallel("--add-ddp: the script has a process group of its own; leave the option out")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
