"""Measure the matmul limit: the rate of a large matrix product, when the device does nothing else.

No model can be faster than its products. A GPU reaches less than its data sheet states, because it lowers its clock at
full power. The limit therefore lasts some seconds, and is measured on the ranks of the trial. It costs more than many a
trial, so worker groups that start within `KEPT_S` on the same GPU read it from a file of this user.
"""

import contextlib
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from trainables.clock import unix_s
from trainables.scratch import open_regular, user_folder
from trainables.step.precision import Precision, has_fp8
from trainables.step.timing import clock_for

EDGE = 8192
"""edge of the square matrices, large enough to occupy every core of a GPU"""
LIMIT_S = 5.0
"""seconds per number format, half of which are warm-up"""
ROUND_S = 0.1

KEPT_S = 1800.0
"""for how long a limit is read from its file"""

_MEASURED: dict[tuple[torch.device, str], float | None] = {}


def matmul_limits(device: torch.device, precision: Precision) -> dict[str, float]:
    """Return FLOP/s by number format: that of the precision's products, and fp8 if the device supports it.

    Call within the settings of the trial. A process measures a format once, see also `kept`.
    """
    kind = _kind(precision)
    limits = {kind: _limit(device, kind), "fp8": _limit(device, "fp8") if has_fp8(device) else None}
    return {name: limit for name, limit in limits.items() if limit is not None}


def matmul_rate(product: Callable[[], object], flops: float, device: torch.device, seconds: float) -> float:
    """Return the median FLOP/s of rounds of back-to-back products in the second half of `seconds`."""
    clock = clock_for(device)

    def round_s(count: int) -> float:
        start = clock.mark()
        for _ in range(count):
            product()
        end = clock.mark()
        clock.synchronize()
        return clock.seconds(start, end)

    round_s(1)
    count = max(1, round(min(seconds / 4, ROUND_S) / max(round_s(1), 1e-6)))
    rounds: list[float] = []
    while sum(rounds) < seconds:
        rounds.append(round_s(count))
    return count * flops / statistics.median(rounds[len(rounds) // 2 :])


def _kind(precision: Precision) -> str:
    dtype = precision.autocast or precision.parameters
    if dtype is None:
        return "tf32" if precision.fp32_arithmetic == "tf32" else "fp32"
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _limit(device: torch.device, kind: str) -> float | None:
    """Return the FLOP/s of products in a number format. None if they fail, which must not cost the trial."""

    def measure() -> float:
        return matmul_rate(product_in(kind, EDGE, device), 2.0 * EDGE**3, device, LIMIT_S)

    if (device, kind) not in _MEASURED:
        try:
            _MEASURED[device, kind] = kept(user_folder() / _file(device, kind), measure)
        except RuntimeError:  # not supported, or out of memory
            _MEASURED[device, kind] = None
    return _MEASURED[device, kind]


def _file(device: torch.device, kind: str) -> str:
    name = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else device.type
    return f"matmul-{kind}-{name}-torch-{torch.__version__}.json"


def kept(path: Path, measure: Callable[[], float]) -> float:
    """Return the positive number in a file that is at most `KEPT_S` old; else measure it and write it there."""
    with contextlib.suppress(OSError, ValueError), open_regular(path, owner=os.getuid()) as file:
        value, age_s = json.load(file), unix_s() - os.fstat(file.fileno()).st_mtime
        if isinstance(value, float) and 0 < value < math.inf and 0 <= age_s < KEPT_S:
            return value
    value = measure()
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        with open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.getuid()) as file:
            file.write(json.dumps(value).encode())
    return value


def product_in(kind: str, edge: int, device: torch.device) -> Callable[[], object]:
    """Return a function that multiplies two random square matrices in a number format."""
    left, right = (torch.randn(edge, edge, device=device) for _ in range(2))
    if kind == "fp8":
        scale = torch.ones((), device=device)
        halves = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(*halves, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    left, right = left.to(dtype), right.to(dtype)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)
