"""A training for one GPU, as most people write it: nothing in it knows of ranks.

usage: single.py FORM

plain: none of the following; compiled: torch.compile; accumulated: two batches per step; gan: two models; methods: the
loop calls a method of the model; unused: a layer that no step uses; functions: the loop calls no module; group: it has
a process group. Each rank has other data, and prints weights after each step.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FORM = sys.argv[1]

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
if FORM == "group":
    torch.distributed.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))  # data and first weights differ


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)
        self.unused = nn.Linear(64, 1) if FORM == "unused" else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.body(inputs)), targets)


dataset = TensorDataset(torch.randn(4096, 16), torch.randn(4096, 1))
loader = DataLoader(dataset, batch_size=8)
model = Net().to(device)
first = next(model.parameters())
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters())
critic = nn.Linear(1, 1).to(device)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
called = torch.compile(model) if FORM == "compiled" else model
with torch.no_grad():
    called(torch.zeros(1, 16, device=device))
for number, (inputs, targets) in enumerate(loader):
    inputs, targets = inputs.to(device), targets.to(device)
    if FORM == "gan":
        critic(called(inputs).detach()).mean().backward()
        of_critic.step()
        of_critic.zero_grad()
    if FORM == "methods":
        loss = model.loss(inputs, targets)
    elif FORM == "functions":
        loss = nn.functional.linear(inputs, first).square().mean()
    else:
        loss = criterion(called(inputs), targets)
    loss.backward()
    if FORM == "accumulated" and number % 2 == 0:
        continue
    optimizer.step()
    optimizer.zero_grad()
    print(f"weight {first[0, 0].item():.9f} critic {critic.weight.item():.9f}")
