"""What turns gradients into updates: torch's own kernels where it has them, LARS and LAMB in whole-list operations.

Nothing here waits for the device, and a learning rate may be a 0-d tensor on it, so that a step can be captured as a
CUDA graph whose rate changes between replays.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainables.registry import OPTIMIZERS, load
from trainables.trial import Trial

TRUST_COEFFICIENT = 0.001
"""eta of LARS: how far one update may move a layer, as a share of its norm, at a learning rate of 1 (You et al. 2017)"""

ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8
"""Kingma and Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1"""

LAMB_EPSILON = 1e-6
"""You et al. 2019, in the authors' code"""

Groups = list[dict[str, Any]]


def make_optimizer(trial: Trial) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The function that gives these parameters the trial's optimizer, at its `learning_rate`.

    Without `decay_norm_and_bias`, parameters of one dimension (batch normalisation and biases) are a group of their own,
    without weight decay, and with LARS and LAMB without a trust ratio (Goyal et al. 2017, section 5.3; You et al. 2017).
    """
    return partial(load(OPTIMIZERS[trial.optimizer]), trial)


def sgd(trial: Trial, parameters: Iterable[nn.Parameter], *, nesterov: bool = False) -> torch.optim.Optimizer:
    """SGD with momentum in the form u = m u + g; w = w - rate u; one fused kernel for all parameters, but for fp16 on CPUs."""
    groups = _groups(trial, parameters)
    rate = _rate(trial, groups)
    # torch 2.11's fused kernel for CPUs moves fp16 weights by a small part of their update
    fused = not any(p.dtype == torch.float16 and p.device.type == "cpu" for group in groups for p in group["params"])
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=trial.momentum, nesterov=nesterov, fused=fused)
    if trial.momentum:
        optimizer.register_step_pre_hook(_begin_momentum)
    return optimizer


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not optimizer.state:
        zero_momentum(optimizer)


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """SGD's momentum begins at zero, which makes the first step what it is without.

    torch's fused kernel else begins with memory that nothing was written to, and leaves it so where a loss scaler leaves
    out the first step.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def nesterov(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD that looks ahead: its update is g + m u (Sutskever et al. 2013, in torch's form)."""
    return sgd(trial, parameters, nesterov=True)


def adamw(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""
    groups = _groups(trial, parameters)
    return torch.optim.AdamW(
        groups, lr=_rate(trial, groups), betas=ADAM_BETAS, eps=ADAM_EPSILON, fused=True, capturable=trial.captured
    )


def lars(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """See `LARS`."""
    groups = _groups(trial, parameters)
    return LARS(groups, {"lr": _rate(trial, groups), "momentum": trial.momentum})


def lamb(trial: Trial, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """See `LAMB`."""
    groups = _groups(trial, parameters)
    # capturable: a count of steps that is loaded from a checkpoint goes to the device
    return LAMB(groups, {"lr": _rate(trial, groups), "capturable": True})


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of all parameters from the next step on; a rate that is a tensor is overwritten where it lies."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def correct_momentum(optimizer: torch.optim.Optimizer, old: float, new: float) -> None:
    """Makes the coming step, the first at rate `new`, what it is where the rate is part of the momentum and not corrected.

    SGD and LARS here keep u = m u + g and take rate * u. Other codes keep v = m v + rate * g and take v: form (10) of
    Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 3, remark 3). Where the rate changes, v then holds
    gradients at the old rate unless m is corrected by new / old. In terms of u = v / rate, leaving that out multiplies
    what is remembered by old / new. For a trial without `momentum_correction`; optimizers without momentum stay as they
    are.
    """
    states = getattr(optimizer, "optim", optimizer).state.values()  # ZeRO's wrapper keeps its share of them in `optim`
    buffers = [state["momentum_buffer"] for state in states if state.get("momentum_buffer") is not None]
    if buffers and old != new:
        torch._foreach_mul_(buffers, old / new)


def _groups(trial: Trial, parameters: Iterable[nn.Parameter]) -> Groups:
    """Parameters with weight decay, and those without it if there are any."""
    held = list(parameters)
    if trial.decay_norm_and_bias:
        return [{"params": held, "weight_decay": trial.weight_decay, "trust": True}]
    divided = [p for p in held if p.ndim > 1], [p for p in held if p.ndim <= 1]
    options = {"weight_decay": trial.weight_decay, "trust": True}, {"weight_decay": 0.0, "trust": False}
    return [{"params": part, **given} for part, given in zip(divided, options, strict=True) if part]


def _rate(trial: Trial, groups: Groups) -> float | torch.Tensor:
    """The trial's rate; a tensor where it is read by a CUDA graph and changes from epoch to epoch."""
    if not (trial.captured and trial.epochs):
        return trial.learning_rate
    return torch.tensor(trial.learning_rate, device=groups[0]["params"][0].device)


class _Layerwise(torch.optim.Optimizer):
    """What LARS and LAMB share: lists of gradients, norms per tensor, and a loss scaler's verdict without waiting for it.

    A gradient scaler leaves `grad_scale` and `found_inf` here (0-d tensors), as it does for torch's fused optimizers; a
    step that is not finite then changes nothing: what it adds is multiplied by `live`, which is 0, and what it keeps is
    kept in full.
    """

    def __init__(self, groups: Groups, defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        self._step_supports_amp_scaling = True

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], float | torch.Tensor]:
        """Gradients in fp32, unscaled, and `live`: 1 where they are finite, 0 where the step is to change nothing."""
        gradients = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            gradients = list(torch._foreach_mul(gradients, scale.double().reciprocal().float()))
        if found_inf is None:
            return gradients, 1.0
        live = 1.0 - found_inf.reshape(())
        return [torch.where(live > 0, gradient, 0.0) for gradient in gradients], live

    def _kept(self, parameters: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """A buffer of each parameter, zero before its first step."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)
        return [self.state[parameter][name] for parameter in parameters]


def _apply(parameters: list[torch.Tensor], updates: Sequence[torch.Tensor], rate: Any, live: Any) -> None:
    moves = torch._foreach_mul(list(updates), rate * live)
    torch._foreach_sub_(parameters, moves)


def _norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """L2 norm of each tensor: [tensors]."""
    return torch.stack(torch._foreach_norm(list(tensors), 2))


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor, weights: torch.Tensor, updates: torch.Tensor) -> Any:
    """numerator / denominator for each tensor, and 1 where a weight or an update is zero: it could never leave it else."""
    return torch.where((weights > 0) & (updates > 0), numerator / denominator, 1.0).unbind()


class LARS(_Layerwise):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, https://arxiv.org/abs/1708.03888, algorithm 1).

    u = m u + lambda (g + decay w); w = w - rate u, with lambda = eta |w| / (|g| + decay |w|) of the tensor w and eta =
    `TRUST_COEFFICIENT`; without trust ratio lambda is 1. The paper keeps the rate inside u, which is the same while
    the rate stands still; see `correct_momentum`.
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
                of_weights, of_gradients = _norms(weights), _norms(updates)
                layer_rate = _ratio(
                    TRUST_COEFFICIENT * of_weights, of_gradients + decay * of_weights, of_weights, of_gradients
                )
            updates = list(torch._foreach_add(updates, weights, alpha=decay))
            if group["trust"]:
                torch._foreach_mul_(updates, layer_rate)
            buffers = self._kept(parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, 1.0 - live * (1.0 - momentum))
            torch._foreach_add_(buffers, torch._foreach_mul(updates, live))
            _apply(parameters, buffers, group["lr"], live)


class LAMB(_Layerwise):
    """Layer-wise adaptive moments (You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2).

    r = Adam's bias-corrected update; w = w - rate |w| / |r + decay w| (r + decay w), with phi(z) = z; the factor is 1
    without trust ratio.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = ADAM_BETAS
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients, live = self._gradients(parameters)
            means, squares = self._kept(parameters, "exp_avg"), self._kept(parameters, "exp_avg_sq")
            torch._foreach_mul_(means, 1.0 - live * (1.0 - first))
            torch._foreach_add_(means, torch._foreach_mul(gradients, live * (1.0 - first)))
            torch._foreach_mul_(squares, 1.0 - live * (1.0 - second))
            torch._foreach_add_(
                squares, torch._foreach_mul(torch._foreach_mul(gradients, gradients), live * (1.0 - second))
            )
            # one count a group, kept with its first parameter, on the device: a graph counts its replays
            counted = self.state[parameters[0]]
            counted["step"] = counted.get("step", torch.zeros((), device=parameters[0].device)).add_(live)
            # 1 - 0.999 ** t loses four digits in fp32; a first step that is not finite counts as none
            steps = counted["step"].clamp(min=1.0).double()
            denominators = torch._foreach_sqrt(torch._foreach_div(squares, (1.0 - second**steps).float()))
            torch._foreach_add_(denominators, LAMB_EPSILON)
            updates = torch._foreach_div(torch._foreach_div(means, (1.0 - first**steps).float()), denominators)
            weights = [parameter.float() for parameter in parameters]
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            if group["trust"]:
                of_weights, of_updates = _norms(weights), _norms(updates)
                torch._foreach_mul_(updates, _ratio(of_weights, of_updates, of_weights, of_updates))
            _apply(parameters, updates, group["lr"], live)
