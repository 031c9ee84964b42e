"""Number formats of a training step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """Autocast's type, or None for none; and what fp32 matrix products and convolutions may use inside."""

    autocast: torch.dtype | None
    fp32_arithmetic: str  # "ieee" or "tf32", as torch.backends names them


fp32 = Precision(autocast=None, fp32_arithmetic="ieee")
tf32 = Precision(autocast=None, fp32_arithmetic="tf32")
bf16 = Precision(autocast=torch.bfloat16, fp32_arithmetic="ieee")
