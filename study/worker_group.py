"""Warm worker groups: one TorchTrainer run whose ranks serve trial after trial.

A cold TorchTrainer costs many seconds before its first step; most of that is starting processes, importing torch and
connecting ranks. A group pays it once. The `Keeper` is an actor that opens a group, hands it one job at a time, and
closes it; ranks ask it for the next job (`study/rank.py` is their side).

    Tune trial -> Keeper.measure(job) -> rank 0 -> broadcast -> trainables.run on the trial's ranks -> rows -> Keeper

Any failure ends the group: ranks that wait in a collective for one that raised can only be ended from outside.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
import time
import traceback
from typing import Any

import ray
from ray.util.metrics import Gauge

from study.failures import first_line, is_out_of_memory
from study.layout import Layout
from study.metrics import Metrics
from study.stuck import calls, culprits, told

START_TIMEOUT_S = 180.0
CLOSE_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 5.0
FAILURE_GRACE_S = 5.0
"""how long after one rank's failure the others may still report theirs"""


class _ToKeeper:
    """A rank's reports as calls of the keeper; each waits for its answer."""

    def __init__(self, keeper: Any, group_name: str):
        self.keeper, self.group_name = keeper, group_name

    def opened(self, environment: dict[str, Any], handles: list[Any]) -> None:
        ray.get(self.keeper.opened.remote(self.group_name, environment, handles))

    def next_job(self) -> dict[str, Any] | None:
        return ray.get(self.keeper.next_job.remote(self.group_name))

    def finished(self, job_id: str, payloads: list[dict[str, Any]]) -> None:
        ray.get(self.keeper.finished.remote(self.group_name, job_id, payloads))

    def failed(self, job_id: str, failure: dict[str, Any]) -> None:
        ray.get(self.keeper.rank_failed.remote(self.group_name, failure))


def train_loop(config: dict[str, Any]) -> None:
    """TorchTrainer's loop on every rank: not one training, but as many trials as the keeper has."""
    import torch
    from ray.train.torch import get_device

    from study.rank import serve

    layout: Layout = config["layout"]
    context = ray.get_runtime_context()
    device = get_device() if layout.kind.device == "cuda" else torch.device("cpu")
    serve(layout, context.get_node_id(), context.current_actor, device, _ToKeeper(config["keeper"], config["name"]))


class Keeper:
    """Holds the one live worker group of a study. An asyncio actor: every method may wait while others run.

    Metrics are gauges of this process, which lives as long as the study. `counts`: trials by status before the first one.
    """

    def __init__(self, study_name: str, exhausted: list[dict[str, Any]], counts: dict[str, int]):
        # Each poll of the controller runs Python in the rank and holds up its launches: at five a second a loop of small
        # operations stood still for 1 to 3 % of its time. Ends are noticed up to this much later.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "2"
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "60"
        os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "5"
        self.exhausted = exhausted
        self.group: _Group | None = None
        self.opened_groups = 0
        self.metrics = Metrics(study_name, counts, Gauge)

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
            # no node's clock is compared with another's: they may be apart
            began_at = payloads[0]["warmup_began_at"]
            span_s = max(payload["windows_ended_at"] - payload["warmup_began_at"] for payload in payloads)
            return _outcome("done", "", "", group.name, group.environment, began_at, span_s, payloads)
        timed_out = not group.ended.done()
        if timed_out:
            await group.look()
        else:
            await asyncio.sleep(0)  # reports that arrived together with the end
        await self._end(group, kill=True)
        status, reason, log = group.verdict(timeout_s if timed_out else None)
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

    async def ended(self, trial_id: str, status: str, values: dict[str, float]) -> None:
        """Publishes that a trial ended, and its numbers, on this node's metrics port."""
        self.metrics.ended(trial_id, status, values)

    # called by ranks

    async def opened(self, name: str, environment: dict[str, Any], actors: list[Any]) -> None:
        """Rank 0 of a group says that all its ranks are connected."""
        if self.group and self.group.name == name:
            self.group.environment, self.group.actors = environment, actors
            self.group.ready.set_result(None)

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

    async def rank_failed(self, name: str, failure: dict[str, Any]) -> None:
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
        await asyncio.wait({group.ready, group.ended}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if group.ready.done():
            return group
        timed_out = not group.ended.done()
        await self._end(group, kill=True)
        what = f"did not start within {START_TIMEOUT_S:.0f} s" if timed_out else "did not start"
        _, why, log = group.verdict()
        raise GroupError(f"worker group of {len(layout.node_ids)} ranks {what}: {why}", log)

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
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self.environment: dict[str, Any] = {}
        self.actors: list[Any] = []
        self.job_id = ""
        self.job_future: asyncio.Future[Any] | None = None
        self.failures: list[dict[str, Any]] = []
        self.stacks: list[Any] = []
        self.killed = False

    def start(self, keeper: Any) -> None:
        loop = asyncio.get_running_loop()

        def fit() -> None:
            try:
                self._fit(keeper)
            except BaseException as error:  # noqa: BLE001  the thread's end, whatever it was, is what the keeper waits for
                self.error = error
            loop.call_soon_threadsafe(self.ended.set_result, None)

        threading.Thread(target=fit, name=f"worker group {self.name}", daemon=True).start()

    def _fit(self, keeper: Any) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        from ray.train.v2.api.config import LoggingConfig

        layout, kind = self.layout, self.layout.kind
        on_gpu = kind.device == "cuda"
        # Train keeps a few files of its own per run; nothing of ours, and nothing that outlives it
        with tempfile.TemporaryDirectory(prefix="scaling-study-train-", ignore_cleanup_errors=True) as storage:
            TorchTrainer(
                train_loop,
                train_loop_config={"keeper": keeper, "layout": layout, "name": self.name},
                torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
                scaling_config=ScalingConfig(
                    num_workers=len(layout.node_ids),
                    use_gpu=on_gpu,
                    resources_per_worker={"CPU": kind.cpus_per_rank} | ({"GPU": 1} if on_gpu else {}),
                    label_selector=[{"ray.io/node-id": node_id} for node_id in layout.node_ids],
                ),
                run_config=RunConfig(
                    name=self.name,
                    storage_path=storage,
                    # a failed rank is our own to handle; resources that never come must not be waited for
                    failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                    worker_runtime_env={"env_vars": kind.environment()},
                    logging_config=LoggingConfig(log_level="WARNING"),
                ),
            ).fit()

    def kill(self) -> None:
        self.killed = self.killed or not self.ended.done()
        for actor in self.actors:
            with contextlib.suppress(Exception):  # a rank that is gone already
                ray.kill(actor)

    def verdict(self, timed_out_after_s: float | None = None) -> tuple[str, str, str]:
        """Status, reason in one line, and log of the job that this group did not finish."""
        ran_out = next((failure for failure in self.failures if failure["out_of_memory"]), None)
        if ran_out:
            return "out_of_memory", f"{self.place(ran_out['rank'])}: {ran_out['line']}", self.log()
        # a rank that was killed says nothing; those that lost it report a broken connection
        reported = {failure["rank"] for failure in self.failures}
        dead = {r: e for r, e in getattr(self.error, "worker_failures", {}).items() if r not in reported}
        if self.failures and (self.killed or not dead):
            first = self.failures[0]
            return "failed", f"{self.place(first['rank'])}: {first['line']}", self.log()
        if timed_out_after_s is not None:
            found = culprits(self.stacks) if self.stacks else {}
            who = "".join(f"; {self.place(rank)} {what}" for rank, what in found.items())
            return "timeout", f"no result within {timed_out_after_s:g} s (--trial-timeout){who}", self.log()
        for rank, error in dead.items():
            # Ray's own error where it ended a rank because the host's memory was full
            exhausted = is_out_of_memory(error) or isinstance(error, ray.exceptions.OutOfMemoryError)
            status = "out_of_memory" if exhausted else "failed"
            return status, f"{self.place(rank)} died: {first_line(error)}", self.log()
        return "failed", f"worker group ended: {first_line(self.error)}", self.log()

    def place(self, rank: int) -> str:
        """A rank with the host that it is on, and the begin of the node's id in Ray."""
        node_ids = [facts["node_id"] for facts in self.environment.get("ranks", [])]
        if rank >= len(node_ids):
            return f"rank {rank}"
        hosts = {node["node_id"]: node["host"] for node in self.environment["nodes"]}
        return f"rank {rank} on node {hosts[node_ids[rank]]} ({node_ids[rank][:8]})"

    async def look(self) -> None:
        """Asks every rank which calls it is in."""

        async def answer(actor: Any) -> Any:
            with contextlib.suppress(Exception):  # one that is stopped, gone or cut off
                return await asyncio.wait_for(
                    asyncio.wrap_future(actor.execute.remote(calls).future()), ANSWER_TIMEOUT_S
                )
            return None

        self.stacks = await asyncio.gather(*map(answer, self.actors))

    def log(self) -> str:
        """Where ranks were at the time limit, tracebacks of all that reported one, then what Ray Train said."""
        parts = [told(rank, found) for rank, found in enumerate(self.stacks)]
        parts += [
            f"rank {failure['rank']} on node {failure['node_id']}\n{failure['traceback']}" for failure in self.failures
        ]
        if self.error is not None:
            parts.append("Ray Train\n" + "".join(traceback.format_exception(self.error)))
        return "\n".join(parts)


def _outcome(
    status: str,
    reason: str,
    log: str,
    worker_group: str,
    environment: dict[str, Any],
    started_at: float,
    span_s: float | None = None,
    payloads: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "status": status,
        "reason": reason,
        "log": log,
        "worker_group": worker_group,
        "environment": environment,
        "started_at": started_at,
        "duration_s": time.time() - started_at if span_s is None else span_s,
        "payloads": payloads or [],
    }
