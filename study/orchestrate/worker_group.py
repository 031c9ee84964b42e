"""Warm worker groups under Ray Train: one run of its trainer whose ranks serve group after group, trial after trial.

A cold trainer needs many seconds to start processes, import torch and connect ranks before its first step. A
launch pays this cost once. The keeper (`study/orchestrate/keeper.py`) opens a group (`study/orchestrate/group.py`),
gives it one job at a time, and closes it. Ranks request the next job from the keeper (`study/orchestrate/rank.py`).
In each group, each of Train's workers runs its rank in a fresh process (`study/orchestrate/processes/ranks.py`). Only a
train function or loop runs in the worker itself, because it may call Ray Train, and needs a launch per group.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from study.orchestrate.failures import RankDeathError
from study.orchestrate.processes.fork_server import OFFER, RANK_MODULES, start_forkserver
from study.orchestrate.processes.guard import guard_this_process
from study.orchestrate.processes.ranks import Place, calls_of_rank, host_rank
from study.orchestrate.processes.trainer import make_trainer
from study.orchestrate.protocol import KeeperProxy
from study.orchestrate.stuck import Calls
from study.plan.placement import Layout
from trainables.scratch import own_temporary_folder, scratch_folder

ANSWER_TIMEOUT_S = 5.0
STATE_TIMEOUT_S = 10
DELIBERATE_ENDS = ("RAY_KILL", "OUT_OF_SCOPE", "REF_DELETED", "OWNER_DIED")
"""Ray's reasons (ActorDiedErrorContext in common.proto) for actors that were ended, not killed by a fault."""


@dataclass(frozen=True)
class CallKeeper:
    """Calls a method of the keeper's actor and returns the answer."""

    keeper: Any

    def __call__(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.keeper, method).remote(*arguments))


def train_loop(config: dict[str, Any]) -> None:
    """Serve the keeper's groups as one rank. This is the training loop that Ray Train runs."""
    guard_this_process()
    # Ray Train sets it; a script would inherit it, unlike from torchrun
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    offer = os.environ.pop(OFFER, None)
    layout: Layout = config["layout"]
    call = CallKeeper(config["keeper"])
    actor = ray.get_runtime_context().current_actor
    with own_temporary_folder():
        if not layout.kind.forks_ranks:
            _serve_here(layout, KeeperProxy(call, config["name"]), actor)
            return
        start_forkserver([*RANK_MODULES, *layout.modules, *(layout.loader_modules or ())], offer)
        host_rank(_place(layout), config["name"], call, lambda process: actor)


def _place(layout: Layout) -> Place:
    """Return the place of this worker of Ray Train."""
    train = ray.train.get_context()
    variables = {
        "RANK": train.get_world_rank(),
        "WORLD_SIZE": train.get_world_size(),
        "LOCAL_RANK": train.get_local_rank(),
        "LOCAL_WORLD_SIZE": train.get_local_world_size(),
        "NODE_RANK": train.get_node_rank(),
    }  # those that Ray Train sets for torch
    return Place(
        rank=train.get_world_rank(),
        node_id=ray.get_runtime_context().get_node_id(),
        address=ray.util.get_node_ip_address(),
        gpu=None if layout.kind.device == "cpu" else visible_index(ray.get_gpu_ids(), os.environ),
        variables={name: str(value) for name, value in variables.items()},
    )


def visible_index(gpu_ids: Sequence[Any], environment: Mapping[str, str]) -> int:
    """Return the index of a process's first GPU among those that its environment shows."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(str(gpu_ids[0])) if visible else int(gpu_ids[0])


def _serve_here(layout: Layout, keeper: KeeperProxy, actor: Any) -> None:
    """Serve one group in this process."""
    import torch
    from ray.train.torch import get_device

    from study.orchestrate.rank import serve

    device = get_device() if layout.kind.device == "cuda" else torch.device("cpu")
    node_id, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    serve(layout, node_id, actor, device, keeper, address=address)


def free_leaked_resources() -> None:
    """If Ray has restarted this actor, free the placement groups of its worker groups.

    An actor of Ray Train should do this, but sometimes ends too early (Ray 2.60). The next group would then wait for
    these resources forever.
    """
    if not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    if context.get_actor_id() is None or not context.was_current_actor_reconstructed:
        return
    for group_id, facts in placement_group_table().items():
        # the id of a placement group ends with its job's id; Tune's own groups hold no CPUs or GPUs
        holds = any(bundle.get("CPU") or bundle.get("GPU") for bundle in facts["bundles"].values())
        if group_id.endswith(context.get_job_id()) and holds and facts["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))


class RayRanks:
    """A `RankBackend` whose ranks are actors of Ray Train. A rank's process handle is its actor."""

    def prepare(self) -> None:
        # Each poll of the controller runs Python in the rank and delays its kernel launches: five polls per second took
        # 1 to 3 % of the time of a loop of small operations. The end of a rank is noticed up to 2 s later.
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "2"
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60")
        # it would start a process during each group's first trial; a lost node costs its trial with or without it
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "5"
        free_leaked_resources()

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        """See `RankBackend`. Ranks call this process as an actor, not its Python object `keeper`."""
        actor = ray.get_runtime_context().current_actor
        return lambda: _fit(actor, name, layout)

    def renews(self, layout: Layout) -> bool:
        return layout.kind.forks_ranks

    def kill(self, process: Any) -> None:
        with contextlib.suppress(Exception):  # the rank has already ended
            ray.kill(process)

    async def calls_of(self, process: Any) -> Calls | None:
        with contextlib.suppress(Exception):  # stopped, ended or unreachable
            answer = asyncio.wrap_future(process.execute.remote(calls_of_rank).future())
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        return None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Return True if Ray killed the rank because the host's memory was full."""
        return isinstance(error, ray.exceptions.OutOfMemoryError)


def _fit(keeper: Any, name: str, layout: Layout) -> None:
    """Run a launch's ranks under Ray Train until all have ended."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.config import LoggingConfig

    kind = layout.kind
    on_gpu = kind.device == "cuda"
    # Train saves a few files of its own per run, which nobody needs afterwards
    with scratch_folder("train") as storage, _name_deaths():
        make_trainer(
            kind,
            train_loop,
            train_loop_config={"keeper": keeper, "layout": layout, "name": name},
            scaling_config=ScalingConfig(
                num_workers=len(layout.node_ids),
                use_gpu=on_gpu,
                resources_per_worker={"CPU": kind.cpus_per_rank} | ({"GPU": 1} if on_gpu else {}),
                label_selector=[{"ray.io/node-id": node_id} for node_id in layout.node_ids],
            ),
            run_config=RunConfig(
                name=name,
                storage_path=storage,
                # the keeper handles failed ranks; do not wait for missing resources forever
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                # forked ranks get theirs from `host_rank`, since the next group may need others
                worker_runtime_env={"env_vars": {} if kind.forks_ranks else kind.environment()},
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
        ).fit()


@contextlib.contextmanager
def _name_deaths() -> Iterator[None]:
    """Raise RankDeathError if a rank died before Ray Train knew all ranks of the group that starts in this block.

    Train then says that an actor failed to initialize, but not which one. Train makes a placement group per worker
    group, by which the group's actors are found.
    """
    from ray.train import ControllerError

    others = set(placement_group_table())
    try:
        yield
    except ControllerError as error:
        deaths = []
        with contextlib.suppress(Exception):  # without Ray's API server, Train's own message remains
            deaths = _deaths(set(placement_group_table()) - others)
        if not deaths:
            raise
        raise RankDeathError("; ".join(deaths)) from error


def _deaths(placement_groups: set[str]) -> list[str]:
    """Describe each actor of these placement groups that died otherwise than at Ray's request."""
    from ray.util.state import list_actors

    nodes = {node["NodeManagerAddress"]: node for node in ray.nodes()}  # an actor that never ran has no node id
    context = ray.get_runtime_context()
    filters: list[Any] = [("state", "=", "DEAD"), ("job_id", "=", context.get_job_id())]
    deaths = []
    for actor in list_actors(context.gcs_address, filters, limit=10_000, detail=True, timeout=STATE_TIMEOUT_S):
        (cause,) = (actor.death_cause or {"": {}}).values()
        if actor.placement_group_id in placement_groups and cause.get("reason", "") not in DELIBERATE_ENDS:
            node = nodes[cause["node_ip_address"]]
            deaths.append(f"process {cause['pid']} on node {node['NodeManagerHostname']} ({node['NodeID'][:8]}) died")
    return deaths
