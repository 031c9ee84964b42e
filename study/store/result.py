"""The result of a trial, and the files of a results folder that hold it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pyarrow as pa

from analysis.read.schema import SCHEMA_VERSION, SCHEMAS, STATUSES
from study.store.redaction import REASON_LENGTH, redacted, redacted_line, redacted_log
from study.store.tables import parquet_bytes
from trainables.trial import Trial


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a trial.

    steps, buckets, collectives, sweep, epochs: tables with the columns of `analysis.read.schema`, None if not measured.
    traces: rank -> profiler trace as gzip'd JSON. worker_group: id of the warm worker group that ran the trial; it and
    `environment` are empty if nothing ran. started_at: seconds since 1970 (UTC). log: tracebacks of all ranks.
    """

    trial: Trial
    status: str
    reason: str = ""
    steps: pa.Table | None = None
    buckets: pa.Table | None = None
    collectives: pa.Table | None = None
    sweep: pa.Table | None = None
    epochs: pa.Table | None = None
    traces: Mapping[int, bytes] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    worker_group: str = ""
    started_at: float
    duration_s: float
    log: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not known; allowed: {', '.join(STATUSES)}")
        if self.status == "done" and self.steps is None:
            raise ValueError("a trial with status 'done' needs steps")

    def for_people(self) -> Self:
        """Return this result with reason and log as they are shown and stored: without secrets, and clipped."""
        reason = redacted_line(self.reason, REASON_LENGTH)
        return replace(self, reason=reason, log=redacted_log(self.log) if self.log else "")


def files_of(result: TrialResult) -> dict[str, bytes]:
    """Return the files of a trial's folder, without secrets: path below the folder -> content. trial.json is last."""
    result = result.for_people()
    tables = {name: table for name in SCHEMAS if (table := getattr(result, name)) is not None}
    files = {f"{name}.parquet": parquet_bytes(name, table) for name, table in tables.items()}
    files |= {f"traces/rank{rank}.json.gz": trace for rank, trace in result.traces.items()}
    if result.log:
        files["error.log"] = result.log.encode()
    files["trial.json"] = json_bytes(redacted(_record(result)))
    return files


def _record(result: TrialResult) -> dict[str, Any]:
    """Return the content of trial.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "trial_id": result.trial.trial_id,
        "trial": result.trial.model_dump(),
        "status": result.status,
        "reason": result.reason,
        "worker_group": result.worker_group,
        "started_at": result.started_at,
        "duration_s": result.duration_s,
        "environment": dict(result.environment),
        "log": "error.log" if result.log else None,
    }


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"
