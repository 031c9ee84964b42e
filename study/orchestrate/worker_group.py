"""Warm worker groups under Ray Train: one TorchTrainer run whose ranks serve trial after trial.

A cold TorchTrainer takes many seconds before its first step; most of that is starting processes, importing torch and
connecting ranks. A group pays it once. The keeper (`study/orchestrate/keeper.py`) is an actor that opens a group (`study/orchestrate/group.py`),
hands it one job at a time, and closes it; ranks ask it for the next job (`study/orchestrate/rank.py` is their side).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from study.orchestrate.protocol import KeeperProxy
from study.orchestrate.scratch import scratch_folder
from study.orchestrate.stuck import Calls, calls
from study.plan.placement import Layout

ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class CallKeeper:
    """Calls a method of the keeper's actor and waits for the answer."""

    keeper: Any

    def __call__(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.keeper, method).remote(*arguments))


def train_loop(config: dict[str, Any]) -> None:
    """TorchTrainer's loop on every rank: not one training, but as many trials as the keeper has."""
    import torch
    from ray.train.torch import get_device

    from study.orchestrate.rank import serve

    layout: Layout = config["layout"]
    context = ray.get_runtime_context()
    device = get_device() if layout.kind.device == "cuda" else torch.device("cpu")
    keeper = KeeperProxy(CallKeeper(config["keeper"]), config["name"])
    serve(layout, context.get_node_id(), context.current_actor, device, keeper)


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


class RayRanks:
    """Ranks of worker groups as actors of Ray Train. A `RankBackend`; a rank's process handle is its actor."""

    def prepare(self) -> None:
        # Each poll of the controller runs Python in the rank and holds up its launches: at five a second a loop of small
        # operations stood still for 1 to 3 % of its time. Ends are noticed up to this much later.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "2"
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
        # it would start a process beside each group's first trial; a node that goes costs its trial here, told or not
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "5"
        free_groups_of_the_killed()

    def launcher(self, keeper: Any, group_name: str, layout: Layout) -> Callable[[], None]:
        """See `RankBackend`. Ranks call the actor that this process is, and not its Python object `keeper`."""
        actor = ray.get_runtime_context().current_actor
        return lambda: _fit(actor, group_name, layout)

    def kill(self, process: Any) -> None:
        with contextlib.suppress(Exception):  # a rank that is gone already
            ray.kill(process)

    async def calls_of(self, process: Any) -> Calls | None:
        with contextlib.suppress(Exception):  # one that is stopped, gone or cut off
            answer = asyncio.wrap_future(process.execute.remote(calls).future())
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        return None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """True if Ray killed the rank because the host's memory was full."""
        return isinstance(error, ray.exceptions.OutOfMemoryError)


def _fit(keeper: Any, group_name: str, layout: Layout) -> None:
    """Run a group's ranks under a TorchTrainer until all have ended."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import LoggingConfig

    kind = layout.kind
    on_gpu = kind.device == "cuda"
    # Train keeps a few files of its own per run; nothing of ours, and nothing that outlives it
    with scratch_folder("train") as storage:
        TorchTrainer(
            train_loop,
            train_loop_config={"keeper": keeper, "layout": layout, "name": group_name},
            torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=len(layout.node_ids),
                use_gpu=on_gpu,
                resources_per_worker={"CPU": kind.cpus_per_rank} | ({"GPU": 1} if on_gpu else {}),
                label_selector=[{"ray.io/node-id": node_id} for node_id in layout.node_ids],
            ),
            run_config=RunConfig(
                name=group_name,
                storage_path=storage,
                # a failed rank is our own to handle; resources that never come must not be waited for
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                worker_runtime_env={"env_vars": kind.environment()},
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
        ).fit()
