"""Batches made ready beside the step: in a thread, and on a GPU in a stream of its own."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

DEPTH = 2
"""batches that are made before they are asked for: one that waits for the step, one that is being made"""


def made_ahead(batches: Iterator[Any], make: Callable[[Any], torch.Tensor], device: torch.device) -> Iterator[Any]:
    """(make(inputs), targets) of each batch (inputs, targets), in order.

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
            return (make(inputs), targets), None
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return (make(inputs), targets), stream.record_event()

    maker = ThreadPoolExecutor(1, thread_name_prefix="made-ahead")
    try:
        pending = deque(maker.submit(one) for _ in range(DEPTH))
        while (made := pending.popleft().result()) is not None:
            pending.append(maker.submit(one))
            batch, ready = made
            if ready is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(ready)
                batch[0].record_stream(current)  # or its memory were given to a later batch while this stream reads it
            yield batch
    finally:
        maker.shutdown(cancel_futures=True)
