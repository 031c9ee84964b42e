"""Messages between driver, keeper and ranks, as typed values.

    driver --Job--> keeper --Job--> ranks --Payload per rank--> keeper --Outcome--> driver

Ray and torch.distributed pickle these values. Every process of a study runs the same version of this code.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from pydantic import ValidationError

from analysis.cause import cause
from trainables.trial import Trial

JSON = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A trial for the ranks of a worker group."""

    id: str
    trial: Trial
    source: str | None = None
    """Text of the user's workload file, None without one."""
    checkpoint_every_s: float = 30.0
    """Minimum time between two checkpoints of a training trial."""
    timeout_s: float = 600.0
    """Time limit of a script, which its ranks keep themselves, so that they can say what it was doing."""
    directory: str = ""
    """Working directory of the command that started the study, for scripts."""
    check: bool = False
    """Only run a step of a user's workload on rank 0, without measuring it."""


_OPTIONAL = (
    "plain_window",
    "causal_attention_flops",
    "recomputed_flops",
    "matmul_flops_per_s",
    "tokens_per_sample",
    "unread_fields",
    "probe",
)


@dataclass(frozen=True)
class Evidence:
    """State of one rank before and after its windows; see `study.store.environment.readings`."""

    before: JSON
    after: JSON
    memory: dict[str, int | None]
    threads: int
    peak_memory_by_device_bytes: list[int] | None
    step_flops: float | None
    dataset_samples: int | None
    plain_window: JSON | None = None
    """Energy readings before and after the plain window; None for training trials, which have no windows."""
    causal_attention_flops: float | None = None
    """The part of `step_flops` of which half is masked; None if unknown."""
    recomputed_flops: float | None = None
    """What activation checkpointing computes again, not in `step_flops`; None if nothing or unknown."""
    matmul_flops_per_s: dict[str, float] | None = None
    """Measured rate of a large matrix product by number format; None on CPUs and for training trials."""
    tokens_per_sample: float | None = None
    """Tokens per sample that a user's workload states."""
    probe: JSON | None = None
    """What the probe saw in a user's loop, such as samples per step; None for the project's own loop."""
    unread_fields: list[str] | None = None
    """Fields that a user's workload ignores; None for models of the registry."""

    def record(self) -> JSON:
        """Return the evidence in the format of trial.json."""
        return {name: value for name, value in _shallow(self).items() if value is not None or name not in _OPTIONAL}


@dataclass(frozen=True)
class Failure:
    """An exception of a rank: its first line, and the traceback without secrets."""

    rank: int
    node_id: str
    out_of_memory: bool
    line: str
    traceback: str
    timed_out: bool = False
    is_consequence: bool = False
    """True if it only followed from another rank's failure."""
    infeasible: bool = False
    """True if the trial cannot run on this device."""


@dataclass(frozen=True)
class Payload:
    """Everything that one rank returns for a job."""

    tables: Mapping[str, bytes]
    """Rows of the rank as Arrow streams, by table name."""
    evidence: Evidence
    started_at: float
    """Unix time in seconds by the clock of the rank's host, as `ended_at`."""
    ended_at: float
    trace: bytes | None = None
    """JSON compressed with gzip; None without a profiler."""
    failure: Failure | None = None
    """Why a script on this rank has no complete result. The worker group itself stays usable."""


@dataclass(frozen=True)
class RankProcess:
    """A rank of a group that starts: its host, and its handle for `RankBackend.kill`."""

    rank: int
    node_id: str
    host: str
    handle: Any


@dataclass(frozen=True)
class RankFacts:
    """Facts that a rank sends to its group at the start."""

    rank: JSON
    node: JSON

    @property
    def node_id(self) -> str:
        return str(self.rank["node_id"])


@dataclass(frozen=True)
class Environment:
    """Environment of a worker group, the same for all its trials."""

    nodes: list[JSON]
    """One entry per node."""
    ranks: list[JSON]
    """One entry per rank."""
    versions: JSON = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    set_by_study: list[str] = field(default_factory=list)
    """Names of variables whose values follow from fields of a trial."""
    git: JSON = field(default_factory=dict)
    measuring_code: str = ""
    lock_file: str | None = None
    """Digest of requirements.lock."""
    startup: list[dict[str, float]] = field(default_factory=list)
    """Times of the phases of each rank's start; see `study.orchestrate.rank.serve`."""
    group: dict[str, float] = field(default_factory=dict)
    """Times when the group was requested and when all its ranks were connected."""
    launch: str = ""
    """Name of the first group of the same launch, whose ranks' processes were forked from the same servers."""

    def record(self) -> JSON:
        """Return the environment in the format of trial.json."""
        return _shallow(self)


@dataclass(frozen=True)
class Outcome:
    """Result of a job."""

    status: str
    started_at: float
    duration_s: float
    reason: str = ""
    log: str = ""
    worker_group: str = ""
    environment: Environment | None = None
    """None if no worker group started."""
    payloads: Sequence[Payload] = ()
    """One entry per rank of the trial if the status is "done", else empty."""
    concurrent: int = 1
    """Largest number of jobs that ran at the same time, including this one."""


@dataclass(frozen=True)
class Event:
    """A change to show to a person who watches a run."""

    kind: Literal["group_starting", "trial_started", "epoch_ended", "trial_ended"]
    trial: Trial | None = None
    status: str = ""
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    log: str = ""


MOST_NOT_SAVED = 3
"""A run ends after this many trials in a row that could not be saved: it would measure for nothing."""


@dataclass
class KnownTrials:
    """Trials that ended before or during a run: status by trial id, and trials that ran out of memory."""

    statuses: dict[str, str] = field(default_factory=dict)
    out_of_memory: list[Trial] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reasons of trials of a user's code that failed in this run, without rank and host."""
    unusable: str = ""
    """Reason for which two trials failed, if no trial has succeeded, or why the last ones could not be saved.

    Further ones would fail too.
    """
    not_saved: int = 0
    """Number of the last trials in a row whose results could not be saved."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> Self:
        """Read the records of a results folder. For records with other fields, only the status is used."""
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
        """Add a trial if the event is its end."""
        if event.kind == "trial_ended" and event.trial is not None:
            self.statuses[event.trial.trial_id] = event.status
            self.not_saved = self.not_saved + 1 if event.summary.get("not_saved") else 0
            if self.not_saved == MOST_NOT_SAVED:
                self.unusable = event.reason
            if event.status == "out_of_memory":
                self.out_of_memory.append(event.trial)
            if event.status in ("failed", "timeout") and event.trial.door != "factory":
                reason = cause(event.reason)
                if reason in self.failures and "done" not in self.statuses.values():
                    self.unusable = reason
                self.failures.append(reason)


@dataclass(frozen=True)
class KeeperProxy:
    """The keeper's methods for the ranks of one worker group. Any rank may call `starting`, `meet` and `failed`, only
    rank 0 the others.

    `call(method, *arguments)` calls a method of the keeper and returns its answer. Calls about a job require a proxy
    from `for_job`, whose `load` and `save` are the `Checkpoints` of `trainables.train.train`.
    """

    call: Callable[..., Any]
    group: str
    job_id: str = ""

    def for_job(self, job_id: str) -> Self:
        return replace(self, job_id=job_id)

    def starting(self, process: RankProcess) -> None:
        """Report that this rank makes progress while its group starts."""
        self.call("rank_starting", self.group, process)

    def meet(self, address: str | None) -> str | None:
        """Return the address at which the ranks of the group connect. Rank 0 passes it; the others wait for it."""
        return self.call("meet", self.group, address)

    def opened(self, environment: Environment) -> None:
        """Report that all ranks of the group are connected."""
        self.call("opened", self.group, environment)

    def next_job(self) -> Job | None:
        """Wait for the next job; None ends the group."""
        return self.call("next_job", self.group)

    def finished(self, payloads: Sequence[Payload]) -> None:
        """Return the payloads of all ranks of the trial."""
        self.call("finished", self.group, self.job_id, payloads)

    def window_starting(self, window: str) -> None:
        """Report the window that follows. Only called between windows."""
        self.call("window_starting", self.group, self.job_id, window)

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
        """Report an exception of this rank before it ends."""
        self.call("rank_failed", self.group, failure)


def _shallow(value: Any) -> JSON:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}
