"""Process-wide state: set for each trial and restored afterwards.

A rank runs one trial after another. State left behind (seeds, threads, arithmetic modes, compiled code, cached memory)
would make results depend on the order of the trials.
"""

import contextlib
import fcntl
import gc
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from trainables.scratch import open_regular, user_folder
from trainables.step.precision import Precision
from trainables.trial import Trial

_ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def settings_for(trial: Trial, precision: Precision) -> Iterator[None]:
    """Set the trial's seeds, threads and arithmetic; reset the process afterwards."""
    _reset()
    threads = torch.get_num_threads()
    set_seeds(trial.seed + 1_000_003 * trial.repeat)
    torch.set_num_threads(trial.cpus_per_rank)
    # cuDNN caches its tuning per thread. DataParallel's threads live for one forward pass and would tune every time.
    torch.backends.cudnn.benchmark = not trial.deterministic and trial.parallel != "dp"
    torch.backends.cudnn.deterministic = trial.deterministic
    torch.use_deterministic_algorithms(trial.deterministic)
    _set_fp32_arithmetic(precision.fp32_arithmetic)
    try:
        with ExitStack() as stack:
            if trial.pin_cores:
                stack.enter_context(exclusive_cores(trial.cpus_per_rank))
            stack.enter_context(kernels_for(trial))
            yield
    finally:
        _reset()
        torch.set_num_threads(threads)
        release_memory()


@contextmanager
def kernels_for(trial: Trial) -> Iterator[None]:
    """Choose the trial's kernels of attention, and whether the compiler splits its graph for DDP."""
    with ExitStack() as stack:
        if trial.attention != "auto":
            stack.enter_context(sdpa_kernel(_ATTENTION[trial.attention]))
            # else the compiler reuses code that it compiled and stored for other kernels
            config: Any = torch.compiler.config
            stack.enter_context(config.patch(cache_key_tag=f"attention {trial.attention}"))
        if not trial.split_graph or trial.execution == "compile_blocks":  # blocks are parts of a graph already
            stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
        yield


def set_seeds(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch, on all devices."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rehearse(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Run one DDP step of a one-weight model. Collective over `group` (None: the default group).

    This triggers set-up on first use, such as connections between the ranks, before the first trial.
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
    """Release the last all-reduced buckets. Collective over the NCCL `group` (None: the default group).

    DDP waits for futures, not for NCCL's work objects, which keep their tensors. NCCL's watchdog checks every 100 ms
    whether they are done; the first collective after that frees the tensors.
    """
    if device.type == "cuda":
        gc.collect()
        nccl: Any = group or dist.group.WORLD
        nccl._wait_for_pending_works()  # as torch's own destroy_process_group does
        dist.barrier(group, device_ids=[device.index])


def release_memory() -> None:
    """Free unreferenced memory on the host and in CUDA's caching allocator, and reset peak memory statistics."""
    if "trainables.data.images.gpu.jpeg" in sys.modules:
        sys.modules["trainables.data.images.gpu.jpeg"].forget_decoders()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # documented in PyTorch's notes on CUDA, "cuBLAS workspaces"
        torch.cuda.empty_cache()
        reset_peak_memory([torch.device("cuda", number) for number in range(torch.cuda.device_count())])


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Reset the peak memory statistics of each GPU. CPUs are ignored."""
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
    """Set "ieee" or "tf32" arithmetic for fp32 matrix products, convolutions and recurrent layers."""
    backends: Any = torch.backends
    # torch also has older switches; if they disagree with the new ones, reading one raises, e.g. in `cudnn.flags`
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    backends.cudnn.allow_tf32 = kind == "tf32"
    # reset related switches, which a user's code may have changed, to their default "none"
    backends.fp32_precision = backends.cudnn.fp32_precision = backends.mkldnn.fp32_precision = "none"
    backends.mkldnn.conv.fp32_precision = backends.mkldnn.rnn.fp32_precision = "none"
    backends.mkldnn.matmul.fp32_precision = "tf32" if kind == "tf32" else "none"
    for operation in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        operation.fp32_precision = kind


@contextmanager
def exclusive_cores(count: int) -> Iterator[set[int]]:
    """Pin this process to `count` cores that no other process pins itself to in this way. Yields their numbers.

    Pins all threads of the process, and threads started within the context. Existing child processes, such as loaders,
    are not pinned. A file lock per core reserves it without communication between ranks and ends with the process.
    Raises RuntimeError if too few cores are free.
    """
    allowed = sorted(os.sched_getaffinity(0))
    with ExitStack() as locks:
        cores: set[int] = set()
        for core in allowed:
            if len(cores) < count and _lock(core, locks):
                cores.add(core)
        if len(cores) < count:
            raise RuntimeError(
                f"pin_cores requires {count} free cores per rank, but only {len(cores)} of the {len(allowed)} cores "
                "available to this process are free; run fewer ranks or trials at a time, or lower cpus_per_rank"
            )
        _pin_threads(cores)
        try:
            yield cores
        finally:
            _pin_threads(set(allowed))


def _lock(core: int, locks: ExitStack) -> bool:
    """Try to lock a core until `locks` is closed. Returns False if another process holds the lock."""
    path = user_folder() / f"core-{core}"
    file = locks.enter_context(open_regular(path, os.O_RDWR | os.O_CREAT, os.getuid()))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pin_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)
