"""Number formats of a training step: dtypes of weights and arithmetic, master weights and loss scaling.

The names follow Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740) and the levels O1 to O3 of NVIDIA's Apex.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.batch import map_tensors

INITIAL_LOSS_SCALE = 65536.0
"""before the first step (default of torch.amp.GradScaler)"""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class Precision:
    """The number formats of a step.

    autocast: dtype of autocast; None: disabled. fp32_arithmetic: internal precision of fp32 matrix products and
    convolutions, "ieee" or "tf32" as in torch.backends. parameters: dtype of weights and gradients; None: fp32.
    master_weights: keep batch normalisation in fp32, and let the optimizer update fp32 copies of all weights.
    fp8_linear: linear layers compute their products in fp8, see `convert_linear_layers`.
    loss_scaling: multiply the loss before the backward pass. If a gradient is not finite, skip the step and halve the
    factor.
    """

    autocast: torch.dtype | None = None
    fp32_arithmetic: str = "ieee"
    parameters: torch.dtype | None = None
    master_weights: bool = False
    loss_scaling: bool = False
    fp8_linear: bool = False


fp32 = Precision()
tf32 = Precision(fp32_arithmetic="tf32")
bf16 = Precision(autocast=torch.bfloat16)
fp16 = Precision(autocast=torch.float16, loss_scaling=True)
"""Apex's O1"""
fp16_master = Precision(parameters=torch.float16, master_weights=True, loss_scaling=True)
"""Apex's O2"""
bf16_master = Precision(parameters=torch.bfloat16, master_weights=True)
"""as O2, in bf16, whose range needs no loss scaling"""
fp16_pure = Precision(parameters=torch.float16)
"""Apex's O3: fast, but does not train every model"""
fp8 = Precision(autocast=torch.bfloat16, fp8_linear=True)
"""bf16 autocast with linear layers in fp8 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433)"""

FP8_MULTIPLE = 16
"""Sizes that fp8 products require of their matrices (torch._scaled_mm)."""

FP8_CAPABILITY = (8, 9)
"""Least compute capability of GPUs with fp8 products (CUDA C++ Programming Guide, compute capability 8.9)."""


def has_fp8(device: torch.device) -> bool:
    """Return True if the device multiplies matrices in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def unmet_by(precision: Precision, device: torch.device) -> str | None:
    """Return why a trial cannot run on this device in this precision; None if it can."""
    if not precision.fp8_linear or has_fp8(device):
        return None
    least = ".".join(map(str, FP8_CAPABILITY))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    return f"precision 'fp8' requires a GPU of compute capability {least} or newer, but this device is {name}"


def convert_linear_layers(model: nn.Module, emulate: bool = False) -> nn.Module:
    """Let the model's linear layers multiply in fp8, by torchao. Returns the model.

    Inputs and weights are scaled by their largest element and rounded to float8_e4m3, gradients to float8_e5m2; sums
    are in fp32. The weights themselves stay as they are. The last linear layer, whose output is compared with the
    target, and layers whose sizes are no multiple of 16 compute as without fp8. emulate: round, but multiply in fp32,
    on any device.
    """
    float8: Any = import_module("torchao.float8")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def is_converted(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        sizes = (module.in_features, module.out_features)
        return name != linear[-1] and all(size % FP8_MULTIPLE == 0 for size in sizes)

    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)  # for batches that are no multiple
    converted: nn.Module = float8.convert_to_float8_training(model, module_filter_fn=is_converted, config=config)
    return converted


def cast_model(model: nn.Module, precision: Precision) -> nn.Module:
    """Convert the model's weights to the precision's dtype, or its linear layers to fp8."""
    if precision.fp8_linear:
        return convert_linear_layers(model)
    if precision.parameters is None:
        return model
    model = model.to(precision.parameters)
    if precision.master_weights:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()
    return model


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert the floating-point tensors of a batch to `dtype`. None: do nothing."""
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the autocast context of the precision."""
    return torch.autocast(device.type, precision.autocast) if precision.autocast else nullcontext()


class Updater:
    """The optimizer part of a step: scales the loss and updates the weights from the gradients.

    It does not synchronise with the device if the optimizer unscales gradients itself, as torch's fused ones do.
    `make_scheduler` creates the learning rate schedule of a user's workload, which takes a step per update.
    """

    def __init__(
        self,
        precision: Precision,
        make: MakeOptimizer,
        parameters: Iterable[nn.Parameter],
        device_type: str,
        make_scheduler: MakeScheduler | None = None,
    ):
        self.parameters: list[torch.Tensor] = list(parameters)
        self.masters: list[torch.Tensor] = []
        if precision.master_weights:
            self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self.parameters]
        self.optimizer = make(self.masters or self.parameters)  # type: ignore[arg-type]
        self.scaler = (
            torch.amp.GradScaler(device_type, init_scale=INITIAL_LOSS_SCALE) if precision.loss_scaling else None
        )
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self._masters_have_gradients = False

    @property
    def local_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer with this rank's state. ZeRO's wrapper keeps it in `optim`."""
        return getattr(self.optimizer, "optim", self.optimizer)

    @property
    def scale(self) -> torch.Tensor | None:
        """The loss scale, on the device. None without a scaler, or before the first loss."""
        return self.scaler._scale if self.scaler else None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss, from which the backward pass starts."""
        return self.scaler.scale(loss) if self.scaler else loss

    def unscale(self) -> None:
        """Remove the loss scale from the gradients before `update`, for code that reads or changes them.

        With master weights, the parameters' gradients become those of the masters, in fp32.
        """
        self._fill_masters()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        for parameter, master in zip(self.parameters, self.masters, strict=False):
            parameter.grad_dtype = None  # allows a gradient of another dtype
            parameter.grad = master.grad

    def _fill_masters(self) -> None:
        if not self._masters_have_gradients:
            for parameter, master in zip(self.parameters, self.masters, strict=False):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        self._masters_have_gradients = True

    def update(self) -> torch.Tensor | None:
        """Take an optimizer step and set gradients to None.

        Returns the loss scale after the step, on the device. None without a scaler.
        """
        self._fill_masters()
        self._masters_have_gradients = False
        scale = None
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scale = self.scaler._scale.clone()  # type: ignore[union-attr]
        else:
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        if self.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            for parameter in self.parameters:
                parameter.grad = None
        return scale
