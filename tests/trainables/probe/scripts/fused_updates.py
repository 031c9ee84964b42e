"""A loop that updates each parameter within the backward pass, as soon as its gradient is ready and averaged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(15)))
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}


def update(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)

while True:
    model(torch.ones(6, 32)).square().mean().backward()
