"""Steps as CUDA graphs: captured once, then replayed, so that the host issues one call in place of thousands.

PyTorch, "CUDA semantics": CUDA Graphs, and there "Usage with DistributedDataParallel".
"""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

from trainables.batch import byte_size, map_tensors
from trainables.step.timing import Begin, CudaClock, Row, Step, StepOutput
from trainables.trial import Trial


class GraphClock(CudaClock):
    """Marks that become part of a graph: each replay passes them anew, and overwrites what the one before left."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.events: list[torch.cuda.Event] = []
        """every one of them: a graph with an event that is gone cannot be made"""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self.events.append(event)
        return event


def stream_for(trial: Trial, device: torch.device) -> AbstractContextManager[Any]:
    """The stream that a trial runs on: CUDA's default one, which cannot be captured, or for graphs one of its own.

    Autograd adds up a weight's gradient on the stream on which its wrapper was made, so all of a trial belongs on it.
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
    """The step as a CUDA graph, captured on a batch like `example` within `context`.

    It must have run before as often as it needs to settle, on the stream of `stream_for`. The graph reads its batch from
    fixed memory, into which each batch is copied first; with `non_blocking` the host does not wait for that. Everything
    after the copy is the part `graph`; the parts inside it are timed by events of the graph itself, see `Stepped.parts`.
    Raises torch's RuntimeError where the step cannot be captured.
    """
    held = example if resident else map_tensors(lambda tensor: tensor.to(device, copy=True), example)
    clock = GraphClock(device)
    marks: list[tuple[str, torch.cuda.Event]] = []

    def begin(name: str) -> None:
        if name != "host_to_device":  # which is outside of the graph
            marks.append((name, clock.mark()))

    torch.cuda.synchronize(device)
    gc.collect()  # an event or graph that is freed while another is captured would end the capture
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events on a thread of its own, which the strictest mode takes for an error
    current = torch.cuda.current_stream(device)
    with torch.cuda.graph(graph, stream=current, capture_error_mode="thread_local"), context():
        given = step(held, begin)
        marks.append(("", clock.mark()))

    def parts() -> Row:
        row: Row = {}
        for (name, first), (_, last) in pairwise(marks):
            row[f"{name}_s"] = row.get(f"{name}_s", 0.0) + clock.seconds(first, last)
        return row

    used = (step, held)
    """what the graph writes to: the optimizer's memory is the step's, and would else be given to others"""

    def replay(batch: Any, begin: Begin) -> StepOutput:
        _, held = used
        moved_bytes = None
        if not resident:
            begin("host_to_device")
            moved_bytes = byte_size(batch)
            _copy(batch, held, non_blocking)
        begin("graph")
        graph.replay()
        # the next replay overwrites what this one leaves
        scale = None if given.loss_scale is None else given.loss_scale.clone()
        return StepOutput(given.loss.clone(), moved_bytes, scale, parts)

    return replay


def _copy(source: Any, target: Any, non_blocking: bool) -> None:
    if isinstance(source, torch.Tensor):
        target.copy_(source, non_blocking=non_blocking)
    elif isinstance(source, dict):
        for key, item in source.items():
            _copy(item, target[key], non_blocking)
    elif isinstance(source, (tuple, list)):
        for item, place in zip(source, target, strict=True):
            _copy(item, place, non_blocking)
