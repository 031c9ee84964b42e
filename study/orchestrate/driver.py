"""What runs trials on the driver's host: the order of a run, one trial from its job to its saved result, and events.

Knows no Ray: `study/orchestrate/tune.py` runs it under Ray Tune, `study/orchestrate/twin/in_process.py` in one process.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from analysis.load.schema import SCHEMAS
from study.capacity import NodeCapacity
from study.orchestrate.failures import first_line
from study.orchestrate.metrics import numbers
from study.orchestrate.protocol import Environment, Event, Job, KnownTrials, Outcome, Payload
from study.plan.placement import Layout, ProcessKind, can_share_host, concurrent_slots, layouts, members, relocate
from study.plan.trials import SETTLED, pruned_by
from study.store import checkpoints
from study.store.store import Store, StoreError, TrialResult
from study.store.tables import unpacked
from trainables.trial import Trial

CHECKPOINT_EVERY_S = 30.0
"""a training's state crosses the cluster to the driver's host: that of ResNet-50 is 200 MB"""

Report = Callable[[dict[str, Any]], None]
OnEvent = Callable[[Event], None]


class KeeperKilled(Exception):
    """The keeper's process was killed while it measured; it starts again for the next trial."""


class KeeperClient(Protocol):
    """The keeper, as the driver of a trial calls it."""

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        """Wait for the outcome of a job. `on_epoch` gets each row of epochs.parquet meanwhile. Raises KeeperKilled."""

    def trials_out_of_memory(self) -> Sequence[Trial]:
        """Return every trial so far that ran out of memory."""

    def ended(self, trial_id: str, status: str, values: Mapping[str, float]) -> None:
        """Publish that a trial ended, and its numbers."""


@dataclass(frozen=True)
class RunOptions:
    """How trials are run. `isolate`: a worker group per trial. `timeout_s` limits a trial, or each epoch of a training."""

    isolate: bool = False
    timeout_s: float = 600.0
    checkpoint_every_s: float = CHECKPOINT_EVERY_S


@dataclass(frozen=True)
class Point:
    """A trial of a grid. Trials of the same `block` may share a warm worker group."""

    trial: Trial
    block: str


@dataclass(frozen=True)
class Grid:
    """Trials that run in one go, in this order.

    `slots` has a node id per trial that runs at the same time, all on one rank each; if empty, trials run one by one.
    """

    points: Sequence[Point]
    slots: Sequence[str] = ()

    @property
    def trials(self) -> list[Trial]:
        return [point.trial for point in self.points]


def grid_of(blocks: Sequence[Sequence[Trial]], isolate: bool, slots: Sequence[str] = ()) -> Grid:
    """Return the trials of `blocks` as one grid."""
    points: list[Point] = []
    for number, block in enumerate(blocks):
        for trial in block:
            points.append(Point(trial, f"isolated-{len(points)}" if isolate else f"block-{number}"))
    return Grid(points, slots)


def grids_of(
    blocks: Sequence[Sequence[Trial]], nodes: Sequence[NodeCapacity], isolate: bool, max_concurrent: int
) -> Iterator[Grid]:
    """Split a run into grids: timed trials one by one, then trainings on one rank, up to `max_concurrent` at a time."""

    def part(concurrent: bool) -> list[list[Trial]]:
        return [
            [trial for trial in block if (max_concurrent > 1 and can_share_host(trial)) == concurrent]
            for block in blocks
        ]

    if any(alone := part(concurrent=False)):
        yield grid_of(alone, isolate)
    if any(trainings := part(concurrent=True)):
        slots = concurrent_slots([trial for block in trainings for trial in block], nodes)[:max_concurrent]
        yield grid_of(trainings, isolate, slots)


@dataclass(frozen=True)
class TrialDriver:
    """Takes one trial after another of a grid through its measurement. `alive_nodes` asks the cluster."""

    keeper: KeeperClient
    store: Store
    options: RunOptions
    layouts: Mapping[ProcessKind, Layout]
    sources: Mapping[str, str]
    hosts: Mapping[str, str]
    alive_nodes: Callable[[], Sequence[NodeCapacity]]

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
        return cls(keeper, store, options, layouts(trials, nodes), _workload_sources(trials), hosts, alive_nodes)

    def run(self, point: Point, report: Report) -> None:
        """Measure a trial, save it, and report it.

        Reports `study_trial_id`, `status`, `reason`, `log` and every number of `analysis.measure.measures.summarise` that is not
        null; a training reports each epoch, and instead of those numbers the results of the last one.
        """
        trial = point.trial
        result = self._pruned(trial) or self._measured(point, report)
        try:
            self.store.save(result)
        except StoreError as error:  # a full disk, for example: the next trial may find room again
            result = _failed(trial, f"measured as {result.status}, but not kept, so it runs again next time: {error}")
        if result.status in SETTLED:
            checkpoints.drop(self.store, [trial.trial_id])
        summary = numbers(result)
        self.keeper.ended(trial.trial_id, result.status, {name: float(value) for name, value in summary.items()})
        log = f"{self.store.trial_folder(trial.trial_id)}/error.log" if result.log else ""
        ended = {"study_trial_id": trial.trial_id, "status": result.status, "reason": result.reason, "log": log}
        report(ended | summary)

    def layout(self, trial: Trial) -> Layout:
        """Return where the ranks of a trial's group sit: on other nodes than planned if one of those is gone.

        Raises ValueError if too few are left.
        """
        layout = relocate(self.layouts[ProcessKind.of(trial)], self.alive_nodes())
        return replace(layout, world_sizes=(trial.processes,)) if self.options.isolate else layout

    def _pruned(self, trial: Trial) -> TrialResult | None:
        reason = pruned_by(trial, self.keeper.trials_out_of_memory())
        if reason is None:
            return None
        return TrialResult(trial=trial, status="pruned", reason=reason, started_at=time.time(), duration_s=0.0)

    def _measured(self, point: Point, report: Report) -> TrialResult:
        trial = point.trial
        try:
            layout = self.layout(trial)
        except ValueError as error:
            return self._lost_nodes(trial, error)
        job = Job(trial.trial_id, trial, self.sources.get(trial.workload), self.options.checkpoint_every_s)
        started_at = time.time()
        try:
            outcome = self.keeper.measure(
                job,
                layout,
                point.block,
                self.options.timeout_s,
                lambda row: report({"study_trial_id": trial.trial_id, **row}),
            )
        except KeeperKilled as error:
            killed = "the process that holds the worker groups was killed, as Ray and the kernel do where a host's memory is full"
            reason = f"{killed}: {first_line(error.__cause__ or error)}"
            return _failed(trial, reason, started_at, log=str(error.__cause__ or error))
        return result_of(trial, outcome)

    def _lost_nodes(self, trial: Trial, error: ValueError) -> TrialResult:
        alive = {node.node_id for node in self.alive_nodes()}
        gone = set(self.layouts[ProcessKind.of(trial)].node_ids) - alive
        lost = ", ".join(sorted(self.hosts[node_id] for node_id in gone))
        return _failed(
            trial, f"lost node {lost}: {error}; when the cluster is whole again, the same command runs what is left"
        )


def result_of(trial: Trial, outcome: Outcome) -> TrialResult:
    """Return an outcome as the store keeps it: tables of all ranks, and the evidence of each beside its facts."""
    environment = outcome.environment.record() if outcome.environment else {}
    measured: dict[str, Any] = {}
    if outcome.payloads:
        assert outcome.environment is not None
        environment["ranks"] = [
            facts | payload.evidence.record() | {"side_by_side": outcome.concurrent}
            for facts, payload in zip(_ranks_of(outcome.environment, trial), outcome.payloads, strict=True)
        ]
        tables = {name: table_of(name, outcome.payloads) for name in SCHEMAS}
        measured = {name: table for name, table in tables.items() if table.num_rows}
        traces = {rank: payload.trace for rank, payload in enumerate(outcome.payloads)}
        measured["traces"] = {rank: trace for rank, trace in traces.items() if trace is not None}
    return TrialResult(
        trial=trial,
        status=outcome.status,
        reason=outcome.reason,
        log=outcome.log,
        worker_group=outcome.worker_group,
        started_at=outcome.started_at,
        duration_s=outcome.duration_s,
        environment=environment,
        **measured,
    )


def table_of(name: str, payloads: Sequence[Payload]) -> pa.Table:
    """Return the rows of all ranks."""
    return unpacked(payload.tables[name] for payload in payloads)


@dataclass
class Narrator:
    """Turns starts and reports of trials into events."""

    on_event: OnEvent
    block: str | None = None

    def started(self, point: Point) -> None:
        if point.block != self.block:
            self.block = point.block
            self.on_event(Event("group_starting"))
        self.on_event(Event("trial_started", point.trial))

    def reported(self, trial: Trial, report: Mapping[str, Any]) -> None:
        """Take in a report of `TrialDriver.run`: an epoch, or the end of a trial."""
        if "status" not in report:
            if "epoch" in report:
                self.on_event(Event("epoch_ended", trial, summary=dict(report)))
            return
        if report["status"] not in ("done", "pruned"):
            self.block = None  # a failure ends the group
        status, reason, log = (report[name] for name in ("status", "reason", "log"))
        self.on_event(Event("trial_ended", trial, status, reason, dict(report), log))

    def crashed(self, trial: Trial, log: str) -> None:
        """Take in that the trial's driver itself failed."""
        reason = "the trial's driver failed; it is not saved and runs again next time"
        self.on_event(Event("trial_ended", trial, "failed", reason, log=log))


@dataclass(frozen=True)
class KeepUpToDate:
    """An `on_event` that also adds what ends to the known trials."""

    known: KnownTrials
    on_event: OnEvent

    def __call__(self, event: Event) -> None:
        self.known.add(event)
        self.on_event(event)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks; no copy of these is called


def _failed(trial: Trial, reason: str, started_at: float | None = None, log: str = "") -> TrialResult:
    now = time.time()
    started_at = now if started_at is None else started_at
    return TrialResult(
        trial=trial, status="failed", reason=reason, log=log, started_at=started_at, duration_s=now - started_at
    )


def _ranks_of(environment: Environment, trial: Trial) -> list[dict[str, Any]]:
    """Return the facts of the group's ranks that took part in a trial, in the order of the trial's own ranks."""
    ranks = environment.ranks
    return [ranks[rank] for rank in members([facts["node_id"] for facts in ranks], trial.processes)]


def _workload_sources(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the text of users' workload files, for nodes that do not have the files."""
    return {trial.workload: Path(trial.workload.rpartition(":")[0]).read_text() for trial in trials if trial.workload}
