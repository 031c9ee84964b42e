"""Turn a data set into an endless stream of batches, one stream per rank."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from trainables.batch import map_tensors, sample_count, to_device
from trainables.data.sampler import RankSampler
from trainables.data.source import ImageDataset
from trainables.registry import AHEAD_BATCHES
from trainables.trial import Trial
from trainables.workload import Workload, WorkloadError, pair

CHUNK = 4096
"""images resized at a time"""


def endless_batches(
    trial: Trial,
    workload: Workload,
    rank: int,
    worker_counts: torch.Tensor | None = None,
    prefetch_count: torch.Tensor | None = None,
) -> Iterator[Any]:
    """Yield batches forever, or tuples of `accumulation_steps` batches.

    A resident data set is one batch that repeats; a stream or a custom loader is repeated when it ends, see `repeated`.
    `worker_counts` is described in `loader`, `prefetch_count` in `prefetch`. Raises WorkloadError.
    """
    if workload.resident:
        assert isinstance(workload.dataset, TensorDataset)
        return _accumulated(itertools.repeat(workload.dataset.tensors), trial.accumulation_steps)
    if workload.loader is not None:
        batches = repeated(trial, workload.loader(trial, rank, trial.processes), "loader")
    elif isinstance(workload.dataset, IterableDataset):
        stream = loader(trial, workload, workload.dataset, None, trial.seed + rank, worker_counts)
        batches = repeated(trial, stream, "data set")
    else:
        indices = (workload.batch_indices or partial(sampler, trial, workload))(rank)
        batches = started(loader(trial, workload, workload.dataset, indices, trial.seed, worker_counts))
    return _accumulated(with_prefetch(trial, workload, batches, prefetch_count), trial.accumulation_steps)


def repeated(trial: Trial, batches: Iterable[Any], what: str, first_epoch: int = 0) -> Iterator[Any]:
    """Yield batches of a stream or a custom loader, which is started again when it ends.

    An incomplete batch at the end is dropped. Before each pass, the sampler's `set_epoch` is called if it has one, as
    for DistributedSampler. Raises WorkloadError if there is no batch, or if batches have another size than the trial's.
    """
    set_epoch = getattr(getattr(batches, "sampler", None), "set_epoch", None)
    for epoch in itertools.count(first_epoch):
        if set_epoch is not None:
            set_epoch(epoch)
        count = 0
        for batch in started(batches):
            samples = sample_count(batch)
            if samples is not None and samples != trial.batch_per_process:
                if count and samples < trial.batch_per_process:
                    continue
                raise WorkloadError(
                    f"the {what} yields batches of {samples} samples, but the trial's have {trial.batch_per_process}; "
                    "use trial.batch_per_gpu as the batch size"
                )
            count += 1
            yield batch
        if not count and epoch > first_epoch:
            raise WorkloadError(
                f"the {what} cannot be repeated after it ended; return an iterable that can be repeated, such as a "
                "DataLoader, or an endless generator"
            )
        if not count:
            raise WorkloadError(f"the {what} yields no batch of {trial.batch_per_process} samples; use a smaller batch")


def started(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator of the batches. Raises WorkloadError if a loader process cannot receive the data set."""
    try:
        return iter(batches)
    except Exception as error:
        if type(error).__name__ != "PicklingError" and "pickle" not in str(error) and "local object" not in str(error):
            raise
        raise WorkloadError(
            f"the data set or collate function cannot be sent to a loader process ({error}); define functions and "
            "classes at the top level of the workload's file, not as a lambda or inside a function, or use "
            "loader_workers 0"
        ) from error


def with_prefetch(
    trial: Trial, workload: Workload, batches: Iterator[Any], prefetch_count: torch.Tensor | None = None
) -> Iterator[Any]:
    """Return the batches, prepared ahead of the step if the trial asks for it.

    Preparing means the workload's `ahead` function and, with `copy_ahead`, the copy to the device.
    """
    if not uses_prefetch(trial, workload):
        return batches
    device = device_of(trial)

    def prepare(batch: Any) -> Any:
        if workload.ahead is not None:
            inputs, targets = pair(batch)
            batch = workload.ahead(inputs), targets
        return to_device(batch, device, trial.non_blocking) if trial.copy_ahead else batch

    return prefetch(batches, prepare, device, prefetch_count)


def uses_prefetch(trial: Trial, workload: Workload) -> bool:
    """Return True if a thread prepares batches during the step, before they are requested."""
    return trial.copy_ahead or workload.ahead is not None


def loader(
    trial: Trial,
    workload: Workload,
    dataset: Any,
    indices: Iterable[list[int]] | None,
    seed: int,
    worker_counts: torch.Tensor | None = None,
) -> DataLoader[Any]:
    """Return a DataLoader for batches of these indices, on the host, pinned if the trial asks for it.

    `indices` is None for an IterableDataset, whose samples become batches in its own order, without a smaller last one.
    `seed` seeds the loader processes. They start from a forkserver, so they inherit neither CUDA nor threads of the
    rank. Each counts its batches in its own element of `worker_counts`, int64 in shared memory.
    """
    collate = workload.collate
    if worker_counts is not None and trial.loader_workers:
        collate = partial(_counting_collate, collate, worker_counts)
    workers: dict[str, Any] = {}
    if trial.loader_workers:
        workers = {"prefetch_factor": trial.prefetch_batches, "multiprocessing_context": "forkserver"}
    batches: dict[str, Any] = {"batch_sampler": indices}
    if indices is None:
        batches = {"batch_size": trial.batch_per_process, "drop_last": True}
    return DataLoader(
        dataset,
        **batches,
        num_workers=trial.loader_workers,
        collate_fn=collate,
        pin_memory=trial.pin_memory and trial.device == "cuda",
        generator=torch.Generator().manual_seed(seed),
        **workers,
    )


def _counting_collate(collate: Callable[[list[Any]], Any], worker_counts: torch.Tensor, samples: list[Any]) -> Any:
    batch = collate(samples)
    worker_counts[get_worker_info().id] += 1  # type: ignore[union-attr]
    return batch


def _accumulated(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """Group batches into tuples of `count`, if a step takes several."""
    return batches if count == 1 else zip(*[batches] * count, strict=True)


def sampler(trial: Trial, workload: Workload, rank: int, first_epoch: int = 0) -> RankSampler:
    """Return the rank's index batches of the workload's data set."""
    numbered = getattr(workload.dataset, "numbers_epochs", False)
    return RankSampler(trial, len(workload.dataset), rank, first_epoch=first_epoch, numbered=numbered)  # type: ignore[arg-type]


def prefetch(
    batches: Iterator[Any],
    prepare: Callable[[Any], Any],
    device: torch.device,
    count: torch.Tensor | None = None,
) -> Iterator[Any]:
    """Yield prepare(batch) in order, keeping `AHEAD_BATCHES` prepared in advance by a thread with its own CUDA stream.

    A request waits on the host until the batch's work is issued, and makes the current stream wait until that work is
    done. Errors of `batches` and `prepare` are raised at that request. `count`, int64 [1], counts prepared batches.
    """
    # High priority, so that these small kernels run between the large kernels of the step instead of after them.
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def record_use(tensor: torch.Tensor) -> torch.Tensor:
        """Keep the allocator from reusing the tensor's memory for a later batch while the current stream reads it."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    def prepare_next() -> tuple[Any, Any] | None:
        batch = next(batches, None)
        if batch is None:
            return None
        if stream is None:
            batch, ready = prepare(batch), None
        else:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                batch, ready = prepare(batch), stream.record_event()
        if count is not None:
            count.add_(1)
        return batch, ready

    executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        pending = deque(executor.submit(prepare_next) for _ in range(AHEAD_BATCHES))
        while (first := pending.popleft().result()) is not None:
            pending.append(executor.submit(prepare_next))
            batch, ready = first
            if ready is not None:
                torch.cuda.current_stream(device).wait_event(ready)
                batch = map_tensors(record_use, batch)
            yield batch
    finally:
        executor.shutdown(cancel_futures=True)


def device_of(trial: Trial) -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


def all_on_device(dataset: ImageDataset, device: torch.device) -> TensorDataset:
    """Copy a data set to the device: images uint8 [N, c, edge, edge] and labels int64 [N]. Raises DataError."""
    parts = [dataset.__getitems__(indices.tolist()) for indices in torch.arange(len(dataset)).split(CHUNK)]
    return TensorDataset(*(torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True)))
