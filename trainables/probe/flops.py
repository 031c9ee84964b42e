"""Count the floating-point operations of a step that a script runs."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainables.measure.collectives import boundaries
from trainables.messages import one_line

NOT_EAGER = "the compiled model might not fit in memory without its compiled code"

EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")
"""module of the functions that run compiled code"""

GRAPH_LAUNCH = "cudaGraphLaunch"

TEMPLATES = ("triton_tem", "triton_mm", "triton_bmm", "triton_convolution")
"""starts of the names of kernels that Inductor generates from templates for products"""

MOST_EAGER_MEMORY = 0.25
"""share of a GPU's memory above which a compiled model is not run eagerly, because that needs more"""


class OperationCounter(TorchDispatchMode):
    """Adds up the operations of everything that is executed between `start` and `stop`.

    A multiply-add counts as two. Counts matrix products, convolutions and attention, with the formulas of torch's
    FlopCounterMode, but without its global module hooks, which would recompile models. A compiled model runs this step
    without its compiled code, which stays valid (torch._dynamo.convert_frame, "non-infra torch dispatch mode").
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.problem: str | None = None
        """why the count is incomplete"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute the operation and add its count."""
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", func))
        if formula is not None:
            try:
                self.flops += float(formula(*args, **(kwargs or {}), out_val=result))
            except Exception as error:  # noqa: BLE001 - a formula that fails must not end the script
                self.problem = f"the operations of {func} are unknown: {one_line(error)}"
        return result

    def start(self) -> Self:
        self.__enter__()
        return self

    def stop(self) -> float | None:
        """Return the operations; None if they are incomplete or none were seen."""
        self.__exit__(None, None, None)
        return None if self.problem else self.flops or None


def why_not_countable(device: torch.device) -> str | None:
    """Return why the next step cannot run under an `OperationCounter`; None if it can."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(EVAL_FRAME):  # it cannot continue under another dispatch mode
            return "the optimizer's step is compiled"
        frame = frame.f_back
    if device.type == "cuda" and "torch._dynamo" in sys.modules:
        compiled = torch._dynamo.utils.counters["frames"]["ok"] > 0
        used = torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
        if compiled and used > MOST_EAGER_MEMORY:
            return NOT_EAGER
    return None


def traced_operations(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the operations of a trace's host events; None if none are seen, or some are hidden or without shapes.

    The same operators as `OperationCounter`, also those that compiled code calls. Products that Triton compiled and
    CUDA graphs have no operators, so that the sum would be incomplete. Grouped convolutions are counted exactly, while
    torch's formula counts the gradients of their weights once per group.
    """
    total = 0.0
    for event in events:
        name, category = str(event.get("name")), event.get("cat")
        if (category == "kernel" and name.startswith(TEMPLATES)) or name.startswith(GRAPH_LAUNCH):
            return None
        formula = _FORMULAS.get(name) if category == "cpu_op" else None
        if formula is not None:
            arguments = event.get("args", {})
            if "Input Dims" not in arguments:  # the trace was recorded without shapes
                return None
            total += 2.0 * formula(arguments["Input Dims"], arguments.get("Concrete Inputs", ()))
    return total or None


def traced_step_flops(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the operations per step of a trace, see `traced_operations`. None without steps."""
    times = boundaries(events)
    if len(times) < 2:
        return None
    total = traced_operations(event for event in events if times[0] <= event["ts"] < times[-1])
    return None if total is None else total / (len(times) - 1)


Shapes = Sequence[Sequence[int]]

Formula = Callable[[Shapes, Sequence[str]], float]
"""(shapes, other arguments as text) -> multiply-adds"""


def _product(first: int) -> Formula:
    """Return the formula of [.., n, k] x [.., k, m], whose operands are the arguments `first` and `first` + 1."""
    return lambda shapes, _: math.prod(shapes[first]) * shapes[first + 1][-1]


def _convolution(shapes: Shapes, arguments: Sequence[str]) -> float:
    """aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    inputs, weight = shapes[0], shapes[1]
    if arguments[6] == "True":
        return inputs[0] * math.prod(inputs[2:]) * math.prod(weight)
    stride, padding, dilation = (json.loads(arguments[index]) for index in (3, 4, 5))
    edges = [
        (size + 2 * pad - dilate * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, dilate in zip(inputs[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    return inputs[0] * math.prod(edges) * math.prod(weight)


def _convolution_backward(shapes: Shapes, arguments: Sequence[str]) -> float:
    """aten::convolution_backward(grad_output, input, weight, ..., transposed, ..., output_mask)."""
    places = shapes[1] if arguments[7] == "True" else shapes[0]
    gradients = arguments[-1].split(",")[:2]
    return sum("True" in text for text in gradients) * places[0] * math.prod(places[2:]) * math.prod(shapes[2])


def _attention(shapes: Shapes, _: Sequence[str]) -> float:
    """Queries [b, h, s, d], keys [b, h, t, d] and values [b, h, t, e]: two products."""
    (batch, heads, queries, width), keys, values = shapes[0], shapes[1], shapes[2]
    return batch * heads * queries * keys[2] * (width + values[3])


def _attention_backward(shapes: Shapes, _: Sequence[str]) -> float:
    """The gradient of the output precedes queries, keys and values: five products, one of them recomputed."""
    (batch, heads, queries, width), keys, values = shapes[1], shapes[2], shapes[3]
    return batch * heads * queries * keys[2] * (3 * width + 2 * values[3])


_ATTENTIONS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")

_FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::baddbmm": _product(1),
    "aten::_scaled_mm": _product(0),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTIONS},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTIONS},
}
