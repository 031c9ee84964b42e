"""Summarize the trials of a results folder: counts by status, failures with their reasons, trials that are left."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from analysis.cause import cause
from analysis.read.errors import ResultsError
from analysis.read.study_record import StudyRecord
from study.errors import clipped, counted
from study.store.records import count_statuses

if TYPE_CHECKING:
    from analysis.verdict.card import Card
    from study.store.store import Store

REPORT = "report/index.html"


def failure_of(store: "Store", record: Mapping[str, Any]) -> dict[str, Any]:
    """Return id, status, reason and error log of a failed trial."""
    return {
        "trial_id": record["trial_id"],
        "status": record["status"],
        "reason": record.get("reason"),
        "log": _log_path(store, record),
    }


def failure_lines(failures: Iterable[Mapping[str, Any]], length: int = 300) -> list[str]:
    """Return one line per cause of the failures, which `failure_of` describes. Reasons are clipped to `length`."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for failure in failures:
        groups.setdefault((failure["status"], cause(failure["reason"] or "")), []).append(failure)
    lines = []
    for (status, _), members in groups.items():
        first, others = members[0], len(members) - 1
        trials = f"{first['trial_id']} and {counted(others, 'other trial')}" if others else first["trial_id"]
        lines.append(f"{status}: {trials}: {clipped(str(first['reason']), length)}; log: {first['log'] or 'none'}")
    return lines


def status_of(directory: str) -> dict[str, Any]:
    """Return counts by status, failures, damaged trials, those that have not run, and the report. Raises StoreError."""
    from study.store.store import Store

    store = Store.at(directory)
    study, (records, damaged) = store.study(), store.scan()
    recorded = {record["trial_id"] for record in records}
    planned = StudyRecord.of(study).planned_trials or ()
    return {
        "study": study["name"],
        "question": study.get("question"),
        "counts": count_statuses(record["status"] for record in records),
        "failures": [failure_of(store, record) for record in records if record["status"] in ("failed", "timeout")],
        "left": [trial_id for trial_id in planned if trial_id not in recorded],
        "damaged": damaged,
        "command": study.get("command"),
        "report": store.address(REPORT) if store.has_file(REPORT) else None,
    }


def card_so_far(directory: str, status: Mapping[str, Any]) -> "Card | None":
    """Return the card of a folder with this status; None if no trial has run, or if the results cannot be read.

    The state of a damaged folder is worth showing: it names what will run again.
    """
    if not status["counts"]:
        return None
    from analysis.report.card import card_at

    with contextlib.suppress(ResultsError):
        return card_at(directory)
    return None


def _log_path(store: "Store", record: Mapping[str, Any]) -> str | None:
    """Return where a trial's error log is, or None if it has none. The file name in the record is not trusted."""
    if not record.get("log"):
        return None
    if store.is_packed:
        return f"{store.address('trials.parquet')}, column error.log"
    return store.address(f"trials/{record['trial_id']}/error.log")
