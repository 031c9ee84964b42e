"""Run trials from the driver's host: grids in order, each trial from its job to its stored result, and events.

Independent of Ray: `study/orchestrate/tune.py` runs it under Ray Tune, `study/orchestrate/twin/in_process.py` in one
process.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from analysis.read.schema import SCHEMAS
from study.capacity import NodeCapacity, cpus, gpus
from study.errors import SOME_FAILED
from study.orchestrate.discovery.neighbours import other_studies
from study.orchestrate.failures import first_line
from study.orchestrate.metrics import numbers
from study.orchestrate.protocol import Environment, Event, Job, KnownTrials, Outcome, Payload
from study.plan.placement import Layout, ProcessKind, can_share_host, concurrent_slots, layouts, members, relocate
from study.plan.trials import FINAL_STATUSES, pruned_by
from study.store import checkpoints, spool
from study.store.redaction import redacted, redacted_log
from study.store.result import TrialResult
from study.store.store import Store, StoreError
from study.store.tables import unpacked
from trainables.clock import unix_s
from trainables.scratch import new_log, user_folder
from trainables.trial import Trial

CHECK_STEPS = 2
"""Steps per window of the trial that checks a script."""

CHECKPOINT_EVERY_S = 30.0
"""Checkpoints cross the cluster to the driver's host; one of ResNet-50 has 200 MB."""

Report = Callable[[dict[str, Any]], None]
OnEvent = Callable[[Event], None]


class UserCodeError(Exception):
    """A user's script or train function that does not work on the smallest number of ranks. No trial has started."""

    exit_code = SOME_FAILED


class KeeperKilled(Exception):
    """The keeper's process was killed during a measurement. It restarts for the next trial."""


class KeeperClient(Protocol):
    """The keeper's methods for the driver of a trial."""

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        """Wait for the outcome of a job. Call `on_epoch` with each new row of epochs.parquet. Raises KeeperKilled."""

    def trials_out_of_memory(self) -> Sequence[Trial]:
        """Return every trial so far that ran out of memory."""

    def ended(self, trial: Trial, status: str, values: Mapping[str, float]) -> None:
        """Publish the end of a trial and its measures."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run."""

    isolate: bool = False
    """True to start a worker group per trial."""
    timeout_s: float = 600.0
    """Time limit per trial, or per epoch of a training trial."""
    checkpoint_every_s: float = CHECKPOINT_EVERY_S
    save_pauses_s: Sequence[float] = spool.PAUSES_S
    """Pauses before each further attempt to save a result."""


@dataclass(frozen=True)
class Point:
    """A trial of a grid. Trials of the same `block` may share a warm worker group."""

    trial: Trial
    block: str


@dataclass(frozen=True)
class Grid:
    """Trials of one run, in order."""

    points: Sequence[Point]
    slots: Sequence[str] = ()
    """One node id per concurrent trial, each of one rank. If empty, trials run one after another."""

    @property
    def trials(self) -> list[Trial]:
        return [point.trial for point in self.points]


def grid_of(blocks: Sequence[Sequence[Trial]], isolate: bool, slots: Sequence[str] = ()) -> Grid:
    """Return a grid of the trials of `blocks`."""
    points: list[Point] = []
    for number, block in enumerate(blocks):
        for trial in block:
            alone = isolate or trial.door == "function"  # its process group is one of exactly this size
            points.append(Point(trial, f"isolated-{len(points)}" if alone else f"block-{number}"))
    return Grid(points, slots)


def grids_of(
    blocks: Sequence[Sequence[Trial]], nodes: Sequence[NodeCapacity], isolate: bool, max_concurrent: int
) -> Iterator[Grid]:
    """Split a run into grids: exclusive trials, then one-rank training trials, up to `max_concurrent` at a time."""

    def select(concurrent: bool) -> list[list[Trial]]:
        return [
            [trial for trial in block if (max_concurrent > 1 and can_share_host(trial)) == concurrent]
            for block in blocks
        ]

    if any(exclusive := select(concurrent=False)):
        yield grid_of(exclusive, isolate)
    if any(trainings := select(concurrent=True)):
        slots = concurrent_slots([trial for block in trainings for trial in block], nodes)[:max_concurrent]
        yield grid_of(trainings, isolate, slots)


@dataclass(frozen=True)
class TrialDriver:
    """Measures and stores the trials of a grid."""

    keeper: KeeperClient
    store: Store
    options: RunOptions
    layouts: Mapping[ProcessKind, Layout]
    sources: Mapping[str, str]
    """Text of users' workload files by `workload` field."""
    hosts: Mapping[str, str]
    """Description of each node by node id."""
    cluster: Mapping[str, int]
    """Numbers of nodes, GPUs and CPUs."""
    alive_nodes: Callable[[], Sequence[NodeCapacity]]
    """Queries the cluster."""
    scratch: Path = field(default_factory=user_folder)
    """Folder of this user on the driver's host."""
    directory: str = field(default_factory=os.getcwd)
    """Working directory of scripts."""
    study_pid: int = field(default_factory=os.getpid)
    """Process that holds the lock of this study; see `discovery.neighbours`."""

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        nodes: Sequence[NodeCapacity],
        keeper: KeeperClient,
        store: Store,
        options: RunOptions,
        alive_nodes: Callable[[], Sequence[NodeCapacity]],
    ) -> "TrialDriver":
        hosts = {node.node_id: f"{node.address} ({node.node_id[:8]})" for node in nodes}
        size = {"nodes": len(nodes), "gpus": gpus(nodes), "cpus": cpus(nodes)}
        layouts_by_kind, sources = layouts(trials, nodes), _workload_sources(trials)
        return cls(keeper, store, options, layouts_by_kind, sources, hosts, size, alive_nodes)

    def run(self, point: Point, report: Report) -> None:
        """Measure a trial, store it, and report it.

        Reports `study_trial_id`, `status`, `reason`, `log`, `not_saved` if True, and the measures of
        `analysis.measure.measures.summarise` that are not null. A training trial reports each epoch, and at the end its
        last epoch instead of measures.
        """
        trial = point.trial
        result = (self._prune(trial) or self._measure(point, report)).for_people()
        try:
            spool.save(self.store, result, self.scratch, self.options.save_pauses_s)
            is_saved = True
        except StoreError as error:  # such as a full disk: the next trial may succeed again
            result = _failed(trial, f"measured as {result.status}, but not saved: {redacted(str(error))}")
            is_saved = False
        if result.status in FINAL_STATUSES:
            checkpoints.drop(self.store, [trial.trial_id])
        summary = numbers(result)
        self.keeper.ended(trial, result.status, {name: float(value) for name, value in summary.items()})
        log = self.store.address(f"trials/{trial.trial_id}/error.log") if result.log else ""
        final = {"study_trial_id": trial.trial_id, "status": result.status, "reason": result.reason, "log": log}
        report(final | ({} if is_saved else {"not_saved": True}) | summary)

    def layout(self, trial: Trial) -> Layout:
        """Return the layout of a trial's group. It uses other nodes than planned if one of those is lost.

        Raises ValueError if too few nodes are left.
        """
        layout = relocate(self.layouts[ProcessKind.of(trial)], self.alive_nodes())
        if trial.door == "function":
            node_ids = tuple(layout.node_ids[rank] for rank in members(layout.node_ids, trial.processes))
            return replace(layout, node_ids=node_ids, world_sizes=(trial.processes,))
        return replace(layout, world_sizes=(trial.processes,)) if self.options.isolate else layout

    def check(self, grid: Grid) -> None:
        """Run a few steps of each workload, script and train function of a grid, without storing them.

        Uses the fewest ranks of the grid; of a workload, only the first rank runs a step. Raises UserCodeError. A
        worker group that does not start says nothing about the code: the trials then try it again.
        """
        for point in check_points(grid):
            outcome = self.keeper.measure(
                replace(self._job(point.trial, f"check-{point.trial.trial_id}"), check=True),
                self.layout(point.trial),
                point.block,
                self.options.timeout_s,
                lambda row: None,
            )
            if outcome.status in ("failed", "timeout") and outcome.environment is not None:
                log = error_log(outcome.log, point.trial.trial_id)
                raise UserCodeError(f"{point.trial.code_name} does not run: {outcome.reason}{log}")

    def _job(self, trial: Trial, job_id: str) -> Job:
        source = self.sources.get(trial.workload or trial.train_function)
        return Job(job_id, trial, source, self.options.checkpoint_every_s, self.options.timeout_s, self.directory)

    def _prune(self, trial: Trial) -> TrialResult | None:
        reason = pruned_by(trial, self.keeper.trials_out_of_memory())
        if reason is None:
            return None
        return TrialResult(trial=trial, status="pruned", reason=reason, started_at=unix_s(), duration_s=0.0)

    def _measure(self, point: Point, report: Report) -> TrialResult:
        trial = point.trial
        try:
            layout = self.layout(trial)
        except ValueError as error:
            return self._lost_node_result(trial, error)
        job = self._job(trial, trial.trial_id)
        started_at = unix_s()
        others = other_studies(self.study_pid)
        try:
            outcome = self.keeper.measure(
                job,
                layout,
                point.block,
                self.options.timeout_s,
                lambda row: report({"study_trial_id": trial.trial_id, **row}),
            )
        except KeeperKilled as error:
            cause = error.__cause__ or error
            killed = "the process that holds the worker groups was killed, perhaps because the host's memory was full"
            return _failed(trial, f"{killed}: {first_line(cause)}", started_at, log=str(cause))
        others = list(dict.fromkeys([*others, *other_studies(self.study_pid)]))
        result = result_of(trial, outcome, others)
        return replace(result, environment={**result.environment, "cluster": dict(self.cluster)})

    def _lost_node_result(self, trial: Trial, error: ValueError) -> TrialResult:
        alive = {node.node_id for node in self.alive_nodes()}
        lost_ids = set(self.layouts[ProcessKind.of(trial)].node_ids) - alive
        lost = ", ".join(sorted(self.hosts[node_id] for node_id in lost_ids))
        return _failed(
            trial, f"lost node {lost}: {error}; fix: repair the cluster, then rerun the same command for the rest"
        )


def check_points(grid: Grid) -> list[Point]:
    """Return a short trial of each workload, script and train function of a grid, on its fewest ranks.

    A workload is also checked for loader processes if any of its trials has them.
    """
    smallest: dict[tuple[str, str, str], Point] = {}
    workers: dict[str, int] = {}
    for point in sorted(grid.points, key=lambda point: (point.trial.processes, point.trial.batch_per_gpu)):
        trial = point.trial
        if trial.workload or trial.door != "factory":
            smallest.setdefault((trial.workload, trial.script, trial.train_function), point)
        if trial.workload:
            workers[trial.workload] = max(trial.loader_workers, workers.get(trial.workload, 0))
    short = {"steps": CHECK_STEPS, "warmup_steps": CHECK_STEPS, "communication_steps": 0}
    return [
        replace(point, trial=point.trial.but(loader_workers=workers[point.trial.workload]))
        if point.trial.workload
        else replace(point, trial=point.trial.but(**short))
        for point in smallest.values()
    ]


def error_log(content: str, name: str) -> str:
    """Write a log to the user's scratch folder. Return what a message says of it, empty without content."""
    if not content:
        return ""
    return f"; log: {new_log(name, redacted_log(content))}"


def result_of(trial: Trial, outcome: Outcome, other_studies: Sequence[str] = ()) -> TrialResult:
    """Return an outcome in the format of the store: tables of all ranks, and facts and evidence per rank.

    other_studies: those that measured on the driver's host at the same time.
    """
    environment = outcome.environment.record() if outcome.environment else {}
    if other_studies:
        environment["other_studies"] = list(other_studies)
    measurements: dict[str, Any] = {}
    if outcome.payloads:
        assert outcome.environment is not None
        environment["ranks"] = [
            facts | payload.evidence.record() | {"concurrent": outcome.concurrent}
            for facts, payload in zip(_ranks_of(outcome.environment, trial), outcome.payloads, strict=True)
        ]
        tables = {name: table_of(name, outcome.payloads) for name in SCHEMAS}
        measurements = {name: table for name, table in tables.items() if table.num_rows}
        traces = {rank: payload.trace for rank, payload in enumerate(outcome.payloads)}
        measurements["traces"] = {rank: trace for rank, trace in traces.items() if trace is not None}
    return TrialResult(
        trial=trial,
        status=outcome.status,
        reason=outcome.reason,
        log=outcome.log,
        worker_group=outcome.worker_group,
        started_at=outcome.started_at,
        duration_s=outcome.duration_s,
        environment=environment,
        **measurements,
    )


def table_of(name: str, payloads: Sequence[Payload]) -> pa.Table:
    """Return the table with the rows of all ranks."""
    return unpacked(payload.tables[name] for payload in payloads)


@dataclass
class Narrator:
    """Translates starts and reports of trials into events."""

    on_event: OnEvent
    group: tuple[ProcessKind, str] | None = None
    """process kind and block of the worker group"""

    def started(self, point: Point) -> None:
        group = ProcessKind.of(point.trial), point.block
        if group != self.group:
            self.group = group
            self.on_event(Event("group_starting"))
        self.on_event(Event("trial_started", point.trial))

    def reported(self, trial: Trial, report: Mapping[str, Any]) -> None:
        """Handle a report of `TrialDriver.run`: an epoch or the end of a trial."""
        if "status" not in report:
            if "epoch" in report:
                self.on_event(Event("epoch_ended", trial, summary=dict(report)))
            return
        if report["status"] not in ("done", "pruned") and not trial.script:
            self.group = None  # a failure ends the group, unless a script failed in a process of its own
        status, reason, log = (report[name] for name in ("status", "reason", "log"))
        self.on_event(Event("trial_ended", trial, status, reason, dict(report), log))

    def crashed(self, trial: Trial, log: str) -> None:
        """Handle a failure of the trial's driver itself."""
        reason = "the trial's driver failed, so the trial is not saved and runs again next time"
        self.on_event(Event("trial_ended", trial, "failed", reason, log=log))


@dataclass(frozen=True)
class UpdateKnownTrials:
    """An `on_event` that also adds each trial that ends to the known trials."""

    known: KnownTrials
    on_event: OnEvent

    def __call__(self, event: Event) -> None:
        self.known.add(event)
        self.on_event(event)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks, but never calls the copy


def _failed(trial: Trial, reason: str, started_at: float | None = None, log: str = "") -> TrialResult:
    now = unix_s()
    started_at = now if started_at is None else started_at
    return TrialResult(
        trial=trial, status="failed", reason=reason, log=log, started_at=started_at, duration_s=now - started_at
    )


def _ranks_of(environment: Environment, trial: Trial) -> list[dict[str, Any]]:
    """Return the facts of the group's ranks that a trial used, in the order of the trial's ranks."""
    ranks = environment.ranks
    return [ranks[rank] for rank in members([facts["node_id"] for facts in ranks], trial.processes)]


def _workload_sources(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the text of users' Python files by FILE.py:NAME, for nodes without these files."""
    specs = {spec for trial in trials if (spec := trial.workload or trial.train_function)}
    return {spec: Path(spec.rpartition(":")[0]).read_text() for spec in specs}
