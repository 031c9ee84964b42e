"""Warm worker groups: one TorchTrainer run whose ranks serve trial after trial.

A cold TorchTrainer costs many seconds before its first step; most of that is starting processes, importing torch and
connecting ranks. A group pays it once. The `Keeper` is an actor that opens a group, hands it one job at a time, and
closes it; ranks ask it for the next job. Within the group control traffic (jobs, barriers, rows) goes over gloo, so
that waiting ranks sleep and NCCL is left to the gradients.

    Tune trial -> Keeper.measure(job) -> rank 0 -> broadcast -> trainables.run on the trial's ranks -> rows -> Keeper

Any failure ends the group: ranks that wait in a collective for one that raised can only be ended from outside.
"""

import asyncio
import contextlib
import dataclasses
import os
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from study.capacity import NodeCapacity
from trainables.registry import DATASETS
from trainables.trial import Trial

PROJECT_ROOT = str(Path(__file__).resolve().parent.parent)
START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 20.0
FAILURE_GRACE_S = 2.0
"""how long after one rank's failure the others may still report theirs"""

FORKSERVER_PRELOAD = ["torch", "pyarrow.dataset", *{target.partition(":")[0] for target in DATASETS.values()}]
"""what a loader process needs before its first batch; without it each start imports for seconds"""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a worker group's ranks sit and what their processes start with; a trial of another layout needs another group.

    `node_ids` has one entry a rank. `world_sizes` are the sizes of trial that it will serve, on nested subsets.
    """

    device: str
    node_ids: tuple[str, ...]
    nodes: int
    cpus_per_rank: int
    deterministic: bool
    world_sizes: tuple[int, ...]


def layouts(trials: list[Trial], capacity: list[NodeCapacity]) -> dict[tuple[Any, ...], Layout]:
    """One layout for each kind of process that the trials need, as large as its largest trial. Keys: `layout_key`."""
    wanted: dict[tuple[Any, ...], set[int]] = {}
    for trial in trials:
        wanted.setdefault(layout_key(trial), set()).add(trial.world_size)
    return {key: _layout(key, sizes, capacity) for key, sizes in wanted.items()}


def layout_key(trial: Trial) -> tuple[Any, ...]:
    """What a trial needs of its ranks' processes, beyond their number."""
    return (trial.device, trial.nodes, trial.cpus_per_rank, trial.deterministic)


def _layout(key: tuple[Any, ...], sizes: set[int], capacity: list[NodeCapacity]) -> Layout:
    device, nodes, cpus_per_rank, deterministic = key
    per_node = max(sizes) // nodes
    fitting = [
        node
        for node in capacity
        if node.cpus >= per_node * cpus_per_rank and (device == "cpu" or node.gpus >= per_node)
    ]
    if len(fitting) < nodes:
        raise ValueError(f"{len(fitting)} nodes fit {per_node} ranks, {nodes} are needed; the plan should have said so")
    node_ids = tuple(node.node_id for node in fitting[:nodes] for _ in range(per_node))
    return Layout(device, node_ids, nodes, cpus_per_rank, deterministic, tuple(sorted(sizes)))


def members(ranks_by_node: list[list[int]], world_size: int) -> list[int]:
    """The ranks that a trial of `world_size` uses: the first ones of every node, so that smaller trials are nested."""
    per_node = world_size // len(ranks_by_node)
    return [rank for ranks in ranks_by_node for rank in ranks[:per_node]]


def process_environment(layout: Layout) -> dict[str, str]:
    """Environment variables that must be there before a rank's process starts."""
    # cuBLAS is deterministic only with a fixed workspace (NVIDIA, cuBLAS "Results Reproducibility")
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if layout.deterministic else {}


# ---------------------------------------------------------------------------------------------------- in each rank


def serve(config: dict[str, Any]) -> None:
    """A rank's life under TorchTrainer: connect, then one trial after another until there is none."""
    _start_forkserver()
    import torch.distributed as dist
    from ray.train.torch import get_device

    import trainables.run  # noqa: F401  (here, so that no trial waits for its imports)
    from study.environment import git_state, node_facts, rank_facts, variables, versions
    from trainables.process import rehearse, release_memory

    keeper, layout, group_name = config["keeper"], config["layout"], config["name"]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = get_device() if layout.device == "cuda" else _cpu()
    rehearse(device)
    release_memory()
    control = dist.new_group(backend="gloo", timeout=timedelta(days=30))

    context = ray.get_runtime_context()
    node_id = context.get_node_id()
    mine = {"rank": rank_facts(rank, node_id, device), "node": node_facts(node_id), "actor": context.current_actor}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine, group=control)
    node_ids = list(dict.fromkeys(facts["rank"]["node_id"] for facts in everyone))
    ranks_by_node = [[r for r in range(world_size) if everyone[r]["rank"]["node_id"] == node] for node in node_ids]
    _check_layout(layout, everyone)

    # every rank makes every group, in the same order, as torch.distributed demands
    groups = {}
    for size in layout.world_sizes:
        chosen = members(ranks_by_node, size)
        groups[size] = (
            chosen,
            dist.new_group(chosen),
            dist.new_group(chosen, backend="gloo", timeout=timedelta(days=30)),
        )

    if rank == 0:
        nodes = {facts["node"]["node_id"]: facts["node"] for facts in everyone}
        environment = {
            "nodes": [nodes[node] for node in node_ids],
            "ranks": [facts["rank"] for facts in everyone],
            "versions": versions(),
            "variables": variables(),
            "git": git_state(),
        }
        ray.get(keeper.opened.remote(group_name, environment, [facts["actor"] for facts in everyone]))

    while True:
        job = [ray.get(keeper.next_job.remote(group_name)) if rank == 0 else None]
        dist.broadcast_object_list(job, src=0, group=control)
        if job[0] is None:
            return
        chosen, group, group_control = groups[job[0]["trial"]["world_size"]]
        if rank not in chosen:
            continue
        try:
            payload = _measure(job[0], chosen.index(rank), device, group, group_control)
        except BaseException as error:
            failure = describe_failure(rank, node_id, error)
            ray.get(keeper.rank_failed.remote(group_name, job[0]["id"], failure))
            raise
        payloads: list[Any] | None = [None] * len(chosen) if rank == 0 else None
        dist.gather_object(payload, payloads, dst=0, group=group_control)
        if rank == 0:
            ray.get(keeper.finished.remote(group_name, job[0]["id"], payloads))


def _measure(job: dict[str, Any], trial_rank: int, device: Any, group: Any, control: Any) -> dict[str, Any]:
    """Runs a trial on this rank. Gives its rows as a table, the span of its windows, and memory before and after."""
    import pyarrow as pa
    import torch

    from study.store import STEPS_SCHEMA
    from trainables.run import run

    def allocated_bytes() -> int | None:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    trial = Trial.model_validate(job["trial"])
    before_bytes = allocated_bytes()
    measured = run(trial, rank=trial_rank, device=device, group=group, control=control, source=job["source"])
    return {
        "steps": pa.Table.from_pylist(measured.rows, schema=STEPS_SCHEMA),
        "warmup_began_at": measured.warmup_began_at,
        "windows_ended_at": measured.windows_ended_at,
        "memory": {"before_bytes": before_bytes, "after_bytes": allocated_bytes()},
        "threads": torch.get_num_threads(),
    }


def describe_failure(rank: int, node_id: str, error: BaseException) -> dict[str, Any]:
    """What a rank's exception says: which rank, whether memory ran out, one line, and the traceback."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return {
        "rank": rank,
        "node_id": node_id,
        "out_of_memory": is_out_of_memory(error),
        "line": f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: the device's, or the host's as torch's CPU allocator says it."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError, ray.exceptions.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _start_forkserver() -> None:
    """The parent of this rank's loader processes, started once with torch imported: a loader then starts at once.

    A loader process imports `__main__` again, which in a Ray worker is Ray's own start script and takes seconds;
    without a file name there is nothing to import.
    """
    import multiprocessing
    import multiprocessing.forkserver
    import sys

    vars(sys.modules["__main__"]).pop("__file__", None)
    # the server is a new interpreter: it finds this project only through its environment
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PROJECT_ROOT, os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(FORKSERVER_PRELOAD)
    multiprocessing.forkserver.ensure_running()


def _check_layout(layout: Layout, everyone: list[dict[str, Any]]) -> None:
    achieved = sorted(facts["rank"]["node_id"] for facts in everyone)
    if achieved != sorted(layout.node_ids):
        raise RuntimeError(f"ranks were placed on nodes {achieved}, not on {sorted(layout.node_ids)}")


# ---------------------------------------------------------------------------------------------------- the keeper


class Keeper:
    """Holds the one live worker group of a study. An asyncio actor: every method may wait while others run.

    Metrics of the latest trial are gauges of this process, which lives as long as the study.
    """

    def __init__(self, study_name: str, exhausted: list[dict[str, Any]]):
        # the controller polls its ranks at this interval; the default of 2 s is added to every start and end
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "60"
        os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "5"
        self.study_name = study_name
        self.exhausted = exhausted
        self.group: _Group | None = None
        self.opened_groups = 0
        self.gauges: dict[str, Any] = {}

    async def measure(self, job: dict[str, Any], layout: Layout, block: Any, timeout_s: float) -> dict[str, Any]:
        """Runs a job {"id", "trial", "source"} in the live group, or in a new one where layout or block differ.

        Gives {"status", "reason", "log", "worker_group", "environment", "payloads", "started_at", "duration_s"}.
        """
        started_at = time.time()
        try:
            group = await self._group_for(layout, block)
        except GroupError as error:
            return _outcome("failed", str(error), error.log, "", {}, started_at)
        job_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        group.job_id, group.job_future, group.failures = job["id"], job_future, []
        dispatched_at = time.time()
        await group.jobs.put(job)
        await asyncio.wait({job_future, group.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if job_future.done():
            payloads = job_future.result()
            began_at = min(payload["warmup_began_at"] for payload in payloads)
            ended_at = max(payload["windows_ended_at"] for payload in payloads)
            return _outcome("done", "", "", group.name, group.environment, began_at, ended_at, payloads)
        timed_out = not group.ended.done()
        if not timed_out:
            await asyncio.sleep(0)  # reports that arrived together with the end
        await self._end(group, kill=True)
        status, reason, log = group.verdict(timed_out, timeout_s)
        if status == "out_of_memory":
            self.exhausted.append(job["trial"])
        return _outcome(status, reason, log, group.name, group.environment, dispatched_at)

    async def exhausted_trials(self) -> list[dict[str, Any]]:
        """The fields of every trial so far that ran out of memory."""
        return self.exhausted

    async def close(self) -> None:
        """Ends the live group, if there is one, and waits until its processes and resources are gone."""
        if self.group is not None:
            await self._end(self.group, kill=False)

    async def export(self, trial_id: str, values: dict[str, float]) -> None:
        """Publishes numbers of the current trial as gauges `scaling_study_<name>` on this node's metrics port."""
        from ray.util.metrics import Gauge

        for name, value in values.items():
            if name not in self.gauges:
                self.gauges[name] = Gauge(
                    f"scaling_study_{name}", description=f"{name} of the current trial", tag_keys=("study", "trial")
                )
            self.gauges[name].set(value, tags={"study": self.study_name, "trial": trial_id})

    # called by ranks

    async def opened(self, name: str, environment: dict[str, Any], actors: list[Any]) -> None:
        """Rank 0 of a group says that all its ranks are connected."""
        if self.group and self.group.name == name:
            self.group.environment, self.group.actors = environment, actors
            self.group.ready.set()

    async def next_job(self, name: str) -> dict[str, Any] | None:
        """Rank 0 waits here for work; None means the end."""
        if self.group is None or self.group.name != name:
            return None
        return await self.group.jobs.get()

    async def finished(self, name: str, job_id: str, payloads: list[dict[str, Any]]) -> None:
        """Rank 0 hands in what all ranks measured."""
        group = self.group
        if group and group.name == name and group.job_id == job_id and group.job_future and not group.job_future.done():
            group.job_future.set_result(payloads)

    async def rank_failed(self, name: str, job_id: str, failure: dict[str, Any]) -> None:
        """A rank says what it raised, before it ends; the others get a moment to say theirs."""
        group = self.group
        if group is None or group.name != name:
            return
        group.failures.append(failure)
        if len(group.failures) == 1:
            asyncio.get_running_loop().call_later(FAILURE_GRACE_S, group.kill)

    # groups

    async def _group_for(self, layout: Layout, block: Any) -> "_Group":
        group = self.group
        if group is not None and (group.key != (layout, block) or group.ended.done()):
            await self._end(group, kill=False)
            group = None
        if group is None:
            self.opened_groups += 1
            name = f"{time.strftime('%Y%m%dT%H%M%S')}-{self.opened_groups}"
            group = self.group = _Group(name, layout, block)
            group.start(ray.get_runtime_context().current_actor)
        ready = asyncio.ensure_future(group.ready.wait())
        await asyncio.wait({ready, group.ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if group.ready.is_set():
            return group
        ready.cancel()
        timed_out = not group.ended.done()
        await self._end(group, kill=True)
        what = f"did not start within {START_TIMEOUT_S:.0f} s" if timed_out else "did not start"
        why = group.failures[0]["line"] if group.failures else _first_line(group.error)
        raise GroupError(f"worker group of {len(layout.node_ids)} ranks {what}: {why}", group.log())

    async def _end(self, group: "_Group", kill: bool) -> None:
        if kill:
            group.kill()
        else:
            await group.jobs.put(None)
        for wait_s in (CLOSE_TIMEOUT_S, CLOSE_TIMEOUT_S):
            await asyncio.wait({group.ended}, timeout=wait_s)
            if group.ended.done():
                break
            group.kill()
        if self.group is group:
            self.group = None


class GroupError(Exception):
    """A worker group that could not be started."""

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


class _Group:
    """One TorchTrainer run, in a thread of the keeper, and what is known of it."""

    def __init__(self, name: str, layout: Layout, block: Any):
        self.name, self.layout, self.key = name, layout, (layout, block)
        self.jobs: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.ready = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: BaseException | None = None
        self.environment: dict[str, Any] = {}
        self.actors: list[Any] = []
        self.job_id = ""
        self.job_future: asyncio.Future[Any] | None = None
        self.failures: list[dict[str, Any]] = []

    def start(self, keeper: Any) -> None:
        loop = asyncio.get_running_loop()

        def fit() -> None:
            try:
                self._fit(keeper)
            except BaseException as error:  # the thread's end, whatever it was, is what the keeper waits for
                self.error = error
            loop.call_soon_threadsafe(lambda: self.ended.done() or self.ended.set_result(None))

        threading.Thread(target=fit, name=f"worker group {self.name}", daemon=True).start()

    def _fit(self, keeper: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.train.v2.api.config import LoggingConfig

        layout = self.layout
        resources: dict[str, float] = {"CPU": layout.cpus_per_rank}
        if layout.device == "cuda":
            resources["GPU"] = 1
        # Train keeps a few files of its own per run; nothing of ours, and nothing that outlives it
        with tempfile.TemporaryDirectory(prefix="scaling-study-train-", ignore_cleanup_errors=True) as storage:
            TorchTrainer(
                serve,
                train_loop_config={"keeper": keeper, "layout": layout, "name": self.name},
                torch_config=TorchConfig(backend="nccl" if layout.device == "cuda" else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=len(layout.node_ids),
                    use_gpu=layout.device == "cuda",
                    resources_per_worker=resources,
                    label_selector=[{"ray.io/node-id": node_id} for node_id in layout.node_ids],
                ),
                run_config=RunConfig(
                    name=self.name,
                    storage_path=storage,
                    # a failed rank is our own to handle; resources that never come must not be waited for
                    failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                    worker_runtime_env={"env_vars": process_environment(layout)},
                    logging_config=LoggingConfig(log_level="WARNING"),
                ),
            ).fit()

    def kill(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(Exception):  # a rank that is gone already
                ray.kill(actor)

    def verdict(self, timed_out: bool, timeout_s: float) -> tuple[str, str, str]:
        """Status, reason in one line, and log of the job that this group did not finish."""
        exhausted = next((failure for failure in self.failures if failure["out_of_memory"]), None)
        if exhausted:
            return "out_of_memory", f"rank {exhausted['rank']}: {exhausted['line']}", self.log()
        if self.failures:
            first = self.failures[0]
            return "failed", f"rank {first['rank']} on node {first['node_id'][:8]}: {first['line']}", self.log()
        if timed_out:
            return "timeout", f"no result within {timeout_s:g} s (--trial-timeout)", self.log()
        for rank, error in getattr(self.error, "worker_failures", {}).items():
            status = "out_of_memory" if is_out_of_memory(error) else "failed"
            return status, f"rank {rank} died: {_first_line(error)}", self.log()
        return "failed", f"worker group ended: {_first_line(self.error)}", self.log()

    def log(self) -> str:
        """Tracebacks of all ranks that reported one, then what Ray Train said."""
        parts = [
            f"rank {failure['rank']} on node {failure['node_id']}\n{failure['traceback']}" for failure in self.failures
        ]
        if self.error is not None:
            parts.append("Ray Train\n" + "".join(traceback.format_exception(self.error)))
        return "\n".join(parts)


def _first_line(error: BaseException | None) -> str:
    if error is None:
        return "no reason given"
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _outcome(
    status: str,
    reason: str,
    log: str,
    worker_group: str,
    environment: dict[str, Any],
    started_at: float,
    ended_at: float | None = None,
    payloads: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "log": log,
        "worker_group": worker_group,
        "environment": environment,
        "started_at": started_at,
        "duration_s": (ended_at or time.time()) - started_at,
        "payloads": payloads or [],
    }
