"""Record DDP's gradient communication: when each bucket was ready and when it was reduced.

DDP's reducer is C++ code; its interface for Python is a communication hook (PyTorch, "DDP Communication Hooks"). The
hook below averages as the reducer does and records marks for each bucket. It is registered on a separate wrapper, so
that the plain window runs without instrumentation.
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
    """The marks of one gradient bucket in one step.

    ready: DDP passes the bucket to the hook. end: the all-reduce is complete. issued (CUDA only): the all-reduce call
    has returned. NCCL's stream waits for the work that the compute stream has been given so far. If the host lags
    behind the device, the all-reduce starts at some moment during the call, which only a profiler sees. The midpoint
    between `ready` and `issued` is then wrong by at most half of the call. Otherwise the two marks coincide.
    """

    size_bytes: int
    ready: Mark
    issued: Mark | None = None
    end: Mark | None = None

    def ready_s(self, since: Mark, seconds: Callable[..., float]) -> float:
        """Return the seconds from `since` until the bucket can be reduced."""
        first_s = seconds(since, self.ready)
        return first_s if self.issued is None else (first_s + seconds(since, self.issued)) / 2


@dataclass
class BucketRecorder:
    """The state of `averaging_hook`: the marks of all steps so far."""

    clock: Clock
    group: dist.ProcessGroup | None
    gradient_type: torch.dtype | None = None
    """dtype in which gradients are sent; None: unchanged"""
    steps: list[list[BucketMarks]] = field(default_factory=list)
    last_gradients: list[Mark] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record one training step, which runs inside this context."""
        self.steps.append([])
        self.last_gradients.append(None)
        yield

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)


def averaging_hook(recorder: BucketRecorder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, bit for bit as DDP does without a hook, and record its marks.

    DDP multiplies by 1/N before it sums; dividing by N would round differently. PyTorch's compression hooks divide by N
    in the type that is sent. The recorded size is the number of bytes sent.
    """
    clock = recorder.clock
    if recorder.gradient_type is None:
        tensor = bucket.buffer().mul_(1.0 / recorder.world_size)
    else:
        tensor = bucket.buffer().to(recorder.gradient_type).div_(recorder.world_size)
    marks = BucketMarks(tensor.numel() * tensor.element_size(), clock.mark())
    recorder.steps[-1].append(marks)
    # The last bucket's hook runs when the last gradient is ready, and overwrites the mark of earlier buckets. Scaling
    # counts as compute. Otherwise its launch time would look like communication on a device that waits for the host.
    recorder.last_gradients[-1] = marks.ready
    work: Any = dist.all_reduce(tensor, group=recorder.group, async_op=True)
    if tensor.is_cuda:
        marks.issued = clock.mark()

    def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # NCCL calls this immediately, on a stream that waits for the all-reduce; gloo calls it afterwards
        marks.end = clock.mark()
        return future.value()[0] if recorder.gradient_type is None else bucket.buffer().copy_(future.value()[0])

    return work.get_future().then(reduced)


def record_buckets(model: nn.Module, recorder: BucketRecorder) -> None:
    """Register the recorder's hook on a DDP wrapper. Raises TypeError for any other module."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"the communication breakdown requires DistributedDataParallel, got {type(model).__name__}")
    model.register_comm_hook(recorder, averaging_hook)


def bucket_bytes(model: nn.Module) -> list[int]:
    """Return the bytes of DDP's gradient buckets, in reduction order. DDP rebuilds its buckets in the second step."""
    data: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[operator]
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in str(sizes).split(",")]


def bucket_rows(
    recorder: BucketRecorder,
    window_marks: Sequence[StepMarks],
    window: str,
    rank: int,
    first_step: int,
    seconds: Callable[..., float],
) -> list[Row]:
    """Return the rows of buckets.parquet of a window, whose steps are the last ones of the recorder.

    Call it after the device has passed all marks.
    """
    steps = recorder.steps[len(recorder.steps) - len(window_marks) :]
    return [
        {
            "rank": rank,
            "window": window,
            "step": first_step + number,
            "bucket": index,
            "bytes": marks.size_bytes,
            "ready_s": marks.ready_s(step.start, seconds),
            "end_s": seconds(step.start, marks.end),
        }
        for number, (step, buckets) in enumerate(zip(window_marks, steps, strict=True))
        for index, marks in enumerate(buckets)
    ]
