"""Ranks on GPUs that nobody has, which run `study.rank` with a fake measurement: a process each, connected over gloo, or, for
more of them than a machine can hold, a thread each.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.in_process import fake_measurement
from study import rank as rank_side
from trainables.registry import DATASETS, MODELS, PARALLEL, PRECISIONS, modules

PRELOAD = ["benchmarks.fake_ranks", *rank_side.RANK_MODULES, *modules(MODELS, DATASETS, PRECISIONS, PARALLEL)]


def start_processes(group: Any, keeper: Any) -> None:
    """In the place of a TorchTrainer: the group's ranks as processes of this machine, until all have ended."""
    vars(sys.modules["__main__"]).pop("__file__", None)  # or every rank would import the benchmark again
    vars(sys.modules["__main__"])["__spec__"] = None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe()
    processes = []
    for rank in range(len(group.layout.node_ids)):
        arguments = (group.layout, group.name, rank, store.port, theirs if rank == 0 else None)
        processes.append(context.Process(target=serve_rank, args=arguments, daemon=True))
        processes[-1].start()
    theirs.close()
    with contextlib.suppress(EOFError):
        while True:
            method, values = ours.recv()
            ours.send(getattr(keeper, method).remote(*values).result())
    for process in processes:
        process.join()


class ToKeeper:
    """A rank's reports through a pipe; only rank 0 has one, and no rank of these fails."""

    def __init__(self, pipe: Connection | None, group_name: str) -> None:
        self.pipe, self.group_name = pipe, group_name

    def call(self, method: str, *values: Any) -> Any:
        assert self.pipe is not None
        self.pipe.send((method, (self.group_name, *values)))
        return self.pipe.recv()

    def opened(self, environment: dict[str, Any], handles: list[Any]) -> None:
        self.call("opened", environment, handles)

    def next_job(self) -> dict[str, Any] | None:
        return self.call("next_job")

    def finished(self, job_id: str, payloads: list[dict[str, Any]]) -> None:
        self.call("finished", job_id, payloads)

    def epoch_ended(self, job_id: str, row: dict[str, Any]) -> None:
        self.call("epoch_ended", job_id, row)

    def load_checkpoint(self, job_id: str) -> bytes | None:
        return self.call("load_checkpoint", job_id)

    def save_checkpoint(self, job_id: str, content: bytes) -> None:
        self.call("save_checkpoint", job_id, content)

    def failed(self, job_id: str, failure: dict[str, Any]) -> None:
        raise RuntimeError(failure["traceback"])


def serve_rank(layout: Any, group_name: str, rank: int, port: int, pipe: Connection | None) -> None:
    """A rank's process: `study.rank.serve` with a fake measurement."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(layout.node_ids))
    with mock.patch.object(rank_side, "run", fake_measurement):
        reports = ToKeeper(pipe, group_name)
        rank_side.serve(layout, layout.node_ids[rank], os.getpid(), torch.device("cpu"), reports)


# ----------------------------------------------------------------------------------------------------------- threads


def start_threads(group: Any, keeper: Any) -> None:
    """In the place of a TorchTrainer: the group's ranks as threads, until all have ended."""
    meeting = Meeting(len(group.layout.node_ids))

    def serve(rank: int) -> None:
        meeting.here.rank = rank
        reports = DirectReports(keeper, group.name)
        rank_side.serve(group.layout, group.layout.node_ids[rank], None, torch.device("cpu"), reports)

    with (
        mock.patch.object(rank_side, "dist", meeting),
        mock.patch.object(rank_side, "run", fake_measurement),
        mock.patch.object(rank_side, "rehearse", lambda *_: None),
    ):
        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(meeting.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class DirectReports(ToKeeper):
    """The same reports as calls within this process."""

    def __init__(self, keeper: Any, group_name: str) -> None:
        self.keeper, self.group_name = keeper, group_name

    def call(self, method: str, *values: Any) -> Any:
        return getattr(self.keeper, method).remote(self.group_name, *values).result()


class Meeting:
    """In the place of `torch.distributed` between threads: the calls that `study.rank` makes, objects pickled as there.

    Every group is of all ranks: trials of these benchmarks use the whole layout.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()
        self.barrier = threading.Barrier(size)
        self.slots: list[bytes] = [b""] * size

    def get_rank(self) -> int:
        return int(self.here.rank)

    def get_world_size(self) -> int:
        return self.size

    def new_group(self, *_: Any, **__: Any) -> None:
        return None

    def broadcast_object_list(self, values: list[Any], src: int, group: Any = None) -> None:
        self._put(values if self.get_rank() == src else None)
        values[:] = pickle.loads(self.slots[src])
        self.barrier.wait()

    def all_gather_object(self, everyone: list[Any], mine: Any, group: Any = None) -> None:
        self._put(mine)
        everyone[:] = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()

    def gather_object(self, mine: Any, everyone: list[Any] | None, dst: int, group: Any = None) -> None:
        self._put(mine)
        if everyone is not None:
            everyone[:] = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()

    def _put(self, value: Any) -> None:
        self.slots[self.get_rank()] = pickle.dumps(value)
        self.barrier.wait()
