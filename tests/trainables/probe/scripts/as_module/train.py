"""A module of a package, which `torchrun -m as_module.train` starts."""

import pickle
import sys
from pathlib import Path

import torch

from .model import build


class Settings:
    """Pickled as a class of `__main__`."""


assert __name__ == "__main__"
assert __spec__ is not None and __spec__.name == "as_module.train"
assert sys.argv == [__file__, "--flag", "a b"]
assert Path(sys.path[0]) == Path(__file__).parent.parent == Path.cwd()
assert isinstance(pickle.loads(pickle.dumps(Settings())), Settings)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(7, 12)).sum().backward()
    optimizer.step()
