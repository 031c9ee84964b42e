"""Committed results that `compare` knows by name, and the commands that measure the same on another machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


@dataclass(frozen=True)
class Reference:
    """Committed results of GPUs. folder: below benchmarks/results. command: measures the same on another machine."""

    folder: str
    command: str


_SYNTHETIC = "--set dataset=synthetic --set image_size=224"
_LAYOUT = "--set memory_format=channels_last --set gradient_as_bucket_view=false --set sequence_length=128"
REFERENCES: Mapping[str, Reference] = {
    "gpt2-124m_4xh100_2026-11": Reference(
        "gpt2-scaling", "run gpt2-scaling --gpus 1,2,4 --case 'weak, 8' --case 'weak, 64' --case strong"
    ),
    "resnet50-transformer_2xh100_2026-11": Reference("default-2gpu", "run default --gpus 1,2"),
    "resnet50_4xh100_2026-11": Reference("default-resnet50-4gpu", "run default --model resnet50 --gpus 1,2,4"),
    "resnet50-vgg19_4xh200_2026-11": Reference(
        "communication",
        "run weak --gpus 1,2,4 --batch-per-gpu 32,256 --model resnet50,vgg19 --precision bf16 --loader-workers 0 "
        f"{_SYNTHETIC} {_LAYOUT}",
    ),
    "resnet18-small_4xh200_2026-11": Reference(
        "default-4gpu",
        "run weak --gpus 1,2,4 --batch-per-gpu 32,128,512 --model resnet18_small --precision fp32,bf16 "
        f"--loader-workers 2 --set dataset=fashion_mnist_sample --set image_size=28 {_LAYOUT}",
    ),
}
"""By name: model, hardware and date."""

WINDOWS = ("warmup_steps", "steps", "window_limit_s", "median_width", "communication_steps", "sweep_bytes")
"""Fields in which a trial may differ from a reference: the lengths of its windows."""
