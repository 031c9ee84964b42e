"""The reference of `benchmarks.speed.gpt2`: GPT-2 as public training loops write it, without any code of the project.

One module returns the loss, as in nanoGPT. bf16 autocast, scaled dot product attention, fused AdamW.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.bare_loop import captured

VOCABULARY = 50_304


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (each.view(n, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(n, t, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def training(job: dict[str, Any], device: torch.device, group: Any = None) -> Callable[[], None]:
    """Return a step of a new model, see `bare_loop.training`. job: also "sequence_length"."""
    torch.manual_seed(0)
    if "graph" not in job.get("execution", ""):
        return _step(job, device, group)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return captured(_step(job, device, group))


def _step(job: dict[str, Any], device: torch.device, group: Any) -> Callable[[], None]:
    context, options = job["sequence_length"], job.get("ddp", {})
    vocabulary, *shape = (VOCABULARY, 768, 12, 12) if job["model"] == "gpt2" else (8192, 32, 2, 2)
    with device:
        model: Any = GPT(vocabulary, context, *shape)
        tokens = torch.randint(vocabulary, (job["batch"], context + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if "compile" in job.get("execution", ""):
        model.compile()
    if options is not None:
        ids = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, process_group=group, **options)
    graphed = "graph" in job.get("execution", "")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=graphed
    )
    amp = torch.bfloat16 if job["precision"].startswith("bf16") else None

    def step() -> None:
        with torch.autocast(device.type, amp) if amp else contextlib.nullcontext():
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
