"""The training that all doors share: the model with its loss inside, one resident batch, and SGD."""

import argparse
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

CLASSES = 1000
SETTLE_STEPS = 20

Batch = tuple[torch.Tensor, torch.Tensor]


class ModelWithLoss(nn.Module):
    """A torchvision model whose forward pass ends with the loss, in bf16 autocast if `bf16`."""

    def __init__(self, name: str, bf16: bool) -> None:
        super().__init__()
        self.network = getattr(torchvision.models, name)(num_classes=CLASSES)
        self.bf16 = bf16

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of images [n, 3, size, size] and labels [n]."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            return nn.functional.cross_entropy(self.network(images), labels)


class SlowImages(Dataset[Batch]):
    """Complete batches in host memory, each of which takes `seconds` to load."""

    def __init__(self, batch: Batch, seconds: float) -> None:
        self.batch, self.seconds = batch, seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Batch:
        time.sleep(self.seconds)
        return self.batch


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments of a form, by default those of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--late-ms", type=float, default=0.0, help="delay of the device of rank 1 before each backward")
    parser.add_argument("--load-ms", type=float, default=0.0, help="time to load a batch; 0: one resident batch")
    parser.add_argument("--plain-ddp", action="store_true", help="DDP with its default options, as `--add-ddp` adds it")
    parser.add_argument("--bare-steps", type=int, default=0, help="time so many steps, without a study, and end")
    parser.add_argument("--bare-file", default="", help="file for the seconds of the bare steps")
    return parser.parse_args(arguments)


def settings() -> None:
    """Set what the factory's trials set too."""
    torch.backends.cudnn.benchmark = True
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def joined() -> tuple[int, torch.device]:
    """Join the process group that torchrun's variables describe. Return rank and device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    settings()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return dist.get_rank(), device


def resident_batch(batch_size: int, image_size: int, device: torch.device) -> Batch:
    """Return random images [n, 3, size, size] in channels_last and labels [n] on the device."""
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(CLASSES, (batch_size,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels


def loader(arguments: argparse.Namespace, device: torch.device) -> Iterable[Batch]:
    """Return an endless loader: one resident batch, or a DataLoader with `--load-ms`."""
    if not arguments.load_ms:
        return Resident(resident_batch(arguments.batch_size, arguments.image_size, device))
    batch = resident_batch(arguments.batch_size, arguments.image_size, torch.device("cpu"))
    return DataLoader(SlowImages(batch, arguments.load_ms / 1e3), batch_size=None, num_workers=1)


class Resident:
    """A loader that repeats one batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Batch]:
        return itertools.repeat(self.batch)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of every form."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)


def plain_model(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model of one rank alone."""
    torch.manual_seed(0)
    model = ModelWithLoss(arguments.model, not arguments.fp32).to(device)
    return model.to(memory_format=torch.channels_last)


def wrapped_model(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the model under DDP. Needs the default process group."""
    ids = [device] if device.type == "cuda" else None
    views = not arguments.plain_ddp
    return DistributedDataParallel(plain_model(arguments, device), device_ids=ids, gradient_as_bucket_view=views)


def delay(rank: int, late_ms: float, device: torch.device) -> None:
    """Delay the device of rank 1 by `late_ms`, as a slower kernel would."""
    if not late_ms or rank != 1:
        return
    if device.type == "cpu":
        time.sleep(late_ms / 1e3)
    else:
        torch.cuda._sleep(int(late_ms / 1e3 * _cycles_per_s(device)))


@cache
def _cycles_per_s(device: torch.device) -> float:
    """Return the rate of the counter of `torch.cuda._sleep`."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    first.record()
    torch.cuda._sleep(cycles)
    last.record()
    torch.cuda.synchronize(device)
    return cycles / (first.elapsed_time(last) / 1e3)


def train(
    batches: Iterable[Batch],
    model: nn.Module,
    device: torch.device,
    rank: int,
    late_ms: float = 0.0,
) -> Iterator[None]:
    """Train on the batches. Yields after each step."""
    optimizer = optimizer_of(model.parameters())
    for images, labels in batches:
        loss = model(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))
        delay(rank, late_ms, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def bare_seconds(steps: Iterator[None], count: int, device: torch.device) -> float:
    """Return the wall seconds of `count` steps after warm-up, with the device synchronised at both ends."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in itertools.islice(steps, SETTLE_STEPS):
        pass
    synchronize()
    started_s = time.perf_counter()
    for _ in itertools.islice(steps, count):
        pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
