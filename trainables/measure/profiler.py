"""Record a profiler trace of some steps, in a separate window: ground truth for the communication breakdown."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainables.scratch import scratch_folder


@dataclass
class Trace:
    """The result of `kineto`: gzipped Chrome trace JSON. None on ranks that record no trace."""

    content: bytes | None = None


def activities_of(device: torch.device, host: bool = True) -> list[ProfilerActivity]:
    """Return what torch.profiler records of a rank on this device. host: also what the host does."""
    of_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [*([ProfilerActivity.CPU] if host or not of_device else []), *of_device]


@contextmanager
def kineto(enabled: bool, device: torch.device, host: bool = True) -> Iterator[Trace]:
    """Record a trace with torch.profiler (Kineto) inside this context, if `enabled`. host: also what the host does."""
    trace = Trace()
    if not enabled:
        yield trace
        return
    # shapes give the sizes of gloo's messages; NCCL's kernels have theirs, and recording shapes slows the host
    with profile(activities=activities_of(device, host), record_shapes=device.type != "cuda") as profiler:
        yield trace
    with scratch_folder("trace") as folder:
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        trace.content = path.read_bytes()
