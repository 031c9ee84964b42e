"""The actor that holds a study's live worker groups and passes messages between driver and ranks.

    Tune trial -> Keeper.measure(job) -> rank 0 -> broadcast -> trainables on the trial's ranks -> rows -> Keeper

It runs on the driver's host, because checkpoints of training trials pass through it into the results folder.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from study.orchestrate.activity import BUILDING, GROUP_STARTING, OWN_CODE, Activity
from study.orchestrate.activity import REPEAT_S as ACTIVITY_REPEAT_S
from study.orchestrate.group import GroupError, GroupPlan, Launch, RankBackend, WorkerGroup, outcome_of, shared_gpus
from study.orchestrate.metrics import REPEAT_S, Efficiencies, MakeGauge, Metrics
from study.orchestrate.protocol import Environment, Failure, Job, Outcome, Payload, RankProcess
from study.plan.placement import Layout
from study.store import checkpoints
from study.store.store import Store
from trainables.clock import unix_s
from trainables.trial import Trial

START_TIMEOUT_S = 300.0
"""Time without progress of a starting group. On two cores with a load of 12, a group took 171 s to start.

Ray Train gives up earlier if resources are missing.
"""
CLOSE_TIMEOUT_S = 20.0
SCRIPT_GRACE_S = 30.0
"""Time after a script's limit in which its ranks end it and report what it was doing."""

FAILURE_GRACE_S = 5.0
"""Time after a rank's failure in which other ranks may still report theirs."""


@dataclass
class _Slot:
    """Room for one live group."""

    node_id: str | None = None
    """Node for all ranks of the group; None uses the nodes of the job's layout."""
    group: WorkerGroup | None = None

    def layout_of(self, layout: Layout) -> Layout:
        """Return the layout of a job's group in this slot."""
        return layout if self.node_id is None else replace(layout, node_ids=(self.node_id,) * len(layout.node_ids))


@dataclass
class RunningJob:
    """State of a running job. `concurrent` is the largest number of jobs at the same time, including this one."""

    job: Job
    result: asyncio.Future[Sequence[Payload]]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    epoch_reported: asyncio.Event = field(default_factory=asyncio.Event)
    concurrent: int = 0
    activity: str = GROUP_STARTING


class Keeper:
    """Holds one live worker group, or one per node in `node_ids`. An asyncio actor, whose methods run concurrently.

    `out_of_memory` has the trials that ran out of memory before; `backend` starts the ranks. Metrics are gauges of this
    process, which lives as long as the study; see `study.orchestrate.metrics.Metrics` for `counts` and `make_gauge`.
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
        self.free_slots: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self.slots:
            self.free_slots.put_nowait(slot)
        self.running: dict[str, RunningJob] = {}
        self.opened_groups = 0
        self.restarts = 0
        self.closing = False
        self.changed = asyncio.Event()
        self.metrics = Metrics(study_name, counts, make_gauge)
        self.efficiencies = Efficiencies()
        self.repeating: asyncio.Task[None] | None = None

    async def measure(self, job: Job, layout: Layout, block: Any, timeout_s: float) -> Outcome:
        """Run a job in the live group, or in a new one if layout or block differ.

        `timeout_s` limits each epoch of a training trial, or the complete job otherwise. Raises CancelledError if
        `close` interrupts it.
        """
        started_at = unix_s()
        self.repeating = self.repeating or asyncio.create_task(self._repeat_metrics())
        slot = await self.free_slots.get()
        running = RunningJob(job, asyncio.get_running_loop().create_future())
        self.running[job.id] = running
        self._notify()
        for other in self.running.values():
            other.concurrent = max(other.concurrent, len(self.running))
        try:
            outcome = await self._measure(running, layout, block, timeout_s, slot)
        except GroupError as error:
            outcome = Outcome("failed", started_at, unix_s() - started_at, reason=str(error), log=error.log)
        finally:
            del self.running[job.id]
            self._notify()
            self.free_slots.put_nowait(slot)
        if self.closing and outcome.status != "done":
            raise asyncio.CancelledError
        return replace(outcome, concurrent=running.concurrent)

    async def _measure(self, running: RunningJob, layout: Layout, block: Any, timeout_s: float, slot: _Slot) -> Outcome:
        group = await self._group_for(layout, (self.restarts, block), slot)
        group.job_id, group.failures = running.job.id, []
        running.activity = BUILDING if running.job.trial.door == "factory" else OWN_CODE
        self._notify()
        dispatched_at = unix_s()
        await group.jobs.put(running.job)
        grace_s = SCRIPT_GRACE_S if running.job.trial.script else 0.0
        in_time = await _any_of({running.result, group.ended}, running.epoch_reported, timeout_s + grace_s)
        if running.result.done():
            outcome = outcome_of(running.result.result(), group)
            if outcome.status == "out_of_memory":
                self.out_of_memory.append(running.job.trial)
            return outcome
        if in_time:
            await asyncio.sleep(0)  # let reports arrive that came together with the end
        else:
            await group.collect_stacks()
        await self._end(slot, kill=True)
        trial = running.job.trial
        missing = "no epoch ended" if trial.epochs else "no result"
        status, reason, log = group.verdict("" if in_time else f"{missing} within {timeout_s:g} s (--trial-timeout)")
        if status == "out_of_memory":
            self.out_of_memory.append(trial)
        duration_s = unix_s() - dispatched_at
        return Outcome(status, dispatched_at, duration_s, reason, log, group.name, group.environment)

    async def restart(self, out_of_memory: Sequence[Trial], counts: Mapping[str, int]) -> None:
        """Begin another run of trials. Its groups have new processes; see the class for the arguments."""
        self.out_of_memory = list(out_of_memory)
        self.restarts += 1
        self.efficiencies = Efficiencies()
        self.metrics.restart(counts)

    async def prepare(self, layout: Layout, block: Any) -> None:
        """Start a group for this layout and block if none is live. Does not wait for it."""
        if self.slots[0].group is None:
            await self._start(self.slots[0], layout, (self.restarts, block))

    async def trials_out_of_memory(self) -> list[Trial]:
        """Return every trial so far that ran out of memory."""
        return self.out_of_memory

    async def epochs_of(self, job_id: str) -> list[dict[str, Any]]:
        """Return the epochs that a running job has reported; empty for any other job."""
        return self.running[job_id].epochs if job_id in self.running else []

    async def next_activity(self, known: Activity) -> Activity:
        """Return what each running job is doing, as soon as that differs from `known`, or repeatedly."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACTIVITY_REPEAT_S):
                while not self.closing and self._activity() == known:
                    await self.changed.wait()
        return self._activity()

    def _activity(self) -> Activity:
        return {job_id: running.activity for job_id, running in self.running.items()}

    def _notify(self) -> None:
        """Publish the current windows, and wake up those who wait for another activity."""
        self.metrics.running(self._activity().values())
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        """End the live groups and wait until their processes and resources are released.

        Running jobs are interrupted: their ranks are killed, and they have no outcome.
        """
        self.closing = True
        self._notify()
        interrupted = bool(self.running)
        await asyncio.gather(*(self._end(slot, kill=interrupted) for slot in self.slots if slot.group is not None))
        if self.repeating:
            self.repeating.cancel()

    async def _repeat_metrics(self) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            self.metrics.repeat()

    async def ended(self, trial: Trial, status: str, values: dict[str, float]) -> None:
        """Publish the end of a trial and its measures on this node's metrics port."""
        efficiency = self.efficiencies.of(trial, values.get("throughput_samples_per_s"))
        known = {} if efficiency is None else {"efficiency": efficiency}
        self.metrics.ended(trial.trial_id, status, values | known)

    # called by ranks

    async def rank_starting(self, name: str, process: RankProcess) -> None:
        """Called by each rank while its group starts. Restarts the time limit of the start."""
        if group := self._live(name):
            group.processes[process.rank] = process
            group.launch.handles[process.rank] = process.handle
            group.progress.set()

    async def next_group(self, launch: str, number: int) -> GroupPlan | None:
        """Called by each rank of a launch that serves several groups. Wait for the next one; None ends the launch."""
        found = next(
            (slot.group.launch for slot in self.slots if slot.group and slot.group.launch.name == launch), None
        )
        return await found.next_group(number) if found else None

    async def meet(self, name: str, address: str | None) -> str | None:
        """Called by each rank of a group. Return the address of rank 0, which passes it; the others wait for it."""
        group = self._live(name)
        if group and address and not group.address.done():
            group.address.set_result(address)
        return await group.address if group else None

    async def rank_ended(self, name: str, rank: int) -> None:
        """Called by each rank of a launch that serves several groups, when its process has ended without an error."""
        if group := self._live(name):
            group.rank_ended(rank)

    async def opened(self, name: str, environment: Environment) -> None:
        """Called by rank 0 when all ranks of its group are connected."""
        if group := self._live(name):
            times = {"asked_at": group.requested_at, "opened_at": unix_s()}
            group.environment = replace(environment, group=times, launch=group.launch.name)
            group.ready.set_result(None)

    async def next_job(self, name: str) -> Job | None:
        """Called by rank 0. Wait for a job and return it; None ends the group."""
        group = self._live(name)
        return await group.jobs.get() if group else None

    async def finished(self, name: str, job_id: str, payloads: Sequence[Payload]) -> None:
        """Called by rank 0 with the payloads of all ranks."""
        running = self._job(name, job_id)
        if running and not running.result.done():
            running.result.set_result(payloads)

    async def window_starting(self, name: str, job_id: str, window: str) -> None:
        """Called by rank 0 before a window of a timed trial."""
        if running := self._job(name, job_id):
            running.activity = window
            self._notify()

    async def epoch_ended(self, name: str, job_id: str, row: dict[str, Any]) -> None:
        """Called by rank 0 with a row of epochs.parquet."""
        if running := self._job(name, job_id):
            running.epochs.append(row)
            running.epoch_reported.set()
            self.metrics.epoch_ended(job_id, row)

    async def load_checkpoint(self, name: str, job_id: str) -> bytes | None:
        """Called by rank 0. Return the checkpoint of an earlier run of this job, or None."""
        return await asyncio.to_thread(checkpoints.load, self.store, job_id)

    async def save_checkpoint(self, name: str, job_id: str, content: bytes) -> None:
        """Called by rank 0 with a checkpoint. Checkpoints of abandoned groups are ignored."""
        if self._job(name, job_id):
            await asyncio.to_thread(checkpoints.save, self.store, job_id, content)

    async def rank_failed(self, name: str, failure: Failure) -> None:
        """Called by a rank with its exception before it ends. The others get `FAILURE_GRACE_S` to report theirs."""
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
        group = slot.group
        if group is None or group.key != key or group.ended.done():
            if group is not None and not await self._vacate(group, slot.layout_of(layout)):
                await self._end(slot, kill=False)
            group = await self._start(slot, layout, block)
        in_time = await _any_of({group.ready, group.ended}, group.progress, self.start_timeout_s)
        if group.ready.done():
            await self._refuse_shared_gpus(slot, group)
            return group
        if not in_time:
            await group.collect_stacks()
        await self._end(slot, kill=True)
        _, reason, log = group.verdict("" if in_time else f"no progress within {self.start_timeout_s:g} s")
        raise GroupError(f"worker group of {len(layout.node_ids)} ranks did not start: {reason}", log)

    async def _start(self, slot: _Slot, layout: Layout, block: Any) -> WorkerGroup:
        self.opened_groups += 1
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{self.opened_groups}"
        layout = slot.layout_of(layout)
        launch = slot.group.launch if slot.group is not None else Launch(name, layout, self.backend)
        if slot.group is None:
            launch.start(self)
        slot.group = WorkerGroup(name, layout, block, launch)
        await launch.add(GroupPlan(name, layout))
        return slot.group

    async def _vacate(self, group: WorkerGroup, layout: Layout) -> bool:
        """End the processes of a group. Return True if its launch can serve another one with this layout."""
        if not group.launch.fits(layout):
            return False
        await group.jobs.put(None)
        await asyncio.wait({group.ended}, timeout=CLOSE_TIMEOUT_S)
        return group.ended.done() and group.launch.fits(layout)

    async def _refuse_shared_gpus(self, slot: _Slot, group: WorkerGroup) -> None:
        """Raise GroupError if another live group also holds a GPU of this group."""
        others = [other.group.environment for other in self.slots if other is not slot and other.group is not None]
        shared = shared_gpus(group.environment, others)
        if shared:
            await self._end(slot, kill=True)
            raise GroupError(
                f"two worker groups hold GPU {shared[0]} at the same time; fix: use --max-concurrent 1", ""
            )

    async def _end(self, slot: _Slot, kill: bool) -> None:
        group = slot.group
        if group is None:  # `close` has ended it
            return
        if kill:
            group.kill()
        else:
            await group.jobs.put(None)
        await group.launch.close()
        for wait_s in (CLOSE_TIMEOUT_S, CLOSE_TIMEOUT_S):
            await asyncio.wait({group.launch.ended}, timeout=wait_s)
            if group.launch.ended.done():
                break
            group.kill()
        if slot.group is group:
            slot.group = None


async def _any_of(awaited: Collection[asyncio.Future[Any]], progress: asyncio.Event, timeout_s: float) -> bool:
    """Wait until one of these is done. Return False if none is within `timeout_s`, which each progress restarts."""
    while True:
        progress.clear()
        news = asyncio.ensure_future(progress.wait())
        done, _ = await asyncio.wait({*awaited, news}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        if done != {news}:
            return bool(done)
