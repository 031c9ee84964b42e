"""Find when the last gradient of a step is ready on this rank, and when the gradients of all ranks are reduced."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node

from trainables.probe.job import Row
from trainables.probe.spans import StepSpans
from trainables.step.timing import Clock, Mark

REDUCING = ("backward", "reduce")
"""parts that end when gradients are reduced: DDP waits in the backward pass, other loops call all-reduces after it"""


class LastGradient:
    """The operation that accumulates the last gradient of a step. Its order is the same in each step.

    gradient_bytes: of all gradients of the step in which it was found.
    """

    def __init__(self) -> None:
        self.gradient_bytes = 0
        self._last: Node | None = None
        self._handles: list[Any] = []

    def search(self, modules: Iterable[nn.Module]) -> None:
        """Note which gradient is accumulated last, until `remove`.

        Hooks are on autograd's operations, not on parameters, whose hooks would compile a compiled model again. Sharded
        parameters have no such operation.
        """
        sizes: dict[int, int] = {}

        def on_gradient(node: Node, key: int, size: int) -> None:
            self._last = node
            sizes[key] = size  # a gradient is accumulated once per backward pass
            self.gradient_bytes = sum(sizes.values())

        parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
        for key, parameter in parameters.items():
            if (node := _accumulation(parameter)) is not None:
                self._hook(node, partial(on_gradient, node, key, parameter.nbytes))

    def watch(self, on_last: Callable[[], None]) -> None:
        """Call `on_last` when the last gradient is ready, until `remove`. It has no effect if none was found."""
        if self._last is not None:
            self._hook(self._last, on_last)

    def remove(self) -> None:
        """Remove all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, node: Node, call: Callable[[], None]) -> None:
        self._handles.append(node.register_hook(lambda *_: call()))


def reduction_times(step: StepSpans, start: Mark, clock: Clock) -> Row:
    """Return when the last gradient is ready, and when the gradients are reduced, in seconds from the mark `start`.

    Empty if this process trains alone, or if the step reduces nothing after its last gradient. All-reduces that a
    script issues asynchronously count up to their issue.
    """
    ends = [span.end for span in step.spans if span.name in REDUCING]
    if step.last_gradient is None or not ends or group_size() == 1:
        return {}
    times = {"last_gradient_s": step.last_gradient, "reduced_s": ends[-1]}
    return {name: clock.seconds(start, mark) for name, mark in times.items()}


def group_size() -> int:
    """Return the ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _accumulation(parameter: nn.Parameter) -> Node | None:
    """Return autograd's operation that accumulates the gradient of a parameter; None if it is sharded or has none."""
    if not parameter.requires_grad or not parameter.is_leaf or hasattr(parameter, "device_mesh"):
        return None
    view = parameter.view_as(parameter).grad_fn
    return None if view is None else view.next_functions[0][0]
