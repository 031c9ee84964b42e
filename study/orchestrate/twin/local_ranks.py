"""Ranks of worker groups as local processes, connected over gloo, without Ray."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from study.orchestrate.processes.guard import guard_this_process
from study.orchestrate.protocol import KeeperProxy, Payload
from study.orchestrate.stuck import Calls
from study.orchestrate.twin.in_process import CallInLoop, RankDied
from study.plan.placement import Layout

GRACE_S = 10.0
"""Time after a rank's death in which the others may end by themselves."""


@dataclass(frozen=True)
class LocalProcesses:
    """A `RankBackend` with one local process per rank, connected over gloo, which runs `study.orchestrate.rank.serve`.

    `measure` replaces `study.orchestrate.rank.measure` and must be a function of a module. `preload` has the modules
    that the processes start with. A rank's process handle is its pid.
    """

    measure: Callable[..., Payload] | None = None
    preload: Sequence[str] = ("study.orchestrate.rank",)

    def prepare(self) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(self.preload))

    def launcher(self, keeper: Any, group_name: str, layout: Layout) -> Callable[[], None]:
        proxy = KeeperProxy(CallInLoop(keeper, asyncio.get_running_loop()), group_name)
        return lambda: self._run(proxy, layout)

    def _run(self, keeper: KeeperProxy, layout: Layout) -> None:
        import torch.distributed as dist

        context = multiprocessing.get_context("forkserver")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes: list[Any] = []
        for rank in range(len(layout.node_ids)):
            ours, theirs = context.Pipe()
            arguments = (layout, keeper.group, rank, store.port, theirs, self.measure)
            # not a daemon, because daemons cannot have loader processes
            processes.append(context.Process(target=_serve_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            threading.Thread(target=_answer_calls, args=(ours, keeper), daemon=True).start()
        _join(processes)
        for rank, process in enumerate(processes):
            if process.exitcode:
                raise RankDied(rank, ChildProcessError(f"its process ended with status {process.exitcode}"))

    def kill(self, process: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    async def calls_of(self, process: int) -> Calls | None:
        return None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return False


def _join(processes: Sequence[Any]) -> None:
    """Wait for all processes. After one has died, kill the others after `GRACE_S`."""
    alive = list(processes)
    while alive:
        died = any(process.exitcode for process in processes)
        if not wait([process.sentinel for process in alive], timeout=GRACE_S if died else None):
            for process in alive:
                process.kill()
        alive = [process for process in alive if process.exitcode is None]


def _answer_calls(pipe: Connection, keeper: KeeperProxy) -> None:
    """Forward a rank's calls to the keeper until the rank ends."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(keeper.call(method, *arguments))


@dataclass(frozen=True)
class CallThroughPipe:
    """Calls a method of the keeper from a rank's process."""

    pipe: Connection

    def __call__(self, method: str, *arguments: Any) -> Any:
        self.pipe.send((method, arguments))
        return self.pipe.recv()


def _serve_rank(
    layout: Layout, group_name: str, rank: int, port: int, pipe: Connection, measure: Callable[..., Payload] | None
) -> None:
    """Run one rank's process."""
    guard_this_process()
    os.environ.update(layout.kind.environment() | {"GLOO_SOCKET_IFNAME": "lo"})
    import torch
    import torch.distributed as dist

    from study.orchestrate.rank import RankFunctions, serve

    torch.set_num_threads(layout.kind.cpus_per_rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(layout.node_ids))
    functions = RankFunctions(measure=measure) if measure else RankFunctions()
    keeper = KeeperProxy(CallThroughPipe(pipe), group_name)
    serve(layout, layout.node_ids[rank], os.getpid(), torch.device("cpu"), keeper, functions)
