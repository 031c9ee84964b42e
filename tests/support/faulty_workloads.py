"""User workloads that work or fail, for tests of studies. Failures happen on the last rank only."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from trainables.trial import Trial
from trainables.workload import HeldOutSet, Workload

TOO_LARGE_BATCH = 16
HANGS, FORKS = "hangs", "forks"
FORKED = 10
STOPPED_S = 2.0
STARVED = Path("/tmp/scaling-study-tests-starved")
"""if this file exists on a host, `slow` runs out of memory there"""


def sound(trial: Trial) -> Workload:
    """Train a linear model on random vectors."""
    return _workload(lambda: None)


def raises(trial: Trial) -> Workload:
    """Raise an exception during a step."""

    def fail() -> None:
        raise ValueError("these <b>targets</b> are wrong")

    return _workload(lambda: _on_last_rank(fail))


def needs_too_much_memory(trial: Trial) -> Workload:
    """Run out of memory if the batch is at least TOO_LARGE_BATCH."""
    return _workload(lambda: torch.empty(10**15) if trial.batch_per_gpu >= TOO_LARGE_BATCH else None)


def hangs(trial: Trial) -> Workload:
    """Hang, so that the other ranks wait in their all-reduce.

    If `data_dir` is set, first start a process that outlives the one that started it. Its id is in the file HANGS.
    """

    def hang() -> None:
        if trial.data_dir:
            path = Path(trial.data_dir, HANGS)
            subprocess.run(["sh", "-c", f"sleep 600 & echo $! > {path}.part; mv {path}.part {path}"], check=True)
        time.sleep(3600)

    return _workload(lambda: _on_last_rank(hang))


def dies(trial: Trial) -> Workload:
    """Die by SIGKILL, without an exception."""
    return _workload(lambda: _on_last_rank(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def leaves(trial: Trial) -> Workload:
    """End the process at once, as if all were well."""
    return _workload(lambda: _on_last_rank(lambda: os._exit(0)))


def forks(trial: Trial) -> Workload:
    """Start processes that start processes, until the system refuses. Their ids are in the file FORKS in `data_dir`."""

    def fork() -> None:
        for _ in range(FORKED):
            if not os.fork():
                os.fork()
                with Path(trial.data_dir, FORKS).open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(600)
                os._exit(0)
        time.sleep(0.5)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    return _workload(lambda: _on_last_rank(fork))


def exits(trial: Trial) -> Workload:
    """Exit in a step as if all went well."""
    return _workload(lambda: _on_last_rank(lambda: sys.exit(0)))


def learns_nothing(trial: Trial) -> Workload:
    """Return a loss that is NaN in every step."""
    workload = _workload(lambda: None)
    return replace(workload, loss=lambda outputs, targets: outputs.sum() * float("nan"))


def stops(trial: Trial) -> Workload:
    """Stop a rank for `STOPPED_S` in its tenth step, the fourth of the window with phases after two of warm-up."""
    steps = itertools.count(1)

    def stop() -> None:
        if next(steps) == 10:
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    return _workload(lambda: _on_last_rank(stop))


def slow(trial: Trial) -> Workload:
    """Sleep in every step, so that a test can interrupt it. Each rank creates a file in the folder $STEPPING."""

    def step() -> None:
        if folder := os.environ.get("STEPPING"):
            (Path(folder) / str(os.getpid())).touch()
        if STARVED.exists():
            torch.empty(10**15)
        time.sleep(0.1)

    return _workload(step)


def trains(trial: Trial) -> Workload:
    """Take half a second per epoch of 8 steps of 32 samples, so that a test can watch and interrupt it."""
    return _workload(lambda: time.sleep(0.06))


def dies_once(trial: Trial) -> Workload:
    """Train as `trains`, but die in the third epoch, once. A file in `data_dir` records that."""
    died = Path(trial.data_dir, "died")
    steps = itertools.count(1)

    def step() -> None:
        time.sleep(0.06)
        if next(steps) == 20 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return _workload(step)


def _on_last_rank(act: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        act()


def _workload(act: Any) -> Workload:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        act()
        return nn.functional.cross_entropy(outputs, targets)

    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(256, 8, generator=generator), torch.randint(4, (256,), generator=generator)
    return Workload(
        model=nn.Linear(8, 4),
        dataset=TensorDataset(*samples),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        validation=HeldOutSet(TensorDataset(*samples), nn.functional.cross_entropy),
    )
