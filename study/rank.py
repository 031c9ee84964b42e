"""A rank's life in a warm worker group: connect, then one trial after another until there is none.

Knows torch.distributed but no cluster: what reaches the keeper comes in as functions. Control traffic (jobs, barriers,
rows) goes over gloo, so that waiting ranks sleep and NCCL is left to the gradients.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from analysis.schema import SCHEMAS
from study.environment import (
    energies,
    git_state,
    measuring_code,
    node_facts,
    rank_facts,
    readings,
    variables,
    versions,
)
from study.failures import describe_failure
from study.layout import Layout, ProcessKind, members
from study.tables import packed
from trainables.process import rehearse, release_memory
from trainables.run import Measurement, run
from trainables.train import Trained, train
from trainables.trial import Trial

PROJECT_ROOT = str(Path(__file__).resolve().parent.parent)
LOADER_MODULES = ["torch", "pyarrow.dataset", "trainables.batch"]
"""what every loader process needs before its first batch; without it each start imports for seconds"""

RANK_MODULES = [*LOADER_MODULES, "torch._dynamo"]
"""what every rank would else import in its first trial; making a DDP wrapper imports torch._dynamo"""

PATIENCE = timedelta(days=30)
"""how long a rank without work waits for the next job; it sleeps meanwhile"""


class Reports(Protocol):
    """The keeper's side, as a rank sees it. Any rank may fail; all else is rank 0's."""

    def opened(self, environment: dict[str, Any], handles: list[Any]) -> None: ...

    def next_job(self) -> dict[str, Any] | None: ...

    def finished(self, job_id: str, payloads: list[dict[str, Any]]) -> None: ...

    def epoch_ended(self, job_id: str, row: dict[str, Any]) -> None: ...

    def load_checkpoint(self, job_id: str) -> bytes | None: ...

    def save_checkpoint(self, job_id: str, content: bytes) -> None: ...

    def failed(self, job_id: str, failure: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class _Checkpoints:
    """A job's checkpoints, kept by the keeper."""

    reports: Reports
    job_id: str

    def load(self) -> bytes | None:
        return self.reports.load_checkpoint(self.job_id)

    def save(self, content: bytes) -> None:
        self.reports.save_checkpoint(self.job_id, content)


def serve(layout: Layout, node_id: str, handle: Any, device: torch.device, reports: Reports) -> None:
    """Serves trials on this rank until `next_job` gives None. The default process group is there already.

    `handle` is what ends this rank from outside. Raises what a trial raises, after reporting it. The group's environment
    tells when each rank had done which part of its start (`startup`, unix seconds): its process began, its loop began
    (torch was imported and the default process group made), the rest was imported, the device had a context, groups were
    made, and each group's first step had run.
    """
    startup = {"process_began_at": psutil.Process().create_time(), "loop_began_at": time.time()}
    if layout.loader_modules is not None:
        start_forkserver(layout.loader_modules)
    for module in (*RANK_MODULES, *layout.modules):
        import_module(module)
    if layout.loader_modules is not None:
        await_forkserver()
    startup["imported_at"] = time.time()
    if device.type == "cuda":
        torch.zeros(1, device=device)
    startup["context_at"] = time.time()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    control: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    everyone: list[Any] = [None] * world_size
    mine = {
        "rank": rank_facts(rank, node_id, device),
        "node": node_facts(node_id) | {"versions": versions()},
        "handle": handle,
    }
    dist.all_gather_object(everyone, mine, group=control)
    node_ids = [facts["rank"]["node_id"] for facts in everyone]
    if sorted(node_ids) != sorted(layout.node_ids):
        raise RuntimeError(f"ranks were placed on nodes {sorted(node_ids)}, not on {sorted(layout.node_ids)}")
    # every rank makes every group, in the same order, as torch.distributed demands
    groups = {size: _groups(members(node_ids, size)) for size in layout.world_sizes}
    startup["grouped_at"] = time.time()
    for chosen, group, _ in groups.values():
        if rank in chosen:
            rehearse(device, group)
    release_memory()
    gc.freeze()  # what is imported by now stays: each trial's collections need not walk it again
    startup["rehearsed_at"] = time.time()
    startups: list[Any] = [None] * world_size
    dist.all_gather_object(startups, startup, group=control)
    if rank == 0:
        environment = _environment(everyone, layout.kind) | {"startup": startups}
        reports.opened(environment, [facts["handle"] for facts in everyone])

    while True:
        job = [reports.next_job() if rank == 0 else None]
        dist.broadcast_object_list(job, src=0, group=control)
        if job[0] is None:
            return
        chosen, group, group_control = groups[Trial.model_validate(job[0]["trial"]).processes]
        if rank not in chosen:
            continue
        try:
            payload = measure(job[0], chosen.index(rank), device, group, group_control, reports)
        except BaseException as error:
            reports.failed(job[0]["id"], describe_failure(rank, node_id, error))
            raise
        payloads: list[Any] | None = [None] * len(chosen) if rank == 0 else None
        dist.gather_object(payload, payloads, dst=0, group=group_control)
        if payloads is not None:
            reports.finished(job[0]["id"], payloads)


def measure(
    job: dict[str, Any], trial_rank: int, device: torch.device, group: Any, control: Any, reports: Reports
) -> dict[str, Any]:
    """Runs a trial on this rank, timed windows or a training, and gives what the keeper hands on.

    That is: its tables as Arrow streams, the profiler's trace where it kept one, the span of its windows or of this run
    of its training, and as evidence its memory and `readings` before and after; of timed windows also the `energies` of the
    GPUs that it drives, before and after the plain one (`plain_window`).
    """

    def allocated_bytes() -> int | None:
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

    trial = Trial.model_validate(job["trial"])
    before_bytes = allocated_bytes()
    ranks = {"rank": trial_rank, "device": device, "group": group, "control": control, "source": job["source"]}
    measured: Measurement | Trained
    rows: dict[str, Sequence[dict[str, Any]]]
    own: dict[str, Any]
    if trial.epochs:
        measured = trained = train(
            trial,
            **ranks,
            checkpoints=_Checkpoints(reports, job["id"]),
            on_epoch=lambda row: reports.epoch_ended(job["id"], row),
            observe=lambda: readings(device),
            checkpoint_every_s=job["checkpoint_every_s"],
        )
        rows = {"steps": trained.steps, "epochs": trained.epochs}
        span = {"began_at": trained.began_at, "ended_at": trained.ended_at}
        own = {"noise_ratio": trained.noise_ratio}
        trace = None
    else:
        measured = timed = run(trial, **ranks, observe=lambda: readings(device), read_energy=energies)
        rows = {"steps": timed.rows, "buckets": timed.buckets, "sweep": timed.sweep}
        span = {"began_at": timed.warmup_began_at, "ended_at": timed.windows_ended_at}
        own = {"plain_window": dict(zip(("before", "after"), timed.energies, strict=True))}
        trace = timed.trace
    before, after = measured.observations
    return {
        **{name: packed(name, rows.get(name, ())) for name in SCHEMAS},
        "trace": trace,
        **span,
        "evidence": {
            "before": before,
            "after": after,
            "memory": {"before_bytes": before_bytes, "after_bytes": allocated_bytes()},
            "threads": trial.cpus_per_rank,
            "peak_memory_by_device_bytes": measured.peak_memory_by_device_bytes,
            "step_flops": measured.step_flops,
            "dataset_samples": measured.dataset_samples,
        }
        | own,
    }


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


def _groups(chosen: list[int]) -> tuple[list[int], Any, Any]:
    """These ranks, their group for gradients (the default backend's), and their gloo group for control."""
    return chosen, dist.new_group(chosen), dist.new_group(chosen, backend="gloo", timeout=PATIENCE)


def _environment(everyone: list[dict[str, Any]], kind: ProcessKind) -> dict[str, Any]:
    """What is the same for all trials of a group. `set_by_study` names variables whose values follow from their fields."""
    set_by_study = set(kind.environment())
    if os.environ.get("OMP_NUM_THREADS") == str(kind.cpus_per_rank):  # Ray's doing, where the shell said nothing
        set_by_study.add("OMP_NUM_THREADS")
    nodes = {facts["node"]["node_id"]: facts["node"] for facts in everyone}
    return {
        "nodes": list(nodes.values()),
        "ranks": [facts["rank"] for facts in everyone],
        "versions": versions(),
        "variables": variables(),
        "set_by_study": sorted(set_by_study),
        "git": git_state(),
        "measuring_code": measuring_code(),
    }
