"""study.json as one typed value: what the study was asked, and what it adds to its report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class ReferenceLadder:
    """An acceleration ladder measured elsewhere, for comparison.

    machine: its name in the report. samples: per step. batches_s: seconds per 300 steps, one value per step of the
    ladder. source: who measured it, and on what.
    """

    machine: str
    samples: float
    batches_s: tuple[float, ...]
    source: str


@dataclass(frozen=True)
class StudyRecord:
    """The entries of study.json that the report reads. A missing or malformed entry is None or empty.

    goal: one of `GOALS`. price_per_gpu_hour: in the user's currency. planned_trials: ids; None if unknown.
    rungs: name and trial ids of each step of an acceleration ladder, in order.
    reference_ladders: ladders measured elsewhere.
    report_epoch: epoch at which the largest batch is compared with the reference batch.
    small_form: what a study on CPU ranks replaces to finish in minutes; empty for the complete form.
    notes: sentences about the data that no number shows.
    questions: key and text of each question that the report answers in sentences, in order.
    documents: names of further documents of the report.
    predict_to: number of ranks that figures predict up to.
    evidence: numbers by name that other commands add to a study's results.
    """

    name: str
    question: str
    command: str
    goal: str | None
    price_per_gpu_hour: float | None
    planned_trials: tuple[str, ...] | None
    rungs: tuple[tuple[str, tuple[str, ...]], ...]
    reference_ladders: tuple[ReferenceLadder, ...]
    report_epoch: int | None
    small_form: str
    notes: tuple[str, ...]
    questions: tuple[tuple[str, str], ...] = ()
    predict_to: int | None = None
    documents: tuple[str, ...] = ()
    evidence: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, study: Mapping[str, Any]) -> Self:
        """Read the contents of study.json."""
        configuration = study.get("configuration")
        if not isinstance(configuration, dict):
            configuration = {}
        goal, planned = configuration.get("goal"), configuration.get("planned_trials")
        evidence = study.get("evidence")
        if not isinstance(evidence, dict):
            evidence = {}
        return cls(
            name=study.get("name") or "study",
            question=study.get("question") or "",
            command=study.get("command") or "",
            goal=goal if goal in GOALS else None,
            price_per_gpu_hour=_number(
                configuration.get("price-per-gpu-hour", configuration.get("price_per_gpu_hour"))
            ),
            planned_trials=tuple(name for name in planned if isinstance(name, str))
            if isinstance(planned, list)
            else None,
            rungs=tuple(
                (str(rung["name"]), tuple(str(trial_id) for trial_id in rung["trial_ids"]))
                for rung in _records(configuration.get("rungs"))
                if isinstance(rung.get("trial_ids"), list) and "name" in rung
            ),
            reference_ladders=tuple(_ladders(configuration.get("reference_ladders"))),
            report_epoch=_count(configuration.get("report_epoch")),
            small_form=str(configuration.get("small_form") or ""),
            notes=_texts(study.get("notes")),
            questions=tuple(
                (str(entry["key"]), str(entry["question"]))
                for entry in _records(configuration.get("questions"))
                if "key" in entry and "question" in entry
            ),
            documents=_texts(configuration.get("documents")),
            predict_to=_count(configuration.get("predict_to")),
            evidence={name: number for name, value in evidence.items() if (number := _number(value)) is not None},
        )


def _ladders(listed: Any) -> Iterator[ReferenceLadder]:
    for record in _records(listed):
        samples, seconds = _number(record.get("samples")), record.get("batches_s")
        numbers = [_number(value) for value in seconds] if isinstance(seconds, list) else []
        known = tuple(value for value in numbers if value is not None and value > 0)
        if samples is not None and known and len(known) == len(numbers):
            yield ReferenceLadder(
                str(record.get("machine", "another machine")), samples, known, str(record.get("source", ""))
            )


def _records(listed: Any) -> list[dict[str, Any]]:
    return [record for record in listed if isinstance(record, dict)] if isinstance(listed, list) else []


def _texts(listed: Any) -> tuple[str, ...]:
    return tuple(text for text in listed if isinstance(text, str)) if isinstance(listed, list) else ()


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


GOALS = ("throughput", "time-to-accuracy", "cost")
"""Units: samples per second; seconds until the target accuracy; samples per GPU-hour."""
