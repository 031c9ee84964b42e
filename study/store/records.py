"""Functions of the records of trials (trial.json): completeness and statuses."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

from pydantic import ValidationError


def count_statuses(statuses: Iterable[str]) -> dict[str, int]:
    """Count each status. The order of the keys is the same everywhere."""
    from analysis.read.schema import STATUSES

    counts = Counter(statuses)
    return {status: counts[status] for status in (*STATUSES, "missing") if counts[status]}


def statuses_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return trial id -> status."""
    return {record["trial_id"]: record["status"] for record in records}


def is_complete_record(record: Any, tables: Container[str]) -> bool:
    """Return True if the values of a trial's record are valid and its required tables are among `tables` (names)."""
    from analysis.read.schema import SCHEMA_VERSION
    from analysis.read.validate.records import TrialRecord

    try:
        status = TrialRecord.model_validate(record).status
    except ValidationError:
        return False
    return bool(record["schema_version"] == SCHEMA_VERSION and (status != "done" or "steps" in tables))
