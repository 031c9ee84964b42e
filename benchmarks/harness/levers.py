"""Optimizations to try alone or together: options of the compiler and of attention, changes to the trial and to DDP."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import TensorDataset

from trainables.build import build_workload
from trainables.data.loader import device_of
from trainables.models import fused_loss
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

TOKEN_TRIALS: dict[str, dict[str, Any]] = {
    "fused_loss": {"fused_loss": True},
    **{kernels: {"attention": kernels} for kernels in ("cudnn", "flash", "efficient")},
    "one_graph": {"split_graph": False},
    "selective": {"activation_checkpointing": "selective"},
    "bf16_master": {"precision": "bf16_master"},
    "ddp_bf16": {"parallel": "ddp_bf16"},
    "delayed": {"parallel": "ddp_delayed"},
    "buckets_100": {"bucket_mb": 100.0},
    "buckets_250": {"bucket_mb": 250.0},
    "static_graph": {"static_graph": True},
    "no_views": {"gradient_as_bucket_view": False},
}
"""Levers of language models that change our trial. Those of attention and graphs apply to the bare loop, too."""

CHUNKS = {"chunks_4096": 4096, "chunks_16384": 16384, "chunks_65536": 65536}
"""Tokens per chunk of the fused loss."""

TOKEN_LEVERS = {*LEVERS, *TOKEN_TRIALS, *CHUNKS}

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


def changes_of(levers: str) -> dict[str, Any]:
    """Return the changes to a language model's trial by these levers, joined by +. Raises ValueError."""
    names = [name for name in levers.split("+") if name]
    if unknown := {*names} - TOKEN_LEVERS:
        raise ValueError(f"no lever {', '.join(sorted(unknown))}; allowed: {', '.join(sorted(TOKEN_LEVERS))}")
    return {field: value for name in names for field, value in TOKEN_TRIALS.get(name, {}).items()}


@contextlib.contextmanager
def levered(levers: str) -> Iterator[None]:
    """Set the options of these levers of language models, joined by +, within the context."""
    names = levers.split("+")
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiler("+".join(name for name in names if name in LEVERS)))
        for name in names:
            if name in CHUNKS:
                stack.enter_context(patch.object(fused_loss, "CHUNK_TOKENS", CHUNKS[name]))
        yield


def resident_bytes(trial: Trial) -> Workload:
    """Return the trial's workload on resident synthetic images as uint8, which its step also converts to numbers."""
    workload = build_workload(trial.but(workload=""), device_of(trial))
    assert isinstance(workload.dataset, TensorDataset)
    images, labels = workload.dataset.tensors
    return replace(workload, dataset=TensorDataset(((images + 4) * 32).clamp(0, 255).to(torch.uint8), labels))
