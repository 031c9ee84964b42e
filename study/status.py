"""What a results folder says of its trials: how many there are of each status, which failed and why, what is left."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from analysis.study_record import StudyRecord

if TYPE_CHECKING:
    from study.store import Store


def ordered(statuses: Iterable[str]) -> dict[str, int]:
    """How many there are of each status, in one order everywhere."""
    from analysis.schema import STATUSES

    counts = Counter(statuses)
    return {status: counts[status] for status in (*STATUSES, "missing") if counts[status]}


def statuses_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Status by trial id."""
    return {record["trial_id"]: record["status"] for record in records}


def is_whole_record(record: Any, tables: Container[str]) -> bool:
    """Whether a trial's record, with the names of its tables, is one that the store writes."""
    from analysis.schema import SCHEMA_VERSION, STATUSES

    return bool(
        isinstance(record, dict)
        and record.get("schema_version") == SCHEMA_VERSION
        and record.get("status") in STATUSES
        and isinstance(record.get("trial"), dict)
        and (record["status"] != "done" or "steps" in tables)
    )


def log_path(store: "Store", record: Mapping[str, Any]) -> str | None:
    """Where a trial's error log lies; whatever a record calls it, it has one name."""
    if not record.get("log"):
        return None
    if store.is_packed:
        return f"{store.out.rstrip('/')}/trials.parquet, column error.log"
    return f"{store.trial_folder(record['trial_id'])}/error.log"


def status_of(directory: str) -> dict[str, Any]:
    """Counts by status, failures, and planned trials that have not been run."""
    from study.store import Store

    store = Store.at(directory)
    study, (records, damaged) = store.study(), store.scan()
    known = {record["trial_id"] for record in records}
    planned = StudyRecord.of(study).planned_trials or ()
    return {
        "study": study["name"],
        "question": study.get("question"),
        "counts": ordered(record["status"] for record in records),
        "failures": [
            {
                "trial_id": record["trial_id"],
                "status": record["status"],
                "reason": record.get("reason"),
                "log": log_path(store, record),
            }
            for record in records
            if record["status"] in ("failed", "timeout")
        ],
        "left": [trial_id for trial_id in planned if trial_id not in known],
        "damaged": damaged,
        "command": study.get("command"),
    }
