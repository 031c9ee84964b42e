"""Count the floating-point operations of a step that a script runs."""

import os
import sys
from types import FrameType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainables.messages import one_line

EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")
"""module of the functions that run compiled code"""

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
            return "the compiled model might not fit in memory without its compiled code"
    return None
