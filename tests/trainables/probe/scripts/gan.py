"""A GAN: two optimizers, two steps of the discriminator per step of the generator."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(40_000, 16))
loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data), drop_last=True)
generator = DistributedDataParallel(nn.Linear(8, 16))
discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())

while True:
    for number, (real,) in enumerate(loader):
        of_discriminator.zero_grad()
        fake = generator(torch.randn(len(real), 8))
        (discriminator(fake.detach()).mean() - discriminator(real).mean()).backward()
        of_discriminator.step()
        if number % 2 == 1:
            of_generator.zero_grad()
            (-discriminator(generator(torch.randn(len(real), 8))).mean()).backward()
            of_generator.step()
