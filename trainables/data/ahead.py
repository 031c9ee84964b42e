"""Batches made ready beside the step: in a thread, and on a GPU in a stream of its own."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainables.registry import AHEAD_BATCHES


def made_ahead(
    batches: Iterator[Any], make: Callable[[Any], torch.Tensor], device: torch.device, made: torch.Tensor | None = None
) -> Iterator[Any]:
    """(make(inputs), targets) of each batch (inputs, targets), in order; `made`, int64 [1], counts them.

    Where a batch is asked for, the host waits until it has been issued, and the device's current stream until it is
    there. What `batches` or `make` raise is raised there too.
    """
    # small kernels get in between the step's large ones, which else make them wait
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def one() -> tuple[Any, Any] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        inputs, targets = batch
        if stream is None:
            batch, ready = (make(inputs), targets), None
        else:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                batch, ready = (make(inputs), targets), stream.record_event()
        if made is not None:
            made.add_(1)
        return batch, ready

    maker = ThreadPoolExecutor(1, thread_name_prefix="made-ahead")
    try:
        pending = deque(maker.submit(one) for _ in range(AHEAD_BATCHES))
        while (first := pending.popleft().result()) is not None:
            pending.append(maker.submit(one))
            batch, ready = first
            if ready is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(ready)
                batch[0].record_stream(current)  # or its memory were given to a later batch while this stream reads it
            yield batch
    finally:
        maker.shutdown(cancel_futures=True)
