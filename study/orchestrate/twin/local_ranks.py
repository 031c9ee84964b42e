"""Ranks of worker groups as local processes, connected over gloo, without Ray."""

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from study.orchestrate.processes.ranks import Place, calls_of_rank, host_rank
from study.orchestrate.protocol import Payload
from study.orchestrate.stuck import Calls
from study.orchestrate.twin.in_process import CallInLoop, RankDied
from study.plan.placement import Layout

GRACE_S = 10.0
"""Time after a rank's death in which the others may end by themselves."""


@dataclass(frozen=True)
class LocalProcesses:
    """A `RankBackend` with one local process per rank, connected over gloo, which runs `study.orchestrate.rank.serve`.

    `measure` replaces `study.orchestrate.rank.measure` and must be a function of a module. `preload` has the modules
    that the processes start with. A rank's process handle is its Process.
    """

    measure: Callable[..., Payload] | None = None
    preload: Sequence[str] = ("study.orchestrate.rank",)

    def prepare(self) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(self.preload))

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        call = CallInLoop(keeper, asyncio.get_running_loop())
        return lambda: self._run(call, name, layout)

    def renews(self, layout: Layout) -> bool:
        return True

    def _run(self, call: Callable[..., Any], name: str, layout: Layout) -> None:
        processes: list[BaseProcess] = []
        ended: queue.Queue[tuple[int, BaseException | None]] = queue.Queue()

        def started(process: BaseProcess) -> BaseProcess:
            processes.append(process)
            return process

        def host(rank: int) -> None:
            place = Place(
                rank, layout.node_ids[rank], "127.0.0.1", variables={"GLOO_SOCKET_IFNAME": "lo"}, measure=self.measure
            )
            try:
                host_rank(place, name, call, started)
                ended.put((rank, None))
            except BaseException as error:  # noqa: BLE001  any exception is that of the launch
                ended.put((rank, error))

        for rank in range(len(layout.node_ids)):
            threading.Thread(target=host, args=(rank,), daemon=True).start()
        for _ in layout.node_ids:
            rank, error = ended.get()
            if error is not None:
                threading.Timer(GRACE_S, _kill, [processes]).start()
                raise RankDied(rank, error)

    def kill(self, process: BaseProcess) -> None:
        process.kill()

    async def calls_of(self, process: BaseProcess) -> Calls | None:
        return await asyncio.to_thread(calls_of_rank, process.pid)

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return False


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
