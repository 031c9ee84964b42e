"""What a results folder says of the fields of its trials: their kind, their default, and how to compare their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from analysis.load.errors import ResultsError


@dataclass(frozen=True)
class FieldFacts:
    """One field of a trial.

    kind: what it decides, such as "workload", "layout", "recipe" or "timing". order: values from the reference on, against
    which others are compared; empty for the smallest first. table: whether its values are compared in a table of their
    "own", in that of all "settings", or not at all (""). option: of the command line that sets it, "set" for `--set
    FIELD=VALUE`; None if none does. only_with: other fields, each with the values with which this one has an effect.
    """

    kind: str = ""
    default: Any = None
    order: tuple[Any, ...] = ()
    table: str = ""
    option: str | None = "set"
    only_with: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def has_effect(self, trial: Mapping[Any, Any], facts: Mapping[str, "FieldFacts"]) -> bool:
        """Whether a trial with these fields is one in which this field means something."""
        return all(
            trial.get(name, facts.get(name, FieldFacts()).default) in values for name, values in self.only_with.items()
        )


@dataclass(frozen=True)
class Fields:
    """All fields of a study's trials, by name, those that are compared first in front. Other names have no facts."""

    facts: Mapping[str, FieldFacts]

    def __getitem__(self, name: str) -> FieldFacts:
        return self.facts.get(name, FieldFacts())

    def of_kind(self, *kinds: str) -> tuple[str, ...]:
        """Fields of these kinds."""
        return tuple(name for name, facts in self.facts.items() if facts.kind in kinds)

    @property
    def timing(self) -> tuple[str, ...]:
        """Fields that decide how a step is timed, not what it does."""
        return self.of_kind("timing")

    def compared_in(self, table: str) -> tuple[str, ...]:
        """Fields that are compared in a table of their "own", or in that of all "settings"."""
        return tuple(name for name, facts in self.facts.items() if facts.table == table)

    @property
    def text_models(self) -> tuple[Any, ...]:
        """Models whose samples are `sequence_length` bytes of text."""
        return self["sequence_length"].only_with.get("model", ())


def fields_of(study: Mapping[str, Any]) -> Fields:
    """The fields that study.json describes. Raises ResultsError if it describes none."""
    described = study.get("fields")
    if not isinstance(described, Mapping) or not all(isinstance(facts, Mapping) for facts in described.values()):
        raise ResultsError(
            "study.json does not describe the fields of its trials: an older version wrote it; run its command again, "
            "which renews it"
        )
    return Fields({name: _facts(facts) for name, facts in described.items()})


def _facts(described: Mapping[str, Any]) -> FieldFacts:
    return FieldFacts(
        kind=described.get("kind", ""),
        default=described.get("default"),
        order=tuple(described.get("order", ())),
        table=described.get("table", ""),
        option=described.get("option"),
        only_with={name: tuple(values) for name, values in described.get("only_with", {}).items()},
    )
