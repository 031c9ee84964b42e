"""A rank's life in a warm worker group: connect, then one trial after another until there is none.

Knows torch.distributed but no cluster: it reaches the keeper through a `KeeperProxy`. Control traffic (jobs, barriers,
rows) goes over gloo, so that waiting ranks sleep and NCCL is left to the gradients.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from analysis.load.schema import SCHEMAS
from study.orchestrate.failures import describe_failure
from study.orchestrate.protocol import Environment, Evidence, Job, KeeperProxy, Payload, RankFacts
from study.plan.placement import Layout, ProcessKind, members
from study.store.environment import (
    energies,
    git_state,
    measuring_code,
    node_facts,
    rank_facts,
    readings,
    variables,
    versions,
)
from study.store.tables import packed
from trainables.measure.run import run
from trainables.step.context import RankSetup
from trainables.step.process import rehearse, release_memory
from trainables.train.train import train

PROJECT_ROOT = str(Path(__file__).resolve().parent.parent.parent)
LOADER_MODULES = ["torch", "pyarrow.dataset", "trainables.batch"]
"""what every loader process needs before its first batch; without it each start imports for seconds"""

RANK_MODULES = [*LOADER_MODULES, "torch._dynamo"]
"""what every rank would else import in its first trial; making a DDP wrapper imports torch._dynamo"""

PATIENCE = timedelta(days=30)
"""how long a rank without work waits for the next job; it sleeps meanwhile"""


@dataclass(frozen=True)
class TrialRank:
    """This process as a rank of one trial. `group` carries gradients, `control` everything else."""

    rank: int
    device: torch.device
    group: Any = None
    control: Any = None


def measure(job: Job, trial_rank: TrialRank, keeper: KeeperProxy) -> Payload:
    """Run a trial on this rank, timed windows or a training, and return what the keeper hands on.

    The evidence holds memory and `readings` before and after; for timed windows also the `energies` of the GPUs that the
    rank drives, before and after the plain window.
    """
    trial, device = job.trial, trial_rank.device

    def allocated_bytes() -> int | None:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    before_bytes = allocated_bytes()
    setup = RankSetup(
        trial_rank.rank,
        device,
        trial_rank.group,
        trial_rank.control,
        source=job.source,
        observe=lambda: readings(device),
        read_energy=energies,
        on_epoch=keeper.epoch_ended,
        checkpoints=keeper,
        checkpoint_every_s=job.checkpoint_every_s,
    )
    output = (train if trial.epochs else run)(trial, setup)
    started_at, ended_at = output.span
    return Payload(
        tables={name: packed(name, output.tables.get(name, ())) for name in SCHEMAS},
        evidence=Evidence(
            memory={"before_bytes": before_bytes, "after_bytes": allocated_bytes()},
            threads=trial.cpus_per_rank,
            **output.evidence,
        ),
        started_at=started_at,
        ended_at=ended_at,
        trace=output.trace,
    )


@dataclass(frozen=True)
class RankFunctions:
    """The functions of a rank that its twins without GPUs or processes replace (`benchmarks/harness/fake_ranks.py`).

    `collectives` stands for torch.distributed; `measure` measures one job on one rank.
    """

    collectives: Any = dist
    rehearse: Callable[[torch.device, Any], None] = rehearse
    measure: Callable[[Job, TrialRank, KeeperProxy], Payload] = measure


@dataclass(frozen=True)
class _TrialGroup:
    """The ranks of the worker group that trials of one size use, and their process groups."""

    ranks: Sequence[int]
    gradients: Any
    control: Any


def serve(
    layout: Layout,
    node_id: str,
    process: Any,
    device: torch.device,
    keeper: KeeperProxy,
    functions: RankFunctions = RankFunctions(),
) -> None:
    """Serve trials on this rank until `next_job` returns None. Requires the default process group.

    `process` is the handle by which the keeper kills this rank. Raises what a trial raises, after reporting it. The
    group's environment holds when each rank had finished each part of its start (`startup`, unix seconds): its process
    started, its loop started (torch was imported and the default process group made), the rest was imported, the device
    had a context, groups were made, and each group's first step had run.
    """
    startup = {"process_began_at": psutil.Process().create_time(), "loop_began_at": time.time()}
    _import_modules(layout)
    startup["imported_at"] = time.time()
    if device.type == "cuda":
        torch.zeros(1, device=device)
    startup["context_at"] = time.time()
    rank = functions.collectives.get_rank()
    control = functions.collectives.new_group(backend="gloo", timeout=PATIENCE)
    facts = RankFacts(rank_facts(rank, node_id, device), node_facts(node_id) | {"versions": versions()}, process)
    everyone: list[RankFacts] = _gathered_by_all(facts, control, functions)
    groups = _trial_groups(layout, everyone, functions)
    startup["grouped_at"] = time.time()
    _rehearse(rank, device, groups, functions)
    startup["rehearsed_at"] = time.time()
    startups = _gathered_by_all(startup, control, functions)
    if rank == 0:
        environment = replace(_environment(everyone, layout.kind), startup=startups)
        keeper.opened(environment, [facts.process for facts in everyone])
    _serve_jobs(rank, node_id, device, groups, control, keeper, functions)


def _import_modules(layout: Layout) -> None:
    """Import what the group's trials need, while the server of loader processes does the same."""
    if layout.loader_modules is not None:
        start_forkserver(layout.loader_modules)
    for module in (*RANK_MODULES, *layout.modules):
        import_module(module)
    if layout.loader_modules is not None:
        await_forkserver()


def _gathered_by_all(value: Any, control: Any, functions: RankFunctions) -> list[Any]:
    values: list[Any] = [None] * functions.collectives.get_world_size()
    functions.collectives.all_gather_object(values, value, group=control)
    return values


def _trial_groups(layout: Layout, everyone: Sequence[RankFacts], functions: RankFunctions) -> dict[int, _TrialGroup]:
    """Make the process groups of each size of trial. Raises RuntimeError if ranks sit on other nodes than planned."""
    node_ids = [facts.node_id for facts in everyone]
    if sorted(node_ids) != sorted(layout.node_ids):
        raise RuntimeError(f"ranks were placed on nodes {sorted(node_ids)}, not on {sorted(layout.node_ids)}")
    new_group = functions.collectives.new_group
    groups = {}
    for size in layout.world_sizes:  # torch.distributed requires every rank to make every group, in the same order
        ranks = members(node_ids, size)
        groups[size] = _TrialGroup(ranks, new_group(ranks), new_group(ranks, backend="gloo", timeout=PATIENCE))
    return groups


def _rehearse(rank: int, device: torch.device, groups: Mapping[int, _TrialGroup], functions: RankFunctions) -> None:
    """Run a first step in each group of this rank."""
    for group in groups.values():
        if rank in group.ranks:
            functions.rehearse(device, group.gradients)
    release_memory()
    gc.freeze()  # modules imported by now stay: the garbage collections of trials need not walk them again


def _serve_jobs(
    rank: int,
    node_id: str,
    device: torch.device,
    groups: Mapping[int, _TrialGroup],
    control: Any,
    keeper: KeeperProxy,
    functions: RankFunctions,
) -> None:
    """Measure one job after another, on the ranks that its trial uses."""
    while True:
        received: list[Job | None] = [keeper.next_job() if rank == 0 else None]
        functions.collectives.broadcast_object_list(received, src=0, group=control)
        [job] = received
        if job is None:
            return
        group = groups[job.trial.processes]
        if rank not in group.ranks:
            continue
        of_job = keeper.for_job(job.id)
        try:
            trial_rank = TrialRank(group.ranks.index(rank), device, group.gradients, group.control)
            payload = functions.measure(job, trial_rank, of_job)
        except BaseException as error:
            of_job.failed(describe_failure(rank, node_id, error))
            raise
        payloads: list[Any] | None = [None] * len(group.ranks) if rank == 0 else None
        functions.collectives.gather_object(payload, payloads, dst=0, group=group.control)
        if payloads is not None:
            of_job.finished(payloads)


def start_forkserver(modules: Sequence[str]) -> None:
    """The parent of this rank's loader processes, started once with torch and these imported: a loader then starts at once.

    A loader process imports `__main__` again, which in a Ray worker is Ray's own start script and takes seconds;
    without a file name there is nothing to import.
    """
    vars(sys.modules["__main__"]).pop("__file__", None)
    # the server is a new interpreter: it finds this project only through its environment
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PROJECT_ROOT, os.environ.get("PYTHONPATH")]))
    multiprocessing.get_context("forkserver").set_forkserver_preload([*LOADER_MODULES, *modules])
    multiprocessing.forkserver.ensure_running()


def await_forkserver() -> None:
    """Returns once loader processes can start at once: the server answers after it has imported everything."""
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join()


def _environment(everyone: Sequence[RankFacts], kind: ProcessKind) -> Environment:
    set_by_study = set(kind.environment())
    if os.environ.get("OMP_NUM_THREADS") == str(kind.cpus_per_rank):  # Ray sets it unless the shell does
        set_by_study.add("OMP_NUM_THREADS")
    return Environment(
        nodes=list({facts.node_id: facts.node for facts in everyone}.values()),
        ranks=[facts.rank for facts in everyone],
        versions=versions(),
        variables=variables(),
        set_by_study=sorted(set_by_study),
        git=git_state(),
        measuring_code=measuring_code(),
    )
