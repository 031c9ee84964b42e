"""Train a classifier of images with DistributedDataParallel, in the style of PyTorch's ImageNet example."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torchvision.models as models
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data", metavar="DIR", nargs="?", default="imagenet", help="path to dataset (ignored: fake data)")
parser.add_argument("-a", "--arch", default="resnet18")
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int, help="of all processes")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=10, type=int)


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def train(loader, model, criterion, optimizer, epoch, device, args):
    batch_time, data_time = AverageMeter("Time", ":6.3f"), AverageMeter("Data", ":6.3f")
    losses, top1, top5 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.time() - end)
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        top5.update(acc5[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]", batch_time, data_time, losses, top1, top5, sep="\t")


def validate(loader, model, criterion, device):
    model.eval()
    losses = AverageMeter("Loss")
    with torch.no_grad():
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            losses.update(criterion(model(images), target).item(), images.size(0))
    print(f" * {losses}")


def main():
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = nn.parallel.DistributedDataParallel(
        models.__dict__[args.arch](num_classes=10).to(device), device_ids=[local_rank] if cuda else None
    )
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    batch_size = args.batch_size // dist.get_world_size()
    train_set = FakeData(240, (3, 32, 32), transform=ToTensor())
    val_set = FakeData(16, (3, 32, 32), transform=ToTensor())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(
        train_set, batch_size=batch_size, num_workers=args.workers, pin_memory=cuda, sampler=sampler
    )
    val_loader = DataLoader(val_set, batch_size=batch_size, sampler=DistributedSampler(val_set, shuffle=False))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        validate(val_loader, model, criterion, device)
        scheduler.step()


if __name__ == "__main__":
    main()
