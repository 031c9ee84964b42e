"""Train a GAN: two models, two optimizers, two updates per batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
generator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)).to(device))
discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
data = TensorDataset(torch.randn(512, 16))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), drop_last=True)

for epoch in range(3):
    for (real,) in loader:
        real = real.to(device)
        ones, zeros = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
        optimizer_d.zero_grad()
        fake = generator(torch.randn(len(real), 8, device=device))
        both = discriminator(torch.cat([real, fake.detach()]))
        loss_d = criterion(both, torch.cat([ones, zeros]))
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
    print(f"epoch {epoch}: D {loss_d.item():.3f}, G {loss_g.item():.3f}")
dist.destroy_process_group()
