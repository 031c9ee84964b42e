"""A rank in a warm worker group: connect, then serve one trial after another.

Uses torch.distributed but not Ray: it calls the keeper through a `KeeperProxy`. Control traffic (jobs, barriers, rows)
uses gloo, so that waiting ranks sleep and NCCL only carries gradients.
"""

import gc
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from study.orchestrate.failures import describe_failure
from study.orchestrate.measure import TrialRank, measure
from study.orchestrate.processes.fork_server import RANK_MODULES, await_forkserver, start_forkserver
from study.orchestrate.protocol import Environment, Job, KeeperProxy, Payload, RankFacts, RankProcess
from study.plan.placement import Layout, ProcessKind, members
from study.store.environment import (
    git_state,
    lock_file,
    measuring_code,
    node_facts,
    rank_facts,
    variables,
    versions,
)
from trainables.clock import process_start_unix_s, unix_s
from trainables.step.process import rehearse, release_memory

JOB_TIMEOUT = timedelta(days=30)
"""Maximum time for which an idle rank waits for the next job. It sleeps meanwhile."""


@dataclass(frozen=True)
class RankFunctions:
    """Functions of a rank that simulated ranks replace (`benchmarks/harness/fake_ranks.py`).

    `collectives` has the functions of torch.distributed; `measure` measures one job on one rank.
    """

    collectives: Any = dist
    rehearse: Callable[[torch.device, Any], None] = rehearse
    measure: Callable[[Job, TrialRank, KeeperProxy], Payload] = measure


@dataclass(frozen=True)
class _TrialGroup:
    """Ranks of the worker group for trials of one size, and their process groups."""

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
    address: str = "127.0.0.1",
) -> None:
    """Serve trials on this rank until `next_job` returns None. Requires the default process group.

    `process` is the handle with which the keeper kills this rank. `address` is that of its node. Exceptions of trials
    are reported, then raised. The group's environment has the end of each phase of this rank's start (`startup`, Unix
    time in s): process started, loop started (torch imported, default process group created), other modules imported,
    device context created, process groups created, first step of each group run.
    """
    startup = {"process_began_at": process_start_unix_s(), "loop_began_at": unix_s()}
    rank = functions.collectives.get_rank()
    this_process = RankProcess(rank, node_id, socket.gethostname(), process)
    keeper.starting(this_process)
    _import_modules(layout)
    keeper.starting(this_process)
    startup["imported_at"] = unix_s()
    own_code = layout.kind.door != "factory"
    if device.type == "cuda" and not own_code:
        torch.zeros(1, device=device)
    startup["context_at"] = unix_s()
    control = functions.collectives.new_group(backend="gloo", timeout=JOB_TIMEOUT)
    facts = RankFacts(rank_facts(rank, node_id, device), node_facts(node_id) | {"versions": versions()})
    all_facts: list[RankFacts] = _all_gather(facts, control, functions)
    groups = _trial_groups(layout, all_facts, functions)
    startup["grouped_at"] = unix_s()
    if not own_code:  # a script needs the whole memory of the GPU, and a train function sets up its own
        _rehearse(rank, device, groups, functions)
    startup["rehearsed_at"] = unix_s()
    startups = _all_gather(startup, control, functions)
    if rank == 0:
        environment = replace(_environment(all_facts, layout.kind), startup=startups)
        keeper.opened(environment)
    me = TrialRank(rank, device, control=control, node_id=node_id, address=address)
    _serve_jobs(me, groups, keeper, functions)


def _import_modules(layout: Layout) -> None:
    """Import the modules of the group's trials, while the fork server of loader processes does the same."""
    if layout.loader_modules is not None:
        start_forkserver(layout.loader_modules)
    for module in (*RANK_MODULES, *layout.modules):
        import_module(module)
    if layout.loader_modules is not None:
        await_forkserver()


def _all_gather(value: Any, control: Any, functions: RankFunctions) -> list[Any]:
    values: list[Any] = [None] * functions.collectives.get_world_size()
    functions.collectives.all_gather_object(values, value, group=control)
    return values


def _trial_groups(layout: Layout, all_facts: Sequence[RankFacts], functions: RankFunctions) -> dict[int, _TrialGroup]:
    """Create the process groups per trial size. Raises RuntimeError if ranks are on other nodes than planned."""
    node_ids = [facts.node_id for facts in all_facts]
    if sorted(node_ids) != sorted(layout.node_ids):
        raise RuntimeError(f"ranks were placed on nodes {sorted(node_ids)}, not on {sorted(layout.node_ids)}")
    new_group = functions.collectives.new_group
    groups = {}
    for size in layout.world_sizes:  # every rank must create every group, in the same order (torch.distributed)
        ranks = members(node_ids, size)
        groups[size] = _TrialGroup(ranks, new_group(ranks), new_group(ranks, backend="gloo", timeout=JOB_TIMEOUT))
    return groups


def _rehearse(rank: int, device: torch.device, groups: Mapping[int, _TrialGroup], functions: RankFunctions) -> None:
    """Run a first step in each process group of this rank."""
    for group in groups.values():
        if rank in group.ranks:
            functions.rehearse(device, group.gradients)
    release_memory()
    gc.freeze()  # garbage collections during trials need not scan the modules imported so far


def _serve_jobs(
    member: TrialRank, groups: Mapping[int, _TrialGroup], keeper: KeeperProxy, functions: RankFunctions
) -> None:
    """Measure one job after another on the ranks that its trial uses. `member` is this rank in the worker group."""
    rank = member.rank
    for number in itertools.count():
        received: list[Job | None] = [keeper.next_job() if rank == 0 else None]
        functions.collectives.broadcast_object_list(received, src=0, group=member.control)
        [job] = received
        if job is None:
            return
        group = groups[job.trial.processes]
        if rank not in group.ranks:
            continue
        of_job = keeper.for_job(job.id)
        try:
            trial_rank = replace(
                member,
                rank=group.ranks.index(rank),
                group=group.gradients,
                control=group.control,
                job_number=number,
            )
            payload = functions.measure(job, trial_rank, of_job)
        except BaseException as error:
            of_job.failed(describe_failure(rank, member.node_id, error))
            raise
        payloads: list[Any] | None = [None] * len(group.ranks) if rank == 0 else None
        functions.collectives.gather_object(payload, payloads, dst=0, group=group.control)
        if payloads is not None:
            of_job.finished(payloads)


def _environment(all_facts: Sequence[RankFacts], kind: ProcessKind) -> Environment:
    set_by_study = set(kind.environment())
    if os.environ.get("OMP_NUM_THREADS") == str(kind.cpus_per_rank):  # Ray sets it unless the shell does
        set_by_study.add("OMP_NUM_THREADS")
    return Environment(
        nodes=list({facts.node_id: facts.node for facts in all_facts}.values()),
        ranks=[facts.rank for facts in all_facts],
        versions=versions(),
        variables=variables(),
        set_by_study=sorted(set_by_study),
        git=git_state(),
        measuring_code=measuring_code(),
        lock_file=lock_file(),
    )
