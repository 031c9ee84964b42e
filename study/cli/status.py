"""What a results folder says of its trials: how many there are of each status, which failed and why, what is left."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from analysis.load.study_record import StudyRecord
from study.store.records import ordered

if TYPE_CHECKING:
    from study.store.store import Store


def log_path(store: "Store", record: Mapping[str, Any]) -> str | None:
    """Where a trial's error log lies; whatever a record calls it, it has one name."""
    if not record.get("log"):
        return None
    if store.is_packed:
        return f"{store.out.rstrip('/')}/trials.parquet, column error.log"
    return f"{store.trial_folder(record['trial_id'])}/error.log"


def status_of(directory: str) -> dict[str, Any]:
    """Counts by status, failures, and planned trials that have not been run."""
    from study.store.store import Store

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
