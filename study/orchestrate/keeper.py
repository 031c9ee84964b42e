"""The actor that holds a study's live worker groups, and passes values between the driver and the ranks.

    Tune trial -> Keeper.measure(job) -> rank 0 -> broadcast -> trainables on the trial's ranks -> rows -> Keeper

It lives on the driver's host, so checkpoints of trainings pass through it into the results folder.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from study.orchestrate.group import GroupError, RankBackend, WorkerGroup
from study.orchestrate.metrics import REPEAT_S, MakeGauge, Metrics
from study.orchestrate.protocol import Environment, Failure, Job, Outcome, Payload
from study.plan.placement import Layout
from study.store import checkpoints
from study.store.store import Store
from trainables.trial import Trial

START_TIMEOUT_S = 300.0
"""Ray Train itself gives up sooner where room is missing; on two cores with a load of 12 a group took 171 s to start"""
CLOSE_TIMEOUT_S = 20.0
FAILURE_GRACE_S = 5.0
"""how long after one rank's failure the others may still report theirs"""


@dataclass
class _Slot:
    """A place for one live group: on the nodes of its job's own layout, or with all its ranks on the node `node_id`."""

    node_id: str | None = None
    group: WorkerGroup | None = None

    def layout_of(self, layout: Layout) -> Layout:
        """Return the layout of a job's group in this slot."""
        return layout if self.node_id is None else replace(layout, node_ids=(self.node_id,) * len(layout.node_ids))


@dataclass
class RunningJob:
    """What is known of a job while it runs. `concurrent`: the most jobs, this one included, that ran meanwhile."""

    job: Job
    result: asyncio.Future[Sequence[Payload]]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    concurrent: int = 0


class Keeper:
    """Holds one live worker group, or one for each of `node_ids`. An asyncio actor: every method may wait while others run.

    `out_of_memory` are the trials that ran out of memory before; `backend` starts the ranks.

    Metrics are gauges of this process, which lives as long as the study. `counts` and `make_gauge`: see `study.orchestrate.metrics.Metrics`.
    """

    def __init__(
        self,
        study_name: str,
        out_of_memory: Sequence[Trial],
        store: Store,
        counts: dict[str, int],
        make_gauge: MakeGauge,
        backend: RankBackend,
        node_ids: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        backend.prepare()
        self.backend = backend
        self.start_timeout_s = start_timeout_s
        self.out_of_memory = list(out_of_memory)
        self.store = store
        self.slots = [_Slot(node_id) for node_id in node_ids] or [_Slot()]
        self.free: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self.slots:
            self.free.put_nowait(slot)
        self.running: dict[str, RunningJob] = {}
        self.opened_groups = 0
        self.closing = False
        self.metrics = Metrics(study_name, counts, make_gauge)
        self.repeating: asyncio.Task[None] | None = None

    async def measure(self, job: Job, layout: Layout, block: Any, timeout_s: float) -> Outcome:
        """Run a job in a live group, or in a new one if layout or block differ.

        `timeout_s` limits each epoch of a training, and all of any other job. Raises CancelledError if `close` interrupts
        it.
        """
        started_at = time.time()
        self.repeating = self.repeating or asyncio.create_task(self._repeat_metrics())
        slot = await self.free.get()
        running = RunningJob(job, asyncio.get_running_loop().create_future())
        self.running[job.id] = running
        for other in self.running.values():
            other.concurrent = max(other.concurrent, len(self.running))
        try:
            outcome = await self._measure(running, layout, block, timeout_s, slot)
        except GroupError as error:
            outcome = Outcome("failed", started_at, time.time() - started_at, reason=str(error), log=error.log)
        finally:
            del self.running[job.id]
            self.free.put_nowait(slot)
        if self.closing and outcome.status != "done":
            raise asyncio.CancelledError
        return replace(outcome, concurrent=running.concurrent)

    async def _measure(self, running: RunningJob, layout: Layout, block: Any, timeout_s: float, slot: _Slot) -> Outcome:
        group = await self._group_for(layout, block, slot)
        group.job_id, group.failures = running.job.id, []
        dispatched_at = time.time()
        await group.jobs.put(running.job)
        in_time = await _result_or_end(running, group, timeout_s)
        if running.result.done():
            return _done(running.result.result(), group)
        if in_time:
            await asyncio.sleep(0)  # reports that arrived together with the end
        else:
            await group.collect_stacks()
        await self._end(slot, kill=True)
        trial = running.job.trial
        missing = "no epoch ended" if trial.epochs else "no result"
        status, reason, log = group.verdict("" if in_time else f"{missing} within {timeout_s:g} s (--trial-timeout)")
        if status == "out_of_memory":
            self.out_of_memory.append(trial)
        duration_s = time.time() - dispatched_at
        return Outcome(status, dispatched_at, duration_s, reason, log, group.name, group.environment)

    async def prepare(self, layout: Layout, block: Any) -> None:
        """Start the group for this layout and block if no group is live. Does not wait for it."""
        if self.slots[0].group is None:
            self._start(self.slots[0], layout, block)

    async def trials_out_of_memory(self) -> list[Trial]:
        """Return every trial so far that ran out of memory."""
        return self.out_of_memory

    async def epochs_of(self, job_id: str) -> list[dict[str, Any]]:
        """Return the epochs that a running job has reported in this run of it; empty for any other job."""
        return self.running[job_id].epochs if job_id in self.running else []

    async def close(self) -> None:
        """End the live groups, and wait until their processes and resources are gone.

        A job that still runs is interrupted: its ranks are killed, and it has no outcome.
        """
        self.closing = True
        interrupted = bool(self.running)
        await asyncio.gather(*(self._end(slot, kill=interrupted) for slot in self.slots if slot.group is not None))
        if self.repeating:
            self.repeating.cancel()

    async def _repeat_metrics(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            self.metrics.repeat()

    async def ended(self, trial_id: str, status: str, values: dict[str, float]) -> None:
        """Publish that a trial ended, and its numbers, on this node's metrics port."""
        self.metrics.ended(trial_id, status, values)

    # called by ranks

    async def opened(self, name: str, environment: Environment, processes: Sequence[Any]) -> None:
        """Rank 0 of a group reports that all its ranks are connected."""
        if group := self._live(name):
            times = {"asked_at": group.requested_at, "opened_at": time.time()}
            group.environment, group.processes = replace(environment, group=times), list(processes)
            group.ready.set_result(None)

    async def next_job(self, name: str) -> Job | None:
        """Rank 0 waits here for a job; None ends the group."""
        group = self._live(name)
        return await group.jobs.get() if group else None

    async def finished(self, name: str, job_id: str, payloads: Sequence[Payload]) -> None:
        """Rank 0 hands in what all ranks measured."""
        running = self._job(name, job_id)
        if running and not running.result.done():
            running.result.set_result(payloads)

    async def epoch_ended(self, name: str, job_id: str, row: dict[str, Any]) -> None:
        """Rank 0 reports a row of epochs.parquet."""
        if running := self._job(name, job_id):
            running.epochs.append(row)
            running.news.set()
            self.metrics.epoch_ended(job_id, row)

    async def load_checkpoint(self, name: str, job_id: str) -> bytes | None:
        """Rank 0 asks for the checkpoint that an earlier run of this job left."""
        return await asyncio.to_thread(checkpoints.load, self.store, job_id)

    async def save_checkpoint(self, name: str, job_id: str, content: bytes) -> None:
        """Rank 0 hands in a checkpoint. Those of a group that was given up are dropped."""
        if self._job(name, job_id):
            await asyncio.to_thread(checkpoints.save, self.store, job_id, content)

    async def rank_failed(self, name: str, failure: Failure) -> None:
        """A rank reports what it raised, before it ends. The others get `FAILURE_GRACE_S` to report theirs."""
        group = self._live(name)
        if group is None:
            return
        group.failures.append(failure)
        if len(group.failures) == 1:
            asyncio.get_running_loop().call_later(FAILURE_GRACE_S, group.kill)

    # groups

    def _live(self, name: str) -> WorkerGroup | None:
        return next((slot.group for slot in self.slots if slot.group and slot.group.name == name), None)

    def _job(self, name: str, job_id: str) -> RunningJob | None:
        """Return the running job with this id if this group runs it."""
        group = self._live(name)
        return self.running.get(job_id) if group and group.job_id == job_id else None

    async def _group_for(self, layout: Layout, block: Any, slot: _Slot) -> WorkerGroup:
        key = (slot.layout_of(layout), block)
        if slot.group is not None and (slot.group.key != key or slot.group.ended.done()):
            await self._end(slot, kill=False)
        group = slot.group or self._start(slot, layout, block)
        await asyncio.wait(
            {group.ready, group.ended}, timeout=self.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if group.ready.done():
            await self._refuse_shared_gpus(slot, group)
            return group
        timed_out = not group.ended.done()
        await self._end(slot, kill=True)
        what = f"did not start within {self.start_timeout_s:.0f} s" if timed_out else "did not start"
        _, why, log = group.verdict()
        raise GroupError(f"worker group of {len(layout.node_ids)} ranks {what}: {why}", log)

    def _start(self, slot: _Slot, layout: Layout, block: Any) -> WorkerGroup:
        self.opened_groups += 1
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{self.opened_groups}"
        slot.group = WorkerGroup(name, slot.layout_of(layout), block, self.backend)
        slot.group.start(self)
        return slot.group

    async def _refuse_shared_gpus(self, slot: _Slot, group: WorkerGroup) -> None:
        """Raise GroupError if another live group holds a GPU of this group too."""
        others = [other.group.environment for other in self.slots if other is not slot and other.group is not None]
        shared = shared_gpus(group.environment, others)
        if shared:
            await self._end(slot, kill=True)
            raise GroupError(f"GPU {shared[0]} is held by two worker groups at once: use --max-concurrent 1", "")

    async def _end(self, slot: _Slot, kill: bool) -> None:
        group = slot.group
        if group is None:  # `close` came first
            return
        if kill:
            group.kill()
        else:
            await group.jobs.put(None)
        for wait_s in (CLOSE_TIMEOUT_S, CLOSE_TIMEOUT_S):
            await asyncio.wait({group.ended}, timeout=wait_s)
            if group.ended.done():
                break
            group.kill()
        if slot.group is group:
            slot.group = None


def shared_gpus(environment: Environment | None, others: Sequence[Environment | None]) -> list[str]:
    """Return the UUIDs of GPUs held both by a group's ranks and by ranks of others; None is a group still starting."""

    def uuids(of: Environment | None) -> set[str]:
        return {rank["gpu_uuid"] for rank in of.ranks if rank["gpu_uuid"]} if of else set()

    return sorted(uuids(environment) & set().union(*map(uuids, others)))


async def _result_or_end(running: RunningJob, group: WorkerGroup, timeout_s: float) -> bool:
    """Wait until the job has its result or the group has ended. Return False if neither came in time.

    The time starts again with each epoch that ends.
    """
    while True:
        running.news.clear()
        news = asyncio.ensure_future(running.news.wait())
        awaited: set[asyncio.Future[Any]] = {running.result, group.ended, news}
        done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if done != {news}:
            return bool(done)


def _done(payloads: Sequence[Payload], group: WorkerGroup) -> Outcome:
    """Return the outcome of a measured job. Clocks of different nodes may differ, so each span is of one rank's clock."""
    span_s = max(payload.ended_at - payload.started_at for payload in payloads)
    environment = group.environment
    return Outcome(
        "done", payloads[0].started_at, span_s, worker_group=group.name, environment=environment, payloads=payloads
    )
