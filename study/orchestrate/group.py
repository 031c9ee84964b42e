"""A live worker group from the keeper's side: jobs, failures of ranks, and the verdict on an unfinished job.

A backend starts and kills ranks: Ray Train (`study/orchestrate/worker_group.py`) or local threads and processes
(`study/orchestrate/twin`). One launch of a backend can serve several groups, each with fresh processes
(`study/orchestrate/processes/ranks.py`). Any failure ends the launch, because ranks that wait in a collective for a
failed rank can only be ended from outside.
"""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from study.orchestrate.failures import RankDeathError, cause_of, first_line, is_lost_peer, is_out_of_memory
from study.orchestrate.protocol import Environment, Failure, Job, Outcome, Payload, RankProcess
from study.orchestrate.stuck import Calls, calls_as_text, culprits, wait_for_each_other
from study.plan.placement import Layout, members
from trainables.clock import unix_s


class RankBackend(Protocol):
    """Starts, queries and kills the ranks of worker groups. A process handle is the `process` argument of `serve`."""

    def prepare(self) -> None:
        """Prepare this process. Called once, before the keeper's first group."""

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        """Return a function that runs a launch until its ranks have ended, and raises the error that ended them.

        Called in the keeper's event loop, but the function runs in its own thread. Ranks call `keeper` back. `name` is
        that of the launch and of its first group.
        """

    def renews(self, layout: Layout) -> bool:
        """Return True if a launch serves group after group: its ranks ask the keeper for each (`next_group`)."""

    def kill(self, process: Any) -> None:
        """Kill a rank. No error if it has ended."""

    async def calls_of(self, process: Any) -> Calls | None:
        """Return the call stack of a rank, None if it does not answer."""

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Return True if an error of the backend means that a host's memory ran out."""


def logs_of(failures: Sequence[Failure]) -> str:
    """Return the tracebacks, or the output, of all ranks that failed."""
    return "\n".join(f"rank {failure.rank} on node {failure.node_id}\n{failure.traceback}" for failure in failures)


@dataclass(frozen=True)
class GroupPlan:
    """A worker group that the ranks of a launch start."""

    name: str
    layout: Layout


class GroupError(Exception):
    """A worker group that could not be started."""

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


class Launch:
    """One call of a backend's launcher in a thread of the keeper. Its ranks form one worker group after another."""

    def __init__(self, name: str, layout: Layout, backend: RankBackend):
        self.name, self.layout, self.backend = name, layout, backend
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: BaseException | None = None
        self.handles: dict[int, Any] = {}
        """of the ranks that have reported, for `RankBackend.kill`"""
        self._groups: list[GroupPlan] = []
        self._is_closing = False
        self._changed = asyncio.Condition()

    def start(self, keeper: Any) -> None:
        """Start the ranks. Must be called in the keeper's event loop."""
        loop = asyncio.get_running_loop()
        run_ranks = self.backend.launcher(keeper, self.name, self.layout)

        def run() -> None:
            try:
                run_ranks()
            except BaseException as error:  # noqa: BLE001  the keeper must learn of any end of the thread
                self.error = error
            with contextlib.suppress(RuntimeError):  # the keeper has ended, and nobody asks any more
                loop.call_soon_threadsafe(self.ended.set_result, None)

        threading.Thread(target=run, name=f"launch {self.name}", daemon=True).start()

    def fits(self, layout: Layout) -> bool:
        """Return True if another group with this layout can follow on the same ranks."""
        ranks, others = ((at.kind.launch_kind, at.node_ids) for at in (layout, self.layout))
        return ranks == others and self.backend.renews(layout) and not self.ended.done()

    async def next_group(self, number: int) -> GroupPlan | None:
        """Wait for the group with this number, from 0. None ends the launch."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closing or number < len(self._groups))
        return self._groups[number] if number < len(self._groups) else None

    async def add(self, plan: GroupPlan) -> None:
        async with self._changed:
            self._groups.append(plan)
            self._changed.notify_all()

    async def close(self) -> None:
        """Let the ranks end after their current group."""
        async with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def kill(self) -> None:
        for handle in self.handles.values():
            self.backend.kill(handle)


class WorkerGroup:
    """Ranks with fresh processes, and their state."""

    def __init__(self, name: str, layout: Layout, block: Any, launch: Launch):
        self.name, self.layout, self.key, self.launch = name, layout, (layout, block), launch
        self.jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """done when the launch has ended, or the processes of all ranks have ended without an error"""
        self.address: asyncio.Future[str] = loop.create_future()
        """at which the ranks meet"""
        self.environment: Environment | None = None
        self.processes: dict[int, RankProcess] = {}
        self.progress = asyncio.Event()
        """set by each rank that makes progress while the group starts"""
        self.job_id = ""
        self.failures: list[Failure] = []
        self.stacks: list[Calls | None] = []
        self.killed = False
        self.requested_at = unix_s()
        self._running = set(range(len(layout.node_ids)))
        launch.ended.add_done_callback(lambda _: self._end())

    @property
    def error(self) -> BaseException | None:
        """The backend's error that ended the launch."""
        return self.launch.error

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def rank_ended(self, rank: int) -> None:
        """Note that the process of a rank has ended without an error."""
        self._running.discard(rank)
        if not self._running:
            self._end()

    def kill(self) -> None:
        self.killed = self.killed or not self.ended.done()
        self.launch.kill()

    def _absent_ranks(self) -> list[int]:
        """Return the ranks of a starting group whose processes have not reported to the keeper yet."""
        if self.environment is not None:
            return []
        return [rank for rank in range(len(self.layout.node_ids)) if rank not in self.processes]

    async def collect_stacks(self) -> None:
        """Collect the call stacks of all ranks, if all have reported."""
        if not self._absent_ranks():
            processes = [process for _, process in sorted(self.processes.items())]
            self.stacks = list(
                await asyncio.gather(*(self.launch.backend.calls_of(process.handle) for process in processes))
            )

    def verdict(self, timed_out: str = "") -> tuple[str, str, str]:
        """Return status, one-line reason and log of the job that this group did not finish.

        `timed_out` describes what exceeded the time limit, if anything did.
        """
        status, reason = self._reported_failure() or self._timeout(timed_out) or self._death()
        return status, reason, self.log()

    def _dead_ranks(self) -> dict[int, BaseException]:
        """Return errors of ranks that ended without a report. Other ranks may then report broken connections.

        A rank that waits for its next trial reports nothing if it loses its peer. Such errors count without any other.
        """
        reported = {failure.rank for failure in self.failures}
        dead = {r: e for r, e in getattr(self.error, "worker_failures", {}).items() if r not in reported}
        causes = {rank: error for rank, error in dead.items() if not is_lost_peer(first_line(error))}
        return causes if causes or reported else dead

    def _reported_failure(self) -> tuple[str, str] | None:
        out_of_memory = any(failure.out_of_memory for failure in self.failures)
        if out_of_memory or (self.failures and (self.killed or not self._dead_ranks())):
            return self.verdict_of(self.failures)
        return None

    def verdict_of(self, failures: Sequence[Failure]) -> tuple[str, str]:
        """Return status and one-line reason of failures: out of memory first, then the first cause."""
        first = next((failure for failure in failures if failure.out_of_memory), None)
        first = first or next((failure for failure in failures if not failure.is_consequence), failures[0])
        status = "out_of_memory" if first.out_of_memory else "timeout" if first.timed_out else "failed"
        status = "infeasible" if first.infeasible else status
        return status, f"{self.rank_and_host(first.rank)}: {first.line}"

    def _timeout(self, timed_out: str) -> tuple[str, str] | None:
        if not timed_out:
            return None
        if absent := self._absent_ranks():
            return "timeout", f"{timed_out}; no sign of rank {', '.join(map(str, absent))}"
        blocking = culprits(self.stacks) if self.stacks else {}
        suspects = "".join(f"; {self.rank_and_host(rank)} {state}" for rank, state in blocking.items())
        nodes = self.environment.nodes if self.environment else []
        if wait_for_each_other(self.stacks) and len(nodes) > 1:
            names = ", ".join(f"{node['host']} ({node['node_id'][:8]})" for node in nodes)
            suspects = f"; all ranks wait for each other: check the network between nodes {names}"
        return "timeout", f"{timed_out}{suspects}"

    def _death(self) -> tuple[str, str]:
        for rank, error in self._dead_ranks().items():
            cause = cause_of(error) or error
            out_of_memory = is_out_of_memory(cause) or self.launch.backend.ran_out_of_memory(cause)
            return (
                "out_of_memory" if out_of_memory else "failed",
                f"{self.rank_and_host(rank)} died: {first_line(error)}",
            )
        if isinstance(self.error, RankDeathError):
            return "failed", str(self.error)
        return "failed", f"worker group ended: {first_line(self.error)}"

    def rank_and_host(self, rank: int) -> str:
        """Return a rank with its host and the start of its node id."""
        if self.environment is None:
            process = self.processes.get(rank)
            return f"rank {rank} on node {process.host} ({process.node_id[:8]})" if process else f"rank {rank}"
        if rank >= len(self.environment.ranks):
            return f"rank {rank}"
        node_id = self.environment.ranks[rank]["node_id"]
        hosts = {node["node_id"]: node["host"] for node in self.environment.nodes}
        return f"rank {rank} on node {hosts[node_id]} ({node_id[:8]})"

    def log(self) -> str:
        """Return the call stacks at the time limit, all reported tracebacks, and the backend's own error."""
        parts = [calls_as_text(rank, calls) for rank, calls in enumerate(self.stacks)]
        parts += [logs_of(self.failures)] if self.failures else []
        if self.error is not None:
            parts.append("Ray Train\n" + "".join(traceback.format_exception(self.error)))
        return "\n".join(parts)


def outcome_of(payloads: Sequence[Payload], group: WorkerGroup) -> Outcome:
    """Return the outcome of a job whose ranks all returned, even if a script failed.

    Its duration is the longest span by one rank's clock: clocks may differ.
    """
    span_s = max(payload.ended_at - payload.started_at for payload in payloads)
    outcome = Outcome(
        "done",
        payloads[0].started_at,
        span_s,
        worker_group=group.name,
        environment=group.environment,
        payloads=payloads,
    )
    if group.environment is None or all(payload.failure is None for payload in payloads):
        return outcome
    ranks = members([rank["node_id"] for rank in group.environment.ranks], len(payloads))
    failures = [
        replace(payload.failure, rank=rank)
        for payload, rank in zip(payloads, ranks, strict=True)
        if payload.failure is not None
    ]
    status, reason = group.verdict_of(failures)
    return replace(outcome, status=status, reason=reason, log=logs_of(failures), payloads=())


def shared_gpus(environment: Environment | None, others: Sequence[Environment | None]) -> list[str]:
    """Return the UUIDs of GPUs that ranks of a group and of other groups hold. None is a group that still starts."""

    def uuids(group: Environment | None) -> set[str]:
        return {rank["gpu_uuid"] for rank in group.ranks if rank["gpu_uuid"]} if group else set()

    return sorted(uuids(environment) & set().union(*map(uuids, others)))
