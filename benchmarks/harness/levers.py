"""Optimizations to try alone or together: compiler options, the rewritten stem, uint8 images, DDP options."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainables.build import build_workload
from trainables.data.loader import device_of
from trainables.trial import Trial
from trainables.workload import Workload

LEVERS: dict[str, dict[str, Any]] = {
    "autotune": {"max_autotune": True},
    "autotune_gemm": {"max_autotune_gemm": True, "conv_1x1_as_mm": True},
    "coordinate": {"coordinate_descent_tuning": True},
    "combo": {"combo_kernels": True},
    "pointwise": {"max_autotune_pointwise": True},
    "triton_conv": {"max_autotune": True, "max_autotune_conv_backends": "TRITON"},
}
"""Options of torch._inductor.config.

autotune: the fastest back end for each matrix product and convolution. autotune_gemm: 1x1 convolutions as matrix
products, with the following operations fused as epilogues. coordinate: search for block sizes of generated kernels.
combo: several small kernels in one. pointwise: the fastest of a few block sizes for generated kernels. triton_conv:
convolutions without cuDNN."""

STEM = "stem"

UINT8 = "uint8"
UINT8_WORKLOAD = f"{__file__}:resident_bytes"

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bf16 gradients": {"parallel": "ddp_bf16"},
    "buckets of 10 MiB": {"bucket_mb": 10.0},
    "buckets of 50 MiB": {"bucket_mb": 50.0},
    "buckets of 100 MiB": {"bucket_mb": 100.0},
    "gradients copied back from buckets": {"gradient_as_bucket_view": False},
    "static graph": {"static_graph": True},
    "buffers not broadcast": {"broadcast_buffers": False},
    "static graph + bf16 gradients": {"static_graph": True, "parallel": "ddp_bf16"},
}
"""Variants of DDP options: changes to the default trial."""


@contextlib.contextmanager
def compiler(levers: str) -> Iterator[None]:
    """Set the compiler options of these levers, joined by +, within the context."""
    names = [name for name in levers.split("+") if name not in ("", STEM, UINT8)]
    if not names:
        yield
        return
    from torch._inductor import config

    with config.patch({key: value for name in names for key, value in LEVERS[name].items()}):
        yield


def resident_bytes(trial: Trial) -> Workload:
    """Return the trial's workload on resident synthetic images as uint8, which its step also converts to numbers."""
    workload = build_workload(trial.but(workload=""), device_of(trial))
    assert isinstance(workload.dataset, TensorDataset)
    images, labels = workload.dataset.tensors
    return replace(workload, dataset=TensorDataset(((images + 4) * 32).clamp(0, 255).to(torch.uint8), labels))
