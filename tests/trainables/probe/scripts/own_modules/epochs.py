"""Loop over epochs in the style of PyTorch's ImageNet example: dict batches, loader processes, validation per epoch."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.sizes import SAMPLES  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from analysis import build  # type: ignore[attr-defined]


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": torch.randn(12), "label": index % 3, "name": f"sample {index}"}


def main() -> None:
    assert sys.argv == ["epochs.py", "--flag", "a b"]
    assert __name__ == "__main__"
    assert Path(sys.path[0]) == Path(__file__).parent == Path.cwd()
    dist.init_process_group("gloo", init_method="env://")
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    train, validation = Samples(SAMPLES), Samples(16)
    sampler: DistributedSampler[dict[str, Any]] = DistributedSampler(train)
    loader = DataLoader(
        train, 5, sampler=sampler, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
    )
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            loss = criterion(model(batch["pixels"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(validation, 16):
                criterion(model(batch["pixels"]), batch["label"])


if __name__ == "__main__":
    main()
