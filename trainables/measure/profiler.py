"""A profiler trace of some steps: ground truth for the live account, in a window of its own."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Trace:
    """What `kineto` leaves: gzip'd Chrome trace JSON; None on ranks that keep none."""

    content: bytes | None = None


@contextmanager
def kineto(wanted: bool, device: torch.device) -> Iterator[Trace]:
    """Records with torch.profiler (Kineto) what runs inside, where `wanted`."""
    trace = Trace()
    if not wanted:
        yield trace
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        yield trace
    with tempfile.TemporaryDirectory(prefix="scaling-study-trace-") as folder:
        path = Path(folder) / "trace.json.gz"
        recorded.export_chrome_trace(str(path))
        trace.content = path.read_bytes()
