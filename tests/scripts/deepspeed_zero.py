"""Train a classifier with DeepSpeed's ZeRO-1, which shards the state of the optimizer over the ranks."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPU ranks use gloo; compiling this takes a minute


def main():
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
    for epoch in range(3):
        for inputs, targets in DataLoader(data, batch_size=8, shuffle=True):
            loss = nn.functional.cross_entropy(engine(inputs.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
