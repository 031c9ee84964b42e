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
class MeasuredGain:
    """A ratio with the ends of its interval; None if unknown."""

    value: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Any) -> Self | None:
        """Read [value, low, high]; None if it is anything else."""
        numbers = [_number(value) for value in values] if isinstance(values, list) and len(values) == 3 else []
        return cls(numbers[0], numbers[1], numbers[2]) if numbers and numbers[0] is not None else None


@dataclass(frozen=True)
class LeverRow:
    """A change that `improve` tried, or that its budget did not allow to try.

    bound: the largest possible gain, None if unknown. onto: changes that were already made. gain: by the goal. effect:
    arithmetic, memory or order. why: why it is kept or not.
    """

    lever: str
    effect: str
    note: str
    bound: float | None
    onto: tuple[str, ...]
    gain: MeasuredGain | None
    gain_on_one: MeasuredGain | None
    gain_on_all: MeasuredGain | None
    is_kept: bool
    why: str


@dataclass(frozen=True)
class Side:
    """Throughput and bottleneck of a configuration on so many ranks. share: of the step that the bottleneck takes.

    time_to_target_s: of trainings, None for timed steps.
    """

    throughput_samples_per_s: float
    ranks: int
    time_to_target_s: float | None
    tokens_per_sample: float | None
    bottleneck: str | None
    share: float | None
    trial_ids: tuple[str, ...]


@dataclass(frozen=True)
class Improvement:
    """The outcome of `improve`. measured_in: its folder, if this is the folder of the study that was improved.

    gain: of the verified configuration over the baseline, None if there is none yet. kept: its changes. steps: each
    change that was added, with its gain. loss: difference from the baseline, spread of seeds (None if unknown), and
    whether it is beyond. price_per_gpu_hour, target_accuracy: None if not given. command, yaml: how to use the
    configuration.
    """

    goal: str
    ranks: int
    on_gpus: bool
    is_complete: bool
    measured_in: str
    trials: int
    elapsed_s: float
    gpu_hours: float | None
    baseline: Side | None
    chosen: Side | None
    kept: tuple[str, ...]
    gain: MeasuredGain | None
    gain_on_one: MeasuredGain | None
    gain_on_all: MeasuredGain | None
    levers: tuple[LeverRow, ...]
    steps: tuple[tuple[str, MeasuredGain], ...]
    loss: tuple[float, float | None, bool] | None
    price_per_gpu_hour: float | None
    target_accuracy: float | None
    command: str
    yaml: str

    @property
    def raised(self) -> str:
        """Return what the gain is in."""
        return _RAISED.get(self.goal, "throughput")

    @property
    def checked_bounds(self) -> list[tuple[str, bool]]:
        """Return the changes whose upper bound and gain are known, and whether the gain respects the bound.

        It does not if its entire interval is above the bound.
        """
        known = [(row.lever, row.bound, row.gain) for row in self.levers]
        return [
            (lever, bound >= (gain.value if gain.low is None else gain.low))
            for lever, bound, gain in known
            if bound is not None and gain is not None
        ]


@dataclass(frozen=True)
class StudyRecord:
    """The entries of study.json that the report reads. A missing or malformed entry is None or empty.

    goal: one of `GOALS`. price_per_gpu_hour: in the user's currency. planned_trials: ids; None if unknown.
    ladder_steps: name and trial ids of each step of an acceleration ladder, in order.
    reference_ladders: ladders measured elsewhere.
    report_epoch: epoch at which the largest batch is compared with the reference batch.
    small_form: what a study on CPU ranks replaces to finish in minutes; empty for the complete form.
    notes: sentences about the data that no number shows.
    questions: key and text of each question that the report answers in sentences, in order.
    documents: names of further documents of the report.
    predict_to: number of ranks that figures predict up to.
    evidence: numbers by name that other commands add to a study's results.
    improvement: outcome of `improve`, None without one.
    """

    name: str
    question: str
    command: str
    goal: str | None
    price_per_gpu_hour: float | None
    planned_trials: tuple[str, ...] | None
    ladder_steps: tuple[tuple[str, tuple[str, ...]], ...]
    reference_ladders: tuple[ReferenceLadder, ...]
    report_epoch: int | None
    small_form: str
    notes: tuple[str, ...]
    questions: tuple[tuple[str, str], ...] = ()
    predict_to: int | None = None
    documents: tuple[str, ...] = ()
    evidence: Mapping[str, float] = field(default_factory=dict)
    improvement: Improvement | None = None

    @property
    def search(self) -> Improvement | None:
        """Return the outcome of `improve` if this is the folder of its trials, not that of the study it improved."""
        return None if self.improvement is None or self.improvement.measured_in else self.improvement

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
            ladder_steps=tuple(
                (str(step["name"]), tuple(str(trial_id) for trial_id in step["trial_ids"]))
                for step in _records(configuration.get("ladder_steps"))
                if isinstance(step.get("trial_ids"), list) and "name" in step
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
            improvement=_improvement(study.get("improve")),
        )


def _improvement(record: Any) -> Improvement | None:
    if not isinstance(record, dict) or not isinstance(record.get("ranks"), int):
        return None
    use, loss = record.get("use"), record.get("loss")
    use = use if isinstance(use, dict) else {}
    loss = loss if isinstance(loss, dict) else {}
    difference, spread = (_number(loss.get(name)) for name in ("difference", "spread"))
    steps = [(str(step.get("lever")), MeasuredGain.of(step.get("gain"))) for step in _records(record.get("steps"))]
    return Improvement(
        goal=str(record.get("goal")),
        ranks=record["ranks"],
        on_gpus=record.get("on_gpus") is True,
        is_complete=record.get("is_complete") is True,
        measured_in=str(record.get("measured_in") or ""),
        trials=int(_number(record.get("trials")) or 0),
        elapsed_s=_number(record.get("elapsed_s")) or 0.0,
        gpu_hours=_number(record.get("gpu_hours")),
        baseline=_side(record.get("baseline"), record["ranks"]),
        chosen=_side(record.get("chosen"), record["ranks"]),
        kept=_texts(record.get("kept")),
        gain=MeasuredGain.of(record.get("gain")),
        gain_on_one=MeasuredGain.of(record.get("gain_on_one")),
        gain_on_all=MeasuredGain.of(record.get("gain_on_all")),
        levers=tuple(map(_lever, _records(record.get("levers")))),
        steps=tuple((lever, gain) for lever, gain in steps if gain is not None),
        loss=None if difference is None else (difference, spread, loss.get("is_beyond") is True),
        price_per_gpu_hour=_number(record.get("price_per_gpu_hour")),
        target_accuracy=_number(record.get("target_accuracy")),
        command=str(use.get("command") or ""),
        yaml=str(use.get("yaml") or ""),
    )


def _lever(row: Mapping[str, Any]) -> LeverRow:
    return LeverRow(
        lever=str(row.get("lever") or ""),
        effect=str(row.get("effect") or ""),
        note=str(row.get("note") or ""),
        bound=_number(row.get("bound")),
        onto=_texts(row.get("onto")),
        gain=MeasuredGain.of(row.get("gain")),
        gain_on_one=MeasuredGain.of(row.get("gain_on_one")),
        gain_on_all=MeasuredGain.of(row.get("gain_on_all")),
        is_kept=row.get("is_kept") is True,
        why=str(row.get("why") or ""),
    )


def _side(record: Any, ranks: int) -> Side | None:
    """Read a side of the comparison. ranks: number of them, if it does not say."""
    value = _number(record.get("throughput_samples_per_s")) if isinstance(record, dict) else None
    if value is None or value <= 0:
        return None
    bottleneck = record.get("bottleneck")
    bottleneck = bottleneck if isinstance(bottleneck, str) else None
    tokens, share = _number(record.get("tokens_per_sample")), _number(record.get("share"))
    own_ranks, time_to_target_s = _count(record.get("ranks")), _number(record.get("time_to_target_s"))
    return Side(value, own_ranks or ranks, time_to_target_s, tokens, bottleneck, share, _texts(record.get("trial_ids")))


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

_RAISED = {
    "efficiency": "scaling efficiency",
    "cost": "samples per GPU-hour",
    "time-to-accuracy": "speed to the target accuracy",
}
"""What the gain of `improve` is in, by goal; else throughput."""
