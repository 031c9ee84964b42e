"""The live account of DDP's gradient communication: when each bucket was ready and when it was reduced.

DDP's reducer is C++, which no Python patch sees; a communication hook is its own way in (PyTorch, "DDP Communication
Hooks"). The hook below averages as the reducer does and notes two marks a bucket. It runs on a wrapper of its own, so
that the plain window stays bare.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainables.step.timing import Clock, Mark, Row, StepMarks


@dataclass
class BucketMarks:
    """One gradient bucket of one step: `ready` when it is handed over to be reduced, `end` when it is.

    issued: on CUDA, when the call that reduces it has returned. NCCL waits, on a stream of its own, for what the compute
    stream has done so far; where the host is behind the device, the all-reduce begins at a moment of that call which only
    a profiler sees, and the middle of the two marks errs by at most half of the call. Elsewhere they fall together.
    """

    size_bytes: int
    ready: Mark
    issued: Mark | None = None
    end: Mark | None = None

    def ready_s(self, since: Mark, seconds: Callable[..., float]) -> float:
        """Seconds from `since` until the bucket can be reduced."""
        first_s = seconds(since, self.ready)
        return first_s if self.issued is None else (first_s + seconds(since, self.issued)) / 2


@dataclass
class Account:
    """The state of `averaging_hook`: the marks of every step so far."""

    clock: Clock
    group: dist.ProcessGroup | None
    gradient_type: torch.dtype | None = None
    """what gradients are sent as; None: as they are"""
    steps: list[list[BucketMarks]] = field(default_factory=list)
    last_gradients: list[Mark] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step: its buckets are noted together."""
        self.steps.append([])
        self.last_gradients.append(None)
        yield

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)


def averaging_hook(account: Account, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the account's group, bit for bit as DDP does without a hook, and notes its marks.

    DDP multiplies by 1/N before it sums, and a third times three is not one: dividing would round otherwise. Gradients
    that are sent in another type are divided, as PyTorch's own compressing hooks do; their bytes are those sent.
    """
    clock = account.clock
    if account.gradient_type is None:
        tensor = bucket.buffer().mul_(1.0 / account.world_size)
    else:
        tensor = bucket.buffer().to(account.gradient_type).div_(account.world_size)
    marks = BucketMarks(tensor.numel() * tensor.element_size(), clock.mark())
    account.steps[-1].append(marks)
    # The hook of the last bucket runs when the last gradient is there: what it leaves is the step's. Scaling it counts as
    # compute: where the device waits for its host, the host's time to launch it would else look like communication.
    account.last_gradients[-1] = marks.ready
    work: Any = dist.all_reduce(tensor, group=account.group, async_op=True)
    if tensor.is_cuda:
        marks.issued = clock.mark()

    def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # on CUDA this runs at once, on a stream that waits for the all-reduce; over gloo it runs when that is done
        marks.end = clock.mark()
        return future.value()[0] if account.gradient_type is None else bucket.buffer().copy_(future.value()[0])

    return work.get_future().then(reduced)


def with_account(model: nn.Module, account: Account) -> nn.Module:
    """A DDP wrapper with the hook of this account. Raises TypeError for any other module."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"the account needs DistributedDataParallel, not {type(model).__name__}")
    model.register_comm_hook(account, averaging_hook)
    return model


def bucket_bytes(model: nn.Module) -> list[int]:
    """Bytes of DDP's gradient buckets, in the order in which they are reduced, once it has rebuilt them (second step)."""
    data: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[operator]
    listed = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in str(listed).split(",")]


def bucket_rows(
    account: Account, taken: Sequence[StepMarks], window: str, rank: int, first_step: int, seconds: Callable[..., float]
) -> list[Row]:
    """The rows of buckets.parquet of a window whose steps are the account's last ones. The device has passed all marks."""
    steps = account.steps[len(account.steps) - len(taken) :]
    return [
        {
            "rank": rank,
            "window": window,
            "step": first_step + number,
            "bucket": index,
            "bytes": marks.size_bytes,
            "ready_s": marks.ready_s(step.begin, seconds),
            "end_s": seconds(step.begin, marks.end),
        }
        for number, (step, buckets) in enumerate(zip(taken, steps, strict=True))
        for index, marks in enumerate(buckets)
    ]
