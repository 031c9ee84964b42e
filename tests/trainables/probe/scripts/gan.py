"""A GAN: two optimizers, two steps of the discriminator per step of the generator."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
data = TensorDataset(torch.randn(40_000, 16))
loader = DataLoader(data, batch_size=6, sampler=DistributedSampler(data), drop_last=True)
generator = DistributedDataParallel(nn.Linear(8, 16).to(device))
discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device))
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())

while True:
    for number, (real,) in enumerate(loader):
        of_discriminator.zero_grad()
        real = real.to(device)
        fake = generator(torch.randn(len(real), 8, device=device))
        (discriminator(fake.detach()).mean() - discriminator(real).mean()).backward()
        of_discriminator.step()
        if number % 2 == 1:
            of_generator.zero_grad()
            (-discriminator(generator(torch.randn(len(real), 8, device=device))).mean()).backward()
            of_generator.step()
