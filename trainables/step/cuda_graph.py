"""Capture steps as CUDA graphs and replay them, so that the host issues one call instead of thousands.

See PyTorch, "CUDA semantics", sections "CUDA Graphs" and "Usage with DistributedDataParallel".
"""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from trainables.batch import byte_size, map_tensors
from trainables.step.timing import CudaClock, Row, StartPart, Step, StepOutput
from trainables.trial import Trial


class GraphClock(CudaClock):
    """Marks that are part of a graph. Each replay records them again and overwrites their last times."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.events: list[torch.cuda.Event] = []
        """all recorded events: a graph cannot be instantiated if one of its events was freed"""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self.events.append(event)
        return event


def stream_for(trial: Trial, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of the trial's stream: a side stream if the step is captured, else the default stream.

    The default stream cannot be captured. Autograd accumulates gradients on the stream on which DDP wrapped the model,
    so the complete trial must run on one stream.
    """
    return torch.cuda.stream(torch.cuda.Stream(device)) if trial.captured else contextlib.nullcontext()


def capture(
    step: Step,
    example: Any,
    device: torch.device,
    resident: bool,
    non_blocking: bool = True,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Step:
    """Capture the step as a CUDA graph, on a batch like `example`, within `context`.

    The step must be warmed up first, on the stream of `stream_for`. The graph reads its batch from fixed memory, into
    which each batch is copied; with `non_blocking` the host does not wait for the copy. Everything after the copy is
    the part `graph`. The parts inside it are timed by events of the graph, see `StepOutput.parts`. Raises RuntimeError
    (from torch) if the step cannot be captured.
    """
    static_batch = example if resident else map_tensors(lambda tensor: tensor.to(device, copy=True), example)
    clock = GraphClock(device)
    marks: list[tuple[str, torch.cuda.Event]] = []

    def start_part(name: str) -> None:
        if name != "host_to_device":  # outside the graph
            marks.append((name, clock.mark()))

    torch.cuda.synchronize(device)
    gc.collect()  # freeing an event or a graph during a capture would abort the capture
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries events in its own thread, which the default mode treats as an error
    current = torch.cuda.current_stream(device)
    with torch.cuda.graph(graph, stream=current, capture_error_mode="thread_local"), context():
        output = step(static_batch, start_part)
        marks.append(("", clock.mark()))

    def parts() -> Row:
        row: Row = {}
        for (name, first), (_, last) in pairwise(marks):
            row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(first, last)
        return row

    # The graph writes to the step's memory, such as the optimizer's. Without a reference it could be freed and reused.
    referenced = (step, static_batch)

    def replay(batch: Any, start_part: StartPart) -> StepOutput:
        _, static_batch = referenced
        moved_bytes = None
        if not resident:
            start_part("host_to_device")
            moved_bytes = byte_size(batch)
            _copy(batch, static_batch, non_blocking)
        start_part("graph")
        graph.replay()
        # clone: the next replay overwrites the graph's outputs
        scale = None if output.loss_scale is None else output.loss_scale.clone()
        return StepOutput(output.loss.clone(), moved_bytes, scale, parts)

    return replay


def _copy(source: Any, target: Any, non_blocking: bool) -> None:
    if isinstance(source, torch.Tensor):
        target.copy_(source, non_blocking=non_blocking)
    elif isinstance(source, dict):
        for key, item in source.items():
            _copy(item, target[key], non_blocking)
    elif isinstance(source, (tuple, list)):
        for item, target_item in zip(source, target, strict=True):
            _copy(item, target_item, non_blocking)
