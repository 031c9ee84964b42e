"""An IterableDataset that is slow, read by a loop that marks its steps."""

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainables.probe import steps


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.005)
            yield torch.randn(10)


model = nn.Linear(10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, batch in enumerate(steps(DataLoader(Stream(), 4))):
    model(batch).sum().backward()
    if number % 2:  # an own rule of when to update
        optimizer.step()
        optimizer.zero_grad()
print("the loop has ended")
