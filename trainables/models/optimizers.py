"""Optimizers: torch's fused kernels for SGD and AdamW, and LARS and LAMB written with foreach operations.

Nothing here synchronises with the device. A learning rate may be a 0-d tensor on the device, so that a step captured as
a CUDA graph can change its rate between replays.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainables.registry import OPTIMIZERS, load
from trainables.trial import Trial

TRUST_COEFFICIENT = 0.001
"""eta of LARS: norm of a layer's update relative to the layer's norm, at a learning rate of 1 (You et al. 2017)"""

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8
"""Kingma and Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1"""

LAMB_EPSILON = 1e-6
"""from the code of You et al. 2019"""

Groups = list[dict[str, Any]]


def make_optimizer(trial: Trial) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function that creates the trial's optimizer for given parameters, at the trial's `learning_rate`.

    Without `decay_norm_and_bias`, one-dimensional parameters (batch normalisation and biases) form a separate group. It
    has no weight decay and, with LARS and LAMB, no trust ratio (Goyal et al. 2017, section 5.3; You et al. 2017).
    """
    return partial(load(OPTIMIZERS[trial.optimizer]), trial)


def sgd(trial: Trial, parameters: Iterable[nn.Parameter], *, nesterov: bool = False) -> torch.optim.Optimizer:
    """Create SGD with momentum in the form u = m u + g; w = w - rate u. Fused, except for fp16 weights on CPUs."""
    groups = _groups(trial, parameters)
    rate = _rate(trial, groups)
    # torch 2.11's fused CPU kernel applies only a small part of the update to fp16 weights
    fused = not any(p.dtype == torch.float16 and p.device.type == "cpu" for group in groups for p in group["params"])
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=trial.momentum, nesterov=nesterov, fused=fused)
    if trial.momentum:
        optimizer.register_step_pre_hook(_initialise_momentum)
    return optimizer


def _initialise_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not optimizer.state:
        zero_momentum(optimizer)


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Initialise SGD's momentum buffers with zeros, which does not change the first step.

    Otherwise torch's fused kernel allocates uninitialised memory, which stays so if a loss scaler skips the first step.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def nesterov(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create SGD with Nesterov momentum: the update is g + m u (Sutskever et al. 2013, in torch's form)."""
    return sgd(trial, parameters, nesterov=True)


def adamw(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""
    groups = _groups(trial, parameters)
    return torch.optim.AdamW(
        groups, lr=_rate(trial, groups), betas=ADAM_BETAS, eps=ADAM_EPSILON, fused=True, capturable=trial.captured
    )


def lars(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create `LARS`."""
    groups = _groups(trial, parameters)
    return LARS(groups, {"lr": _rate(trial, groups), "momentum": trial.momentum})


def lamb(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Create `LAMB`."""
    groups = _groups(trial, parameters)
    # capturable: torch then loads the step count of a checkpoint onto the device
    return LAMB(groups, {"lr": _rate(trial, groups), "capturable": True})


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters from the next step on. A tensor is overwritten in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def correct_momentum(optimizer: torch.optim.Optimizer, old: float, new: float) -> None:
    """Emulate uncorrected momentum (a trial without `momentum_correction`) for the next step, the first at rate `new`.

    SGD and LARS here keep u = m u + g and subtract rate * u. Other implementations keep v = m v + rate * g and subtract
    v, which is form (10) of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 3, remark 3). When the rate
    changes, v still holds gradients at the old rate unless m is multiplied by new / old. In terms of u = v / rate,
    omitting this correction multiplies u by old / new. Optimizers without momentum are not changed.
    """
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO's wrapper keeps this rank's share in `optim`
    buffers = [state["momentum_buffer"] for state in states if state.get("momentum_buffer") is not None]
    if buffers and old != new:
        torch._foreach_mul_(buffers, old / new)


def _groups(trial: Trial, parameters: Iterable[nn.Parameter]) -> Groups:
    """Return the group with weight decay, and the group without it if it is not empty."""
    all_params = list(parameters)
    if trial.decay_norm_and_bias:
        return [{"params": all_params, "weight_decay": trial.weight_decay, "trust": True}]
    matrices, vectors = [p for p in all_params if p.ndim > 1], [p for p in all_params if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": trial.weight_decay, "trust": True},
        {"params": vectors, "weight_decay": 0.0, "trust": False},
    ]
    return [group for group in groups if group["params"]]


def _rate(trial: Trial, groups: Groups) -> float | torch.Tensor:
    """Return the trial's learning rate, as a tensor if a CUDA graph reads it and it changes during training."""
    if not (trial.captured and trial.epochs):
        return trial.learning_rate
    return torch.tensor(trial.learning_rate, device=groups[0]["params"][0].device)


class _Layerwise(torch.optim.Optimizer):
    """Base of LARS and LAMB: unscales gradients, and skips non-finite steps without synchronising.

    A gradient scaler sets `grad_scale` and `found_inf` (0-d tensors), as for torch's fused optimizers. A step with
    non-finite gradients changes nothing: its contributions are multiplied by `live`, which is then 0.
    """

    def __init__(self, groups: Groups, defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self._step_supports_amp_scaling = True

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float | torch.Tensor]:
        """Return the unscaled gradients in fp32, and `live`: 1 if they are finite, 0 if the step must be skipped."""
        gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            gradients = list(torch._foreach_mul(gradients, scale.double().reciprocal().float()))
        if found_inf is None:
            return gradients, 1.0
        live = 1.0 - found_inf.reshape(())
        return [torch.where(live > 0, gradient, 0.0) for gradient in gradients], live

    def _buffers(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return a state buffer per parameter, initialised with zeros."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)
        return [self.state[parameter][name] for parameter in parameters]


def _apply(parameters: list[torch.Tensor], updates: Sequence[torch.Tensor], rate: Any, live: Any) -> None:
    moves = torch._foreach_mul(list(updates), rate * live)
    torch._foreach_sub_(parameters, moves)


def _norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of each tensor: [tensors]."""
    return torch.stack(torch._foreach_norm(list(tensors), 2))


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor, weights: torch.Tensor, updates: torch.Tensor) -> Any:
    """Return numerator / denominator per tensor, or 1 if the weight or the update is zero and could never change."""
    return torch.where((weights > 0) & (updates > 0), numerator / denominator, 1.0).unbind()


class LARS(_Layerwise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, https://arxiv.org/abs/1708.03888, algorithm 1).

    u = m u + lambda (g + decay w); w = w - rate u, with lambda = eta |w| / (|g| + decay |w|) per tensor w and eta =
    `TRUST_COEFFICIENT`. Without trust ratio lambda is 1. The paper keeps the rate inside u, which is equivalent as long
    as the rate is constant; see `correct_momentum`.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            updates, live = self._gradients(parameters)
            decay, momentum = group["weight_decay"], group["momentum"]
            weights = [parameter.float() for parameter in parameters]
            if group["trust"]:
                weight_norms, gradient_norms = _norms(weights), _norms(updates)
                layer_rate = _ratio(
                    TRUST_COEFFICIENT * weight_norms,
                    gradient_norms + decay * weight_norms,
                    weight_norms,
                    gradient_norms,
                )
            updates = list(torch._foreach_add(updates, weights, alpha=decay))
            if group["trust"]:
                torch._foreach_mul_(updates, layer_rate)
            buffers = self._buffers(parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, 1.0 - live * (1.0 - momentum))
            torch._foreach_add_(buffers, torch._foreach_mul(updates, live))
            _apply(parameters, buffers, group["lr"], live)


class LAMB(_Layerwise):
    """Layer-wise adaptive moments (You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2).

    With Adam's bias-corrected update r and phi(z) = z: w = w - rate |w| / |r + decay w| (r + decay w). Without trust
    ratio the factor |w| / |r + decay w| is 1.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = ADAM_BETAS
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients, live = self._gradients(parameters)
            means, squares = self._buffers(parameters, "exp_avg"), self._buffers(parameters, "exp_avg_sq")
            torch._foreach_mul_(means, 1.0 - live * (1.0 - first))
            torch._foreach_add_(means, torch._foreach_mul(gradients, live * (1.0 - first)))
            torch._foreach_mul_(squares, 1.0 - live * (1.0 - second))
            torch._foreach_add_(
                squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), live * (1.0 - second))
            )
            # one count per group, stored with its first parameter, on the device: a CUDA graph counts its replays
            state = self.state[parameters[0]]
            state["step"] = state.get("step", torch.zeros((), device=parameters[0].device)).add_(live)
            # fp64: 1 - 0.999 ** t loses four digits in fp32. clamp: a non-finite first step leaves the count at 0
            steps = state["step"].clamp(min=1.0).double()
            denominators = torch._foreach_sqrt(torch._foreach_div(squares, (1.0 - second**steps).float()))
            torch._foreach_add_(denominators, LAMB_EPSILON)
            updates = torch._foreach_div(torch._foreach_div(means, (1.0 - first**steps).float()), denominators)
            weights = [parameter.float() for parameter in parameters]
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            if group["trust"]:
                weight_norms, update_norms = _norms(weights), _norms(updates)
                torch._foreach_mul_(updates, _ratio(weight_norms, update_norms, weight_norms, update_norms))
            _apply(parameters, updates, group["lr"], live)
