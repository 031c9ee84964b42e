"""Facts about the records of trials: whether they are complete, and their statuses."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any


def ordered(statuses: Iterable[str]) -> dict[str, int]:
    """How many there are of each status, in one order everywhere."""
    from analysis.load.schema import STATUSES

    counts = Counter(statuses)
    return {status: counts[status] for status in (*STATUSES, "missing") if counts[status]}


def statuses_of(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Status by trial id."""
    return {record["trial_id"]: record["status"] for record in records}


def is_whole_record(record: Any, tables: Container[str]) -> bool:
    """Whether a trial's record, with the names of its tables, is one that the store writes."""
    from analysis.load.schema import SCHEMA_VERSION, STATUSES

    return bool(
        isinstance(record, dict)
        and record.get("schema_version") == SCHEMA_VERSION
        and record.get("status") in STATUSES
        and isinstance(record.get("trial"), dict)
        and (record["status"] != "done" or "steps" in tables)
    )
