"""A Ray Train function, as people pass it to TorchTrainer. Nothing in it knows about this project.

python -m study.scaling run --train-func examples/train_function.py:train_func --gpus 1,2 --vary batch_size=16,32
"""

from typing import Any

import torch
from ray import train
from ray.train.torch import get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> None:
    layers = nn.Sequential(nn.Linear(32, config.get("hidden", 64)), nn.ReLU(), nn.Linear(config.get("hidden", 64), 10))
    model = prepare_model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))
    loader = prepare_data_loader(DataLoader(dataset, config["batch_size"], shuffle=True, drop_last=True))
    for epoch in range(config.get("epochs", 100)):
        if train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs.to(get_device())), targets.to(get_device()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        train.report({"loss": loss.item()})
