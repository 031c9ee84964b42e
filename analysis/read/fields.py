"""The fields of a study's trials as study.json describes them: kind, default, and how to compare their values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.read.errors import ResultsError
from analysis.text import FieldLabel


@dataclass(frozen=True)
class FieldFacts:
    """One field of a trial.

    kind: what it decides, such as "workload", "layout", "recipe" or "timing".
    order: values to compare, the reference first; empty to start with the smallest.
    table: which table compares its values: "own", "settings" (shared with other fields) or "" (none).
    option: command-line option that sets it, "set" for `--set FIELD=VALUE`; None if none does.
    only_with: the field has an effect only if each of these other fields has one of the listed values.
    any_door: a user's own script or train function has this field too.
    label, header: how to name the field with a value, and as header of a column; see `text.FieldLabel`.
    """

    kind: str = ""
    default: Any = None
    order: tuple[Any, ...] = ()
    table: str = ""
    option: str | None = "set"
    only_with: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    any_door: bool = False
    label: str = ""
    header: str = ""

    def has_effect(self, trial: Mapping[Any, Any], facts: Mapping[str, "FieldFacts"]) -> bool:
        """Return whether this field has an effect in a trial with these fields."""
        return all(
            trial.get(name, facts.get(name, FieldFacts()).default) in values for name, values in self.only_with.items()
        )


@dataclass(frozen=True)
class Fields:
    """Facts by field name, in the order in which fields are compared. Unknown names have default facts."""

    facts: Mapping[str, FieldFacts]

    @property
    def labels(self) -> dict[str, FieldLabel]:
        """Labels by field name."""
        return {name: FieldLabel(facts.label, facts.header) for name, facts in self.facts.items()}

    def __getitem__(self, name: str) -> FieldFacts:
        return self.facts.get(name, FieldFacts())

    def of_kind(self, *kinds: str) -> tuple[str, ...]:
        """Return the names of all fields of these kinds."""
        return tuple(name for name, facts in self.facts.items() if facts.kind in kinds)

    def with_effect(self, names: Iterable[str], trial: Mapping[Any, Any]) -> list[str]:
        """Return the fields that have an effect in a trial with these fields.

        A user's workload brings its own model and data, and texts have no image size.
        """
        workload = trial.get("workload")
        is_own = isinstance(workload, str) and workload != ""  # in a row of several studies it may be NaN
        replaced: tuple[str, ...] = ("model", "dataset", "sequence_length") if is_own else ()
        replaced = ("image_size",) if trial.get("model") in self.sequence_models and not replaced else replaced
        return [name for name in names if name not in replaced and self[name].has_effect(trial, self.facts)]

    @property
    def timing(self) -> tuple[str, ...]:
        """Fields that affect how a step is timed, but not what it does."""
        return self.of_kind("timing")

    def compared_in(self, table: str) -> tuple[str, ...]:
        """Return the fields compared in a table of this kind: "own" or "settings"."""
        return tuple(name for name, facts in self.facts.items() if facts.table == table)

    @property
    def sequence_models(self) -> tuple[Any, ...]:
        """Models whose samples are texts of `sequence_length` bytes or tokens."""
        return self["sequence_length"].only_with.get("model", ())


def fields_of(study: Mapping[str, Any], path: str = "study.json") -> Fields:
    """Return the fields that study.json, read from `path`, describes. Raises ResultsError if it describes none."""
    records = study.get("fields")
    if not isinstance(records, Mapping) or not all(isinstance(record, Mapping) for record in records.values()):
        raise ResultsError(
            f"{path} does not describe the fields of its trials, because an older version wrote it; "
            "rerun the study's command to update it"
        )
    return Fields({name: _facts(record) for name, record in records.items()})


def _facts(record: Mapping[str, Any]) -> FieldFacts:
    return FieldFacts(
        kind=record.get("kind", ""),
        default=record.get("default"),
        order=tuple(record.get("order", ())),
        table=record.get("table", ""),
        option=record.get("option"),
        only_with={name: tuple(values) for name, values in record.get("only_with", {}).items()},
        any_door=bool(record.get("any_door")),
        label=record.get("label", ""),
        header=record.get("header", ""),
    )
