"""Run a grid under Ray Tune. Each Tune trial is a thin driver that requests its measurement from the keeper.

Tune only schedules trials; the store has the results. A Tune trial uses no CPU or GPU. A fraction of the node's own
resource pins it to the driver's host, so that only this host needs access to the results folder.
"""

import contextlib
import gc
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import tune
from ray.tune.logger import JsonLoggerCallback
from ray.util.metrics import Gauge

from study.errors import NO_CLUSTER
from study.orchestrate.activity import OnActivity, watched
from study.orchestrate.cluster import Cluster, SharedKeeper, alive_nodes
from study.orchestrate.driver import (
    CHECKPOINT_EVERY_S,
    Grid,
    KeeperKilled,
    Narrator,
    OnEvent,
    Point,
    Report,
    RunOptions,
    TrialDriver,
    UpdateKnownTrials,
    grids_of,
)
from study.orchestrate.failures import first_line
from study.orchestrate.group import RankBackend
from study.orchestrate.keeper import Keeper
from study.orchestrate.metrics import counts
from study.orchestrate.processes.reaper import kill_session
from study.orchestrate.processes.watch import ClusterLost, ServerDied, is_running, servers_of, servers_watched
from study.orchestrate.protocol import Event, Job, KnownTrials, Outcome
from study.orchestrate.worker_group import RayRanks
from study.plan.placement import Layout
from study.plan.trials import varying_fields
from study.store.store import Store
from trainables.scratch import scratch_folder
from trainables.trial import Trial

CLOSE_TIMEOUT_S = 45.0
"""Less than the 60 s after which Ray aborts a driver that lost its cluster."""

DEFAULTS = RunOptions()
RAY_RANKS = RayRanks()
CLOSE_POLL_S = 1.0
EPOCHS_POLL_S = 1.0

AXES_SHOWN = ("world_size", "batch_per_gpu")
"""Fields that are keys of Tune's configuration even if they do not vary."""


_LARGEST_PROCESS = re.compile(r"PID\s+MEM\(GB\)\s+COMMAND\s+(\d+)\s+([\d.]+)\s+([^\n]{1,100})")
"""the first row of the table in Ray's message, the process with the most memory"""


def ignore(event: Event) -> None:
    """Do nothing with an event."""


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
    on_event: OnEvent = ignore,
    on_activity: OnActivity | None = None,
    known: KnownTrials | None = None,
    shared: SharedKeeper | None = None,
) -> bool:
    """Run all trials and store each when it ends. Return True if Ctrl-C ended the run early.

    The trials of a block run in order and may share a warm worker group, unless `isolate` is True. If `max_concurrent`
    is above 1, training trials on one rank run last, as many at a time as fit. `known` has the trials in the store;
    None reads them. `on_activity` gets what the running trials are doing, when that changes. `shared` keeps the ranks
    alive for another call; `max_concurrent` must be 1 then.
    """
    known = KnownTrials.of(store.records()) if known is None else known
    options = RunOptions(isolate, trial_timeout_s, checkpoint_every_s)
    before = set(known.statuses)
    observer = UpdateKnownTrials(known, on_event)

    def run(rest: Sequence[Sequence[Trial]]) -> None:
        for grid in grids_of(rest, cluster.nodes, isolate, max_concurrent):
            if known.unusable:
                break
            tune_grid(
                study_name, grid, store, cluster, options, observer, known, on_activity=on_activity, shared=shared
            )

    try:
        try:
            run(blocks)
        except OutOfHostMemory:  # often a short peak of another process
            ended = set(known.statuses) - before
            run([[trial for trial in block if trial.trial_id not in ended] for block in blocks])
    except KeyboardInterrupt:
        return True
    return False


class OutOfHostMemory(ClusterLost):
    """Ray killed the study's own processes, because the memory of their host was full."""

    exit_code = NO_CLUSTER


def memory_line(error: BaseException) -> str:
    """Return one line if an error of Ray says that a host's memory was full, with the process that holds most of it."""
    text = str(error)
    if "low on memory" not in text and not isinstance(error, ray.exceptions.OutOfMemoryError):
        return ""
    largest = _LARGEST_PROCESS.search(text)
    holder = f"; the largest process is pid {largest[1]} with {largest[2]} GB: {largest[3]}" if largest else ""
    return f"the memory of a host is full, and Ray killed processes of the study{holder}; fix: free memory there"


def tune_grid(
    study_name: str,
    grid: Grid,
    store: Store,
    cluster: Cluster,
    options: RunOptions = DEFAULTS,
    on_event: OnEvent = ignore,
    known: KnownTrials | None = None,
    ranks: RankBackend = RAY_RANKS,
    on_activity: OnActivity | None = None,
    shared: SharedKeeper | None = None,
) -> tune.ResultGrid:
    """Run a grid on `ranks` and return Tune's result grid.

    It has one row per trial: its fields in which the grid varies under `config/FIELD`, throughput and median phase
    times; for training trials, the last epoch.
    """
    # Tune saves its own pickled state per run, which nobody needs afterwards
    with (
        _losses_named(cluster),
        scratch_folder("tune") as state_dir,
        _keeper(study_name, grid, store, cluster, known or KnownTrials(), ranks, shared) as keeper,
        watched(lambda known: ray.get(keeper.next_activity.remote(known)), on_activity),
    ):
        driver = TrialDriver.of(grid.trials, cluster.nodes, RayKeeper(keeper), store, options, alive_nodes)
        if grid.points:  # start the group's processes while Tune starts its own
            keeper.prepare.remote(driver.layout(grid.trials[0]), grid.points[0].block)
        os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # Tune's handler would hide Ctrl-C
        if known is None or "done" not in known.statuses.values():
            driver.check(grid)
        stopper = StopIfUnusable(known or KnownTrials())
        _count_no_callbacks()
        return _tuner(study_name, grid, driver, cluster, on_event, state_dir, stopper).fit()


def _count_no_callbacks() -> None:
    """Keep Tune from importing MLflow and wandb, which takes seconds, only to count callbacks for usage statistics."""
    with contextlib.suppress(ImportError):  # another version of Ray than 2.60
        from ray.air._internal import usage

        usage.tag_callbacks = lambda callbacks: False


@contextlib.contextmanager
def _losses_named(cluster: Cluster) -> Iterator[None]:
    """Raise ClusterLost if a server of the cluster on this host dies, or if Ray itself fails."""
    with servers_watched(cluster.log_dir, cluster.is_local) as watch:
        try:
            yield
        except KeyboardInterrupt:
            gc.freeze()  # Tune's destructors call Ray, and wait a minute if Ray has ended too
            if not watch.problem:
                raise
        except Exception as error:
            if watch.has_lost_server():
                gc.freeze()
            elif memory := memory_line(error):
                raise OutOfHostMemory(memory) from error
            elif isinstance(error, ray.exceptions.RayError) and not hasattr(type(error), "exit_code"):
                raise ClusterLost(f"Ray failed: {first_line(error)}; log: {cluster.log_dir}") from error
            else:
                raise
        else:
            return
    raise ServerDied(f"{watch.problem}; log: {cluster.log_dir}")


def _tuner(
    study_name: str,
    grid: Grid,
    driver: TrialDriver,
    cluster: Cluster,
    on_event: OnEvent,
    state_dir: str,
    stopper: tune.Stopper,
) -> tune.Tuner:
    trainable = tune.with_parameters(measure_point, driver=driver, points=grid.points)
    return tune.Tuner(
        tune.with_resources(trainable, cluster.driver_resource),
        param_space=param_space(grid.trials),
        tune_config=tune.TuneConfig(
            max_concurrent_trials=max(1, len(grid.slots)),
            reuse_actors=True,
            trial_name_creator=partial(_trial_name, grid),
            trial_dirname_creator=partial(_trial_name, grid),
        ),
        run_config=tune.RunConfig(
            name=study_name,
            storage_path=state_dir,
            verbose=0,
            stop=stopper,
            failure_config=tune.FailureConfig(max_failures=1),  # its own process was killed, as if memory is short
            callbacks=[JsonLoggerCallback(), TuneCallback(grid, Narrator(on_event))],
        ),
    )


def param_space(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return Tune's search space: one point per trial, with a key per field in which the trials vary.

    `number` selects the trial. The other keys only show it in Tune's own output and in tools that read that.
    """
    names = dict.fromkeys((*AXES_SHOWN, *varying_fields(trials)))
    axes = {name: tune.sample_from(partial(_value, [getattr(trial, name) for trial in trials])) for name in names}
    return {"number": tune.grid_search(list(range(len(trials))))} | axes


def _value(values: Sequence[Any], spec: Any) -> Any:
    return values[spec.config.number]


def _trial_name(grid: Grid, trial: Any) -> str:
    return grid.trials[trial.config["number"]].trial_id


def measure_point(config: dict[str, Any], driver: TrialDriver, points: Sequence[Point]) -> None:
    """Run one Tune trial."""
    driver.run(points[config["number"]], tune.report)


@dataclass(frozen=True)
class RayKeeper:
    """The keeper's actor as a `KeeperClient`."""

    actor: Any

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        pending = self.actor.measure.remote(job, layout, block, timeout_s)
        try:
            if job.trial.epochs:
                self._report_epochs(job.id, pending, on_epoch)
            return ray.get(pending)
        except ray.exceptions.ActorUnavailableError as error:
            # Ray restarts the actor; at the end of a study, the error is that it is dead
            raise KeeperKilled(str(error)) from error

    def trials_out_of_memory(self) -> Sequence[Trial]:
        return self._call_with_retries(self.actor.trials_out_of_memory)

    def ended(self, trial: Trial, status: str, values: Mapping[str, float]) -> None:
        self._call_with_retries(self.actor.ended, trial, status, values)

    def _report_epochs(self, job_id: str, pending: Any, on_epoch: Report) -> None:
        """Report each epoch of a training trial until it ends."""
        reported = 0
        while not ray.wait([pending], timeout=EPOCHS_POLL_S)[0]:
            for row in ray.get(self.actor.epochs_of.remote(job_id))[reported:]:
                reported += 1
                on_epoch(row)

    @staticmethod
    def _call_with_retries(method: Any, *arguments: Any) -> Any:
        """Call the keeper and return its answer, even if it must first restart after it was killed."""
        return ray.get(method.options(max_task_retries=-1).remote(*arguments))


@contextlib.contextmanager
def _keeper(
    study_name: str,
    grid: Grid,
    store: Store,
    cluster: Cluster,
    known: KnownTrials,
    ranks: RankBackend,
    shared: SharedKeeper | None,
) -> Iterator[Any]:
    """Yield a keeper on the driver's host, and close it at the end. A shared one stays open."""
    left = counts(known.statuses, [trial.trial_id for trial in grid.trials])
    with contextlib.ExitStack() as own:
        if shared and shared.actor:
            keeper = shared.actor
            ray.get(keeper.restart.options(max_task_retries=-1).remote(known.out_of_memory, left))
        else:
            servers = servers_of(cluster.log_dir)
            keeper = (
                ray.remote(Keeper)
                .options(num_cpus=0, resources=cluster.driver_resource, max_restarts=-1)
                .remote(study_name, known.out_of_memory, store, left, Gauge, ranks, grid.slots)
            )
            (shared.stack if shared else own).callback(_close, keeper, servers, cluster)
            if shared:
                shared.actor = keeper
        yield keeper


def _close(keeper: Any, servers: Sequence[psutil.Process], cluster: Cluster) -> None:
    """End the live worker group and the keeper. Kill them if they do not end in time.

    `servers` are the cluster's servers on this host. If one has died, perhaps by a signal to every process of a job, no
    call of Ray ends any more, so the workers of a local Ray are killed here.
    """
    ends_at_s = time.monotonic() + CLOSE_TIMEOUT_S
    with contextlib.suppress(ray.exceptions.RayError):
        closing = None
        while all(map(is_running, servers)) and time.monotonic() < ends_at_s:
            closing = closing or keeper.close.remote()
            if ray.wait([closing], timeout=CLOSE_POLL_S)[0]:
                break
    if all(map(is_running, servers)):
        ray.kill(keeper)
    elif cluster.is_local:
        kill_session(str(Path(cluster.log_dir).parent))


class StopIfUnusable(tune.Stopper):
    """Ends the run once it is known that a user's code does not work."""

    def __init__(self, known: KnownTrials):
        self.known = known

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self.known.unusable)


class TuneCallback(tune.Callback):
    """Forwards Tune's callbacks in the driver to a narrator."""

    def __init__(self, grid: Grid, narrator: Narrator):
        self.grid, self.narrator = grid, narrator

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.narrator.started(self._point(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.narrator.reported(self._point(trial).trial, result)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.narrator.crashed(self._point(trial).trial, trial.error_file or "")

    def _point(self, trial: Any) -> Point:
        return self.grid.points[trial.config["number"]]
