"""Batches made ready beside the step: in a thread, and on a GPU in a stream of its own."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainables.batch import map_tensors
from trainables.registry import AHEAD_BATCHES


def made_ahead(
    batches: Iterator[Any], make: Callable[[Any], Any], device: torch.device, made: torch.Tensor | None = None
) -> Iterator[Any]:
    """make(batch) of each batch, in order; `made`, int64 [1], counts them.

    Where a batch is asked for, the host waits until it has been issued, and the device's current stream until it is
    there. What `batches` or `make` raise is raised there too.
    """
    # small kernels get in between the step's large ones, which else make them wait
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, whose memory would else be given to a later batch while the current stream reads it."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    def one() -> tuple[Any, Any] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        if stream is None:
            batch, ready = make(batch), None
        else:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                batch, ready = make(batch), stream.record_event()
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
                torch.cuda.current_stream(device).wait_event(ready)
                batch = map_tensors(kept, batch)
            yield batch
    finally:
        maker.shutdown(cancel_futures=True)
