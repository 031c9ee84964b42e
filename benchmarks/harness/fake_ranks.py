"""Ranks on simulated GPUs, which run `study.orchestrate.rank` with a simulated measurement.

Each rank is a process, connected over gloo (`study.orchestrate.twin.local_ranks`), or a thread, if there are more ranks
than processes fit on a machine.
"""

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from study.orchestrate.processes.fork_server import RANK_MODULES
from study.orchestrate.protocol import Job, KeeperProxy, Payload
from study.orchestrate.rank import RankFunctions, TrialRank, serve
from study.orchestrate.twin.in_process import CallInLoop
from study.orchestrate.twin.local_ranks import LocalProcesses
from study.orchestrate.twin.simulated_ranks import simulated_payload
from study.plan.placement import Layout
from trainables.registry import DATASETS, MODELS, PARALLEL, PRECISIONS, modules

PRELOAD = ["benchmarks.harness.fake_ranks", *RANK_MODULES, *modules(MODELS, DATASETS, PRECISIONS, PARALLEL)]


def simulated_measure(job: Job, trial_rank: TrialRank, keeper: KeeperProxy) -> Payload:
    """Return the rows of this rank at once."""
    return simulated_payload(job.trial, trial_rank.rank)


def process_ranks() -> LocalProcesses:
    """Return ranks that are processes of this machine."""
    return LocalProcesses(simulated_measure, PRELOAD)


class ThreadRanks:
    """Ranks that are threads. A `RankBackend` whose ranks never fail."""

    def prepare(self) -> None:
        pass

    def renews(self, layout: Layout) -> bool:
        return False

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        proxy = KeeperProxy(CallInLoop(keeper, asyncio.get_running_loop()), name)
        meeting = Meeting(len(layout.node_ids))
        functions = RankFunctions(meeting, lambda device, group: None, simulated_measure)

        def serve_rank(rank: int) -> None:
            meeting.here.rank = rank
            serve(layout, layout.node_ids[rank], None, torch.device("cpu"), proxy, functions)

        def run() -> None:
            threads = [threading.Thread(target=serve_rank, args=(rank,), daemon=True) for rank in range(meeting.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    def kill(self, process: None) -> None:
        pass

    async def calls_of(self, process: None) -> None:
        return None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return False


class Meeting:
    """Replace the calls of `study.orchestrate.rank` to `torch.distributed` between threads. Objects are pickled too.

    Every group contains all ranks, because trials of these benchmarks use the complete layout.
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
