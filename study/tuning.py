"""The grid under Ray Tune: one Tune trial a Trial, each a thin driver that asks the keeper for its measurement.

Tune schedules and shows; the store is the truth. A Tune trial holds no CPU and no GPU: it is pinned to the driver's
host by a sliver of that node's own resource, so that the driver alone needs to reach the results folder.
"""

import contextlib
import dataclasses
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow as pa
import ray
from ray import tune
from ray.tune.logger import JsonLoggerCallback
from ray.util.metrics import Gauge

from analysis.schema import SCHEMAS
from study import checkpoints
from study.cluster import Cluster, alive_nodes
from study.failures import first_line
from study.keeper import Keeper
from study.layout import Layout, ProcessKind, layouts, may_run_beside, members, relaid, side_by_side_nodes
from study.metrics import counts, numbers
from study.plan import SETTLED, pruned_by
from study.scratch import scratch_folder
from study.status import statuses_of
from study.store import Store, StoreError, TrialResult
from study.tables import unpacked
from trainables.trial import Trial

CLOSE_TIMEOUT_S = 45.0
"""less than the 60 s after which Ray aborts a driver whose cluster has gone"""

CLOSE_ASKED_EVERY_S = 1.0
EPOCHS_ASKED_EVERY_S = 1.0
CHECKPOINT_EVERY_S = 30.0
"""a training's state crosses the cluster to the driver's host: that of ResNet-50 is 200 MB"""


@dataclass(frozen=True)
class Event:
    """Something that a person who watches wants to know."""

    kind: Literal["group_starting", "trial_started", "epoch_ended", "trial_ended"]
    trial: Trial | None = None
    status: str = ""
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def run_trials(
    study_name: str,
    blocks: Sequence[Sequence[Trial]],
    store: Store,
    cluster: Cluster,
    *,
    isolate: bool = False,
    trial_timeout_s: float = 600.0,
    max_concurrent: int = 1,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    on_event: Callable[[Event], None] = lambda event: None,
) -> bool:
    """Runs all trials and saves each as it ends. True where Ctrl-C ended it early.

    `blocks`: the trials of one element may share a warm worker group, in their order; with `isolate` none do.
    With `max_concurrent` above 1 trainings on one rank follow the others, so many of them side by side as fit.
    """

    def part(beside: bool) -> list[list[Trial]]:
        return [
            [trial for trial in block if (max_concurrent > 1 and may_run_beside(trial)) == beside] for block in blocks
        ]

    try:
        for trials, side_by_side in ((part(beside=False), 1), (part(beside=True), max_concurrent)):
            if any(trials):
                tune_grid(
                    study_name,
                    trials,
                    store,
                    cluster,
                    isolate,
                    trial_timeout_s,
                    on_event,
                    side_by_side,
                    checkpoint_every_s,
                )
    except KeyboardInterrupt:
        return True
    return False


def tune_grid(
    study_name: str,
    blocks: Sequence[Sequence[Trial]],
    store: Store,
    cluster: Cluster,
    isolate: bool = False,
    trial_timeout_s: float = 600.0,
    on_event: Callable[[Event], None] = lambda event: None,
    side_by_side: int = 1,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> tune.ResultGrid:
    """Tune's own result grid: a row a trial, its fields under `config/point/trial/...`, throughput and phase medians beside,
    of a training what its last epoch came to.

    With `side_by_side` above 1 as many trials run at once, of one rank each.
    """
    trials = [trial for block in blocks for trial in block]
    points: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        for trial in block:
            lone = f"isolated-{len(points)}" if isolate else None
            points.append({"trial": trial.model_dump(), "block": lone or f"block-{number}"})
    records = store.records()
    exhausted = [record["trial"] for record in records if record["status"] == "out_of_memory"]
    statuses = statuses_of(records)
    options = {"num_cpus": 0, "resources": cluster.driver_resource, "max_restarts": -1}
    known = counts(statuses, [trial.trial_id for trial in trials])
    rooms = side_by_side_nodes(trials, cluster.nodes)[:side_by_side] if side_by_side > 1 else []
    raylets = _raylets(cluster)
    keeper = ray.remote(Keeper).options(**options).remote(study_name, exhausted, store, known, Gauge, rooms)
    task = _Task(
        keeper=keeper,
        store=store,
        layouts=layouts(trials, cluster.nodes),
        isolate=isolate,
        trial_timeout_s=trial_timeout_s,
        checkpoint_every_s=checkpoint_every_s,
        sources=_workload_sources(trials),
        hosts={node.node_id: f"{node.address} ({node.node_id[:8]})" for node in cluster.nodes},
    )
    if points:  # its processes start while Tune's do
        keeper.prepare.remote(task.layout(trials[0]), points[0]["block"])
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune's handler would end the grid as if nothing had happened
    # Tune keeps pickled state of its own per run; nothing of ours, and nothing that outlives it
    with scratch_folder("tune") as state_dir:
        try:
            return tune.Tuner(
                tune.with_resources(tune.with_parameters(measure_point, task=task), cluster.driver_resource),
                param_space={"point": tune.grid_search(points)},
                tune_config=tune.TuneConfig(max_concurrent_trials=max(1, len(rooms)), reuse_actors=True),
                run_config=tune.RunConfig(
                    name=study_name,
                    storage_path=state_dir,
                    verbose=0,
                    callbacks=[JsonLoggerCallback(), _Narrator(on_event)],
                ),
            ).fit()
        except KeyboardInterrupt:
            gc.freeze()  # Tune's garbage, when collected, asks Ray, and waits a minute where that was told to end too
            raise
        finally:
            _close(keeper, raylets, cluster.is_local)


@dataclass
class _Task:
    """What every Tune trial of a study needs besides its point of the grid."""

    keeper: Any
    store: Store
    layouts: dict[ProcessKind, Layout]
    isolate: bool
    trial_timeout_s: float
    checkpoint_every_s: float
    sources: dict[str, str]
    hosts: dict[str, str]

    def layout(self, trial: Trial) -> Layout:
        """Where the ranks of a trial's group sit: on other nodes than planned where one of those is gone.

        Raises ValueError where too few are left.
        """
        layout = relaid(self.layouts[ProcessKind.of(trial)], alive_nodes())
        return dataclasses.replace(layout, world_sizes=(trial.processes,)) if self.isolate else layout


def measure_point(config: dict[str, Any], task: _Task) -> None:
    """A Tune trial: measure one point of the grid, save it, report it.

    Reports `study_trial_id`, `status`, `reason` and every number of `analysis.measures.summarise` that is not null; a
    training reports each epoch, and in place of those numbers what the last one came to.
    """
    trial = Trial.model_validate(config["point"]["trial"])
    result = _pruned(trial, task.keeper) or _measured(trial, config["point"]["block"], task)
    try:
        task.store.save(result)
    except StoreError as error:  # a full disk, say: the next trial may find room again
        reason = f"measured as {result.status}, but not kept, so it runs again next time: {error}"
        result = TrialResult(trial=trial, status="failed", reason=reason, started_at=time.time(), duration_s=0.0)
    if result.status in SETTLED:
        checkpoints.drop(task.store, [trial.trial_id])
    summary = numbers(result)
    _asked(task.keeper.ended, trial.trial_id, result.status, {k: float(v) for k, v in summary.items()})
    report = {"study_trial_id": trial.trial_id, "status": result.status, "reason": result.reason}
    tune.report(
        report | {"log": f"{task.store.trial_folder(trial.trial_id)}/error.log" if result.log else "", **summary}
    )


def _asked(method: Any, *arguments: Any) -> Any:
    """What the keeper answers, also where it is being started again after it was killed."""
    return ray.get(method.options(max_task_retries=-1).remote(*arguments))


def _pruned(trial: Trial, keeper: Any) -> TrialResult | None:
    exhausted = [Trial.model_validate(fields) for fields in _asked(keeper.exhausted_trials)]
    reason = pruned_by(trial, exhausted)
    if reason is None:
        return None
    return TrialResult(
        trial=trial, status="pruned", reason=reason, environment={}, started_at=time.time(), duration_s=0.0
    )


def _measured(trial: Trial, block: str, task: _Task) -> TrialResult:
    try:
        layout = task.layout(trial)
    except ValueError as error:
        gone = set(task.layouts[ProcessKind.of(trial)].node_ids) - {node.node_id for node in alive_nodes()}
        lost = ", ".join(sorted(task.hosts[node_id] for node_id in gone))
        reason = f"lost node {lost}: {error}; when the cluster is whole again, the same command runs what is left"
        return TrialResult(trial=trial, status="failed", reason=reason, started_at=time.time(), duration_s=0.0)
    job = {
        "id": trial.trial_id,
        "trial": trial.model_dump(),
        "source": task.sources.get(trial.workload),
        "checkpoint_every_s": task.checkpoint_every_s,
    }
    asked_at = time.time()
    pending = task.keeper.measure.remote(job, layout, block, task.trial_timeout_s)
    try:
        if trial.epochs:
            _report_epochs(trial, pending, task.keeper)
        outcome = ray.get(pending)
    except ray.exceptions.ActorUnavailableError as error:
        # Ray starts it again; where the study ends, it is dead instead
        killed = "the process that holds the worker groups was killed, as Ray and the kernel do where a host's memory is full"
        reason = f"{killed}: {first_line(error)}"
        duration_s = time.time() - asked_at
        return TrialResult(
            trial=trial, status="failed", reason=reason, log=str(error), started_at=asked_at, duration_s=duration_s
        )
    payloads = outcome.pop("payloads")
    environment = outcome.pop("environment")
    beside = {"side_by_side": outcome.pop("side_by_side")}
    measured: dict[str, Any] = {}
    if payloads:
        ranks = [
            facts | payload["evidence"] | beside
            for facts, payload in zip(_ranks_of(environment, trial), payloads, strict=True)
        ]
        environment = environment | {"ranks": ranks}
        tables = {name: table_of(name, payloads) for name in SCHEMAS}
        measured = {name: table for name, table in tables.items() if table.num_rows}
        traces = {rank: payload["trace"] for rank, payload in enumerate(payloads)}
        measured["traces"] = {rank: trace for rank, trace in traces.items() if trace is not None}
    return TrialResult(trial=trial, environment=environment, **measured, **outcome)


def _report_epochs(trial: Trial, pending: Any, keeper: Any) -> None:
    """Reports each epoch of a training to Tune, until the training is over."""
    told = 0
    while not ray.wait([pending], timeout=EPOCHS_ASKED_EVERY_S)[0]:
        for row in ray.get(keeper.epochs_of.remote(trial.trial_id))[told:]:
            told += 1
            tune.report({"study_trial_id": trial.trial_id, **row})


def table_of(name: str, payloads: Sequence[dict[str, Any]]) -> pa.Table:
    """The rows of all ranks, from what they handed in."""
    return unpacked(payload[name] for payload in payloads)


def _ranks_of(environment: dict[str, Any], trial: Trial) -> list[dict[str, Any]]:
    """The facts of the group's ranks that took part in a trial, in the order of the trial's own ranks."""
    ranks = environment["ranks"]
    return [ranks[rank] for rank in members([facts["node_id"] for facts in ranks], trial.processes)]


def _workload_sources(trials: Sequence[Trial]) -> dict[str, str]:
    """The text of users' workload files, for nodes on which the files are not."""
    return {trial.workload: Path(trial.workload.rpartition(":")[0]).read_text() for trial in trials if trial.workload}


def _close(keeper: Any, raylets: Sequence[psutil.Process], is_local: bool) -> None:
    """Ends the live worker group and the keeper; whatever does not end in time is killed.

    `raylets`: this host's, of the cluster. A batch system signals every process of a job, and when they have ended by it,
    nobody is left who could end the others; those of a local Ray are killed here.
    """
    ends_at_s = time.monotonic() + CLOSE_TIMEOUT_S
    with contextlib.suppress(ray.exceptions.RayError):
        closing = keeper.close.remote()
        while not ray.wait([closing], timeout=CLOSE_ASKED_EVERY_S)[0] and time.monotonic() < ends_at_s:
            if raylets and not any(map(_runs, raylets)):
                if is_local:
                    _kill_workers({str(raylet.pid) for raylet in raylets})
                break
    ray.kill(keeper)


def _raylets(cluster: Cluster) -> list[psutil.Process]:
    """The processes on this host that start the cluster's workers here."""
    session = str(Path(cluster.log_dir).parent)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is somebody else's
            if process.name() == "raylet" and any(session in argument for argument in process.cmdline()):
                found.append(process)
    return found


def _kill_workers(of_raylets: set[str]) -> None:
    """Kills every process that these raylets started, and what those started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_RAYLET_PID") in of_raylets:
                process.kill()


def _runs(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended, and whose parent has not asked after it yet, does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class _Narrator(tune.Callback):
    """Turns Tune's callbacks in the driver into events."""

    def __init__(self, on_event: Callable[[Event], None]):
        self.on_event = on_event
        self.block: str | None = None

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        point = trial.config["point"]
        if point["block"] != self.block:
            self.block = point["block"]
            self.on_event(Event("group_starting"))
        self.on_event(Event("trial_started", Trial.model_validate(point["trial"])))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "status" not in result:
            if "epoch" in result:
                trained = Trial.model_validate(trial.config["point"]["trial"])
                self.on_event(Event("epoch_ended", trained, summary=result))
            return
        if result["status"] not in ("done", "pruned"):
            self.block = None  # a failure ends the group
        self.on_event(
            Event(
                "trial_ended",
                Trial.model_validate(trial.config["point"]["trial"]),
                status=result["status"],
                reason=result["reason"],
                summary=result,
                log=result["log"],
            )
        )

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.on_event(
            Event(
                "trial_ended",
                Trial.model_validate(trial.config["point"]["trial"]),
                status="failed",
                reason="the trial's driver failed; it is not saved and runs again next time",
                log=trial.error_file or "",
            )
        )
