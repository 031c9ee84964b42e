"""What driver, keeper and ranks send each other, as typed values.

    driver --Job--> keeper --Job--> ranks --Payload per rank--> keeper --Outcome--> driver

Ray and torch.distributed pickle these values. Every process of a study runs the same version of this code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from pydantic import ValidationError

from trainables.trial import Trial

JSON = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A trial for the ranks of a worker group.

    `source` is the text of the user's workload file, None without one. `checkpoint_every_s` is the least time between two
    checkpoints of a training.
    """

    id: str
    trial: Trial
    source: str | None = None
    checkpoint_every_s: float = 30.0


@dataclass(frozen=True)
class Evidence:
    """State of one rank around its windows. See `study.store.environment.readings` for `before` and `after`.

    plain_window: energy readings before and after the plain window; None for trainings, which have none.
    """

    before: JSON
    after: JSON
    memory: dict[str, int | None]
    threads: int
    peak_memory_by_device_bytes: list[int] | None
    step_flops: float | None
    dataset_samples: int | None
    plain_window: JSON | None = None

    def record(self) -> JSON:
        """Return the evidence as trial.json holds it for each rank."""
        return _shallow(self, leave_out="plain_window" if self.plain_window is None else "")


@dataclass(frozen=True)
class Payload:
    """Everything that one rank hands in for a job.

    `tables` are its rows as Arrow streams, by the table's name; `trace` is gzip'd JSON, None without a profiler.
    `started_at` and `ended_at` are in seconds since 1970 by the rank's own clock.
    """

    tables: Mapping[str, bytes]
    evidence: Evidence
    started_at: float
    ended_at: float
    trace: bytes | None = None


@dataclass(frozen=True)
class RankFacts:
    """What a rank tells the others of its group when it connects; `process` is the handle by which the keeper kills it."""

    rank: JSON
    node: JSON
    process: Any

    @property
    def node_id(self) -> str:
        return str(self.rank["node_id"])


@dataclass(frozen=True)
class Environment:
    """Where the ranks of a worker group run, the same for all its trials.

    One entry of `nodes` per node, of `ranks` and `startup` per rank. `set_by_study` names the variables whose values follow
    from fields of a trial. `group` holds when the group was requested and when all its ranks were connected.
    """

    nodes: list[JSON]
    ranks: list[JSON]
    versions: JSON = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    set_by_study: list[str] = field(default_factory=list)
    git: JSON = field(default_factory=dict)
    measuring_code: str = ""
    startup: list[dict[str, float]] = field(default_factory=list)
    group: dict[str, float] = field(default_factory=dict)

    def record(self) -> JSON:
        """Return the environment as trial.json holds it."""
        return _shallow(self)


@dataclass(frozen=True)
class Failure:
    """What a rank raised: its first line, and the traceback without secrets."""

    rank: int
    node_id: str
    out_of_memory: bool
    line: str
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `payloads` has one entry per rank of the trial, and none unless the status is "done".

    `environment` is None if no worker group started. `concurrent` is the largest number of jobs, this one included, that
    ran at the same time.
    """

    status: str
    started_at: float
    duration_s: float
    reason: str = ""
    log: str = ""
    worker_group: str = ""
    environment: Environment | None = None
    payloads: Sequence[Payload] = ()
    concurrent: int = 1


@dataclass(frozen=True)
class Event:
    """A change that a person who watches a run wants to see."""

    kind: Literal["group_starting", "trial_started", "epoch_ended", "trial_ended"]
    trial: Trial | None = None
    status: str = ""
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    log: str = ""


@dataclass
class KnownTrials:
    """What is known of a study's trials before and during a run: status by trial id, and those out of memory."""

    statuses: dict[str, str] = field(default_factory=dict)
    out_of_memory: list[Trial] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Read the records of a results folder. Records of versions with other fields count only by their status."""
        known = cls()
        for record in records:
            known.statuses[record["trial_id"]] = record["status"]
            if record["status"] == "out_of_memory":
                try:
                    known.out_of_memory.append(Trial.model_validate(record["trial"]))
                except ValidationError:
                    continue
        return known

    def add(self, event: Event) -> None:
        """Take in the end of a trial."""
        if event.kind == "trial_ended" and event.trial is not None:
            self.statuses[event.trial.trial_id] = event.status
            if event.status == "out_of_memory":
                self.out_of_memory.append(event.trial)


@dataclass(frozen=True)
class KeeperProxy:
    """The keeper, as a rank of one worker group calls it. Any rank may call `failed`; only rank 0 calls the others.

    `call(method, *arguments)` calls a method of the keeper and returns its answer. Calls about a job need a proxy made by
    `for_job`; with it, `load` and `save` are the `Checkpoints` of `trainables.train.train`.
    """

    call: Callable[..., Any]
    group: str
    job_id: str = ""

    def for_job(self, job_id: str) -> Self:
        return replace(self, job_id=job_id)

    def opened(self, environment: Environment, processes: Sequence[Any]) -> None:
        """Report that all ranks of the group are connected."""
        self.call("opened", self.group, environment, processes)

    def next_job(self) -> Job | None:
        """Wait for the next job; None ends the group."""
        return self.call("next_job", self.group)

    def finished(self, payloads: Sequence[Payload]) -> None:
        """Hand in what all ranks of the trial measured."""
        self.call("finished", self.group, self.job_id, payloads)

    def epoch_ended(self, row: Mapping[str, Any]) -> None:
        """Report a row of epochs.parquet."""
        self.call("epoch_ended", self.group, self.job_id, row)

    def load(self) -> bytes | None:
        """Return the job's latest checkpoint, None without one."""
        return self.call("load_checkpoint", self.group, self.job_id)

    def save(self, content: bytes) -> None:
        """Replace the job's checkpoint."""
        self.call("save_checkpoint", self.group, self.job_id, content)

    def failed(self, failure: Failure) -> None:
        """Report what this rank raised, before it ends."""
        self.call("rank_failed", self.group, failure)


def _shallow(value: Any, leave_out: str = "") -> JSON:
    return {entry.name: getattr(value, entry.name) for entry in fields(value) if entry.name != leave_out}
