"""The state of the process that outlives a trial: set for each trial, put back after it.

A rank serves trial after trial. Whatever one of them leaves behind (seeds, threads, arithmetic modes, compiled code,
cached memory) would make the next one's numbers depend on the order of the grid.
"""

import contextlib
import fcntl
import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainables.step.precision import Precision
from trainables.trial import Trial


@contextmanager
def settings_for(trial: Trial, precision: Precision) -> Iterator[None]:
    """The trial's seeds, threads and arithmetic for the length of a trial; a clean process afterwards."""
    _reset()
    threads = torch.get_num_threads()
    set_seeds(trial.seed + 1_000_003 * trial.repeat)
    torch.set_num_threads(trial.cpus_per_rank)
    # cuDNN's tuning is remembered by thread, and DataParallel's threads live for one forward pass: each would tune anew
    torch.backends.cudnn.benchmark = not trial.deterministic and trial.parallel != "dp"
    torch.backends.cudnn.deterministic = trial.deterministic
    torch.use_deterministic_algorithms(trial.deterministic)
    _set_fp32_arithmetic(precision.fp32_arithmetic)
    try:
        with own_cores(trial.cpus_per_rank) if trial.pin_cores else nullcontext():
            yield
    finally:
        _reset()
        torch.set_num_threads(threads)
        release_memory()


def set_seeds(seed: int) -> None:
    """Python's, numpy's and torch's random numbers, on all devices, begin anew."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rehearse(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """One step of a one-weight model under DDP; every rank of `group` (None: the default one) calls this.

    What is set up on first use, connections between the ranks among it, is not left to the first trial.
    """
    model = DistributedDataParallel(
        torch.nn.Linear(1, 1).to(device), device_ids=[device] if device.type == "cuda" else None, process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(torch.ones(1, 1, device=device)).sum()
    loss.backward()
    optimizer.step()
    drop_buckets(group, device)


def drop_buckets(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Makes NCCL's group (None: the default one) let go of the last reduced buckets; every rank of it calls this.

    DDP waits for its futures, not for NCCL's works. Tensors of such works are freed by the first collective after the
    group's watchdog, which looks every 100 ms, has seen that they are done.
    """
    if device.type == "cuda":
        gc.collect()
        nccl: Any = group or dist.group.WORLD
        nccl._wait_for_pending_works()  # as torch's own destroy_process_group does
        dist.barrier(group, device_ids=[device.index])


def release_memory() -> None:
    """Frees what no one holds any more, on the host and in CUDA's caching allocator."""
    if "trainables.data.images.gpu.jpeg" in sys.modules:
        sys.modules["trainables.data.images.gpu.jpeg"].forget_decoders()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # PyTorch's notes on CUDA, "cuBLAS workspaces", name this call
        torch.cuda.empty_cache()
        forget_peaks([torch.device("cuda", number) for number in range(torch.cuda.device_count())])


def forget_peaks(devices: Sequence[torch.device]) -> None:
    """Peak memory of each GPU is from now on that of what follows."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def _reset() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.clear_autocast_cache()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    _set_fp32_arithmetic("ieee")
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _set_fp32_arithmetic(kind: str) -> None:
    """Arithmetic "ieee" or "tf32" for fp32 matrix products, convolutions and recurrent layers; each has a switch of its own."""
    backends: Any = torch.backends
    # torch has older switches for the same: where they disagree, reading one raises, as `cudnn.flags` does
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    backends.cudnn.allow_tf32 = kind == "tf32"
    # the switches above and beside ours, which a user's code may have flipped; "none" is their default
    backends.fp32_precision = backends.cudnn.fp32_precision = backends.mkldnn.fp32_precision = "none"
    backends.mkldnn.conv.fp32_precision = backends.mkldnn.rnn.fp32_precision = "none"
    backends.mkldnn.matmul.fp32_precision = "tf32" if kind == "tf32" else "none"
    for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operation.fp32_precision = kind


@contextmanager
def own_cores(count: int) -> Iterator[set[int]]:
    """This process on `count` cores on which no other process within `own_cores` is; gives their numbers.

    All its threads go there, and threads that it starts meanwhile; processes that exist already, loaders among them, stay
    where they are. A core is held by a lock on a file, which ends with the process that holds it, so that ranks need not
    know of each other. Raises RuntimeError where too few cores are free.
    """
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as held:
        own: set[int] = set()
        for core in allowed:
            if len(own) < count and _lock(core, held):
                own.add(core)
        if len(own) < count:
            raise RuntimeError(
                f"pin_cores needs {count} cores for each rank, and {len(own)} of the {len(allowed)} that this process "
                "may use are free: run fewer ranks or trials at a time, or lower cpus_per_rank"
            )
        _move(own)
        try:
            yield own
        finally:
            _move(set(allowed))


def _lock(core: int, held: ExitStack) -> bool:
    path = Path(tempfile.gettempdir()) / f"scaling-study-core-{os.getuid()}-{core}"
    file: IO[bytes] = held.enter_context(path.open("ab"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _move(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
