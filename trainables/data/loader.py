"""From a data set to an endless stream of batches, one stream a rank."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

from trainables.batch import map_tensors, to_device
from trainables.data.sampler import RankSampler
from trainables.data.source import ImageDataset
from trainables.registry import AHEAD_BATCHES
from trainables.trial import Trial
from trainables.workload import Workload


def endless_batches(
    trial: Trial,
    workload: Workload,
    rank: int,
    delivered: torch.Tensor | None = None,
    made: torch.Tensor | None = None,
) -> Iterator[Any]:
    """Batches (inputs, targets) for ever, or tuples of `accumulation_steps` of them; see `loader` and `made_ahead`, unless
    resident."""
    if workload.resident:
        assert isinstance(workload.dataset, TensorDataset)
        return _accumulated(itertools.repeat(workload.dataset.tensors), trial.accumulation_steps)
    indices = (workload.batch_indices or partial(sampler, trial, workload))(rank)
    batches = loader(trial, workload, workload.dataset, indices, trial.seed, delivered)
    return _accumulated(beside_the_step(trial, workload, iter(batches), made), trial.accumulation_steps)


def beside_the_step(
    trial: Trial, workload: Workload, batches: Iterator[Any], made: torch.Tensor | None = None
) -> Iterator[Any]:
    """The batches, with what is done for them ahead of the step: the workload's own work, the copy to the device."""
    if not works_ahead(trial, workload):
        return batches
    device = device_of(trial)

    def make(batch: Any) -> Any:
        inputs, targets = batch
        if workload.ahead is not None:
            inputs = workload.ahead(inputs)
        return to_device((inputs, targets), device, trial.non_blocking) if trial.copy_ahead else (inputs, targets)

    return made_ahead(batches, make, device, made)


def works_ahead(trial: Trial, workload: Workload) -> bool:
    """Whether a thread beside the step makes batches ready before they are asked for."""
    return trial.copy_ahead or workload.ahead is not None


def loader(
    trial: Trial,
    workload: Workload,
    dataset: Any,
    indices: Iterable[list[int]],
    seed: int,
    delivered: torch.Tensor | None = None,
) -> DataLoader[Any]:
    """The batches of these indices, on the host, in pinned memory where the trial says so; `seed` is the processes'.

    Loader processes come from a forkserver: they inherit neither CUDA nor threads of the rank. Each counts the batches that it
    has made in its own element of `delivered`, int64 in shared memory.
    """
    collate = workload.collate
    if delivered is not None and trial.loader_workers:
        collate = partial(_counted, collate, delivered)
    workers: dict[str, Any] = {}
    if trial.loader_workers:
        workers = {"prefetch_factor": trial.prefetch_batches, "multiprocessing_context": "forkserver"}
    return DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=trial.loader_workers,
        collate_fn=collate,
        pin_memory=trial.pin_memory and trial.device == "cuda",
        generator=torch.Generator().manual_seed(seed),
        **workers,
    )


def _counted(collate: Callable[[list[Any]], Any], delivered: torch.Tensor, samples: list[Any]) -> Any:
    batch = collate(samples)
    delivered[get_worker_info().id] += 1  # type: ignore[union-attr]
    return batch


def _accumulated(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Tuples of so many batches, where a step takes several."""
    return batches if count == 1 else zip(*[batches] * count, strict=True)


def sampler(trial: Trial, workload: Workload, rank: int, first_epoch: int = 0) -> RankSampler:
    """Return the rank's index batches of the workload's data set."""
    numbered = getattr(workload.dataset, "numbers_epochs", False)
    return RankSampler(trial, len(workload.dataset), rank, first_epoch=first_epoch, numbered=numbered)  # type: ignore[arg-type]


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


CHUNK = 4096
"""images that are resized at a time"""


def device_of(trial: Trial) -> torch.device:
    """The device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


def all_on_device(dataset: ImageDataset, device: torch.device) -> TensorDataset:
    """All images uint8 [N, c, edge, edge] and labels int64 [N] of a data set. Raises its DataError."""
    parts = [dataset.__getitems__(indices.tolist()) for indices in torch.arange(len(dataset)).split(CHUNK)]
    return TensorDataset(*(torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True)))
