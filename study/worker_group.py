"""Warm worker groups: one TorchTrainer run whose ranks serve trial after trial.

A cold TorchTrainer costs many seconds before its first step; most of that is starting processes, importing torch and
connecting ranks. A group pays it once. The keeper (`study/keeper.py`) is an actor that opens a group, hands it one job
at a time, and closes it; ranks ask it for the next job (`study/rank.py` is their side).

Any failure ends the group: ranks that wait in a collective for one that raised can only be ended from outside.
"""

import asyncio
import contextlib
import threading
import time
import traceback
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from study.failures import cause_of, first_line, is_out_of_memory
from study.layout import Layout
from study.scratch import scratch_folder
from study.stuck import calls, culprits, told, wait_for_each_other

ANSWER_TIMEOUT_S = 5.0


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

    def epoch_ended(self, job_id: str, row: dict[str, Any]) -> None:
        ray.get(self.keeper.epoch_ended.remote(self.group_name, job_id, row))

    def load_checkpoint(self, job_id: str) -> bytes | None:
        return ray.get(self.keeper.load_checkpoint.remote(self.group_name, job_id))

    def save_checkpoint(self, job_id: str, content: bytes) -> None:
        ray.get(self.keeper.save_checkpoint.remote(self.group_name, job_id, content))

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


def free_groups_of_the_killed() -> None:
    """In an actor that Ray has started again: frees the room of the groups that it held when it was killed.

    Ray Train has an actor for that, which sometimes ends before the room is free (Ray 2.60), and the next group would wait
    for it in vain.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if context.get_actor_id() is None or not context.was_current_actor_reconstructed:
        return
    for group_id, facts in placement_group_table().items():
        # an id ends with its job's; Tune's own groups hold neither CPUs nor GPUs
        holds = any(bundle.get("CPU") or bundle.get("GPU") for bundle in facts["bundles"].values())
        if group_id.endswith(context.get_job_id()) and holds and facts["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


class GroupError(Exception):
    """A worker group that could not be started."""

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


class WorkerGroup:
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
        self.failures: list[dict[str, Any]] = []
        self.stacks: list[Any] = []
        self.killed = False
        self.asked_at = time.time()

    def start(self) -> None:
        """To be called in the keeper's own process, which its ranks then ask for jobs."""
        loop, keeper = asyncio.get_running_loop(), ray.get_runtime_context().current_actor

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
        with scratch_folder("train") as storage:
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

    def verdict(self, timed_out: str = "") -> tuple[str, str, str]:
        """Status, reason in one line, and log of the job that this group did not finish; `timed_out` says what was late."""
        ran_out = next((failure for failure in self.failures if failure["out_of_memory"]), None)
        if ran_out:
            return "out_of_memory", f"{self.place(ran_out['rank'])}: {ran_out['line']}", self.log()
        # a rank that was killed says nothing; those that lost it report a broken connection
        reported = {failure["rank"] for failure in self.failures}
        dead = {r: e for r, e in getattr(self.error, "worker_failures", {}).items() if r not in reported}
        if self.failures and (self.killed or not dead):
            first = self.failures[0]
            return "failed", f"{self.place(first['rank'])}: {first['line']}", self.log()
        if timed_out:
            found = culprits(self.stacks) if self.stacks else {}
            who = "".join(f"; {self.place(rank)} {what}" for rank, what in found.items())
            nodes = self.environment.get("nodes", [])
            if wait_for_each_other(self.stacks) and len(nodes) > 1:
                names = ", ".join(f"{node['host']} ({node['node_id'][:8]})" for node in nodes)
                who = f"; all ranks wait for each other: look at the network between nodes {names}"
            return "timeout", f"{timed_out}{who}", self.log()
        for rank, error in dead.items():
            # Ray's own error where it ended a rank because the host's memory was full
            cause = cause_of(error) or error
            exhausted = is_out_of_memory(cause) or isinstance(cause, ray.exceptions.OutOfMemoryError)
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
