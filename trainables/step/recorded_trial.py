"""Record which fields of a trial a user's workload reads, so that one that it ignores is not reported as an effect."""

from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr

from trainables.fields import FIELD_FACTS
from trainables.trial import Trial

_RECIPE = ("optimizer", "momentum", "weight_decay", "label_smoothing", "zero_gamma", "decay_norm_and_bias")

LEFT_TO_WORKLOADS = frozenset(
    {name for name, facts in FIELD_FACTS.items() if facts.kind == "workload" or facts.image_folders_only}
    | {"data_dir", *_RECIPE}
) - {"workload"}
"""Fields that have an effect only if a user's workload reads them. All others are applied by the project itself."""

_COMPLETE_READS = frozenset({"__dict__", "__iter__", "__reduce_ex__", "model_dump", "model_dump_json", "model_copy"})
"""Attributes that give access to all fields at once."""


class RecordedTrial(Trial):
    """A trial that records which of its fields are read. A copy or a pickle of it counts as reading all fields."""

    _reads: set[str] = PrivateAttr(default_factory=set)

    @classmethod
    def of(cls, trial: Trial) -> "RecordedTrial":
        """Return a recording copy of a trial."""
        return cls.model_construct(**trial.model_dump())

    def __getattribute__(self, name: str) -> Any:
        if name in FIELD_FACTS or name in _COMPLETE_READS:
            private: Mapping[str, set[str]] | None = super().__getattribute__("__pydantic_private__")
            if private is not None:  # None while the copy is made
                private["_reads"].update([name] if name in FIELD_FACTS else FIELD_FACTS)
        return super().__getattribute__(name)

    def __reduce__(self) -> Any:
        return Trial.model_validate, (self.model_dump(),)

    def unread_fields(self) -> list[str]:
        """Return the fields that had no effect so far, because only a workload applies them and it read none of them.

        Trainings by epochs set the learning rate of any optimizer, timed trials leave it to the workload.
        """
        private: Any = super().__getattribute__("__pydantic_private__")
        values = super().__getattribute__("__dict__")
        left = LEFT_TO_WORKLOADS | (frozenset() if values["epochs"] else {"learning_rate"})
        return sorted(left - private["_reads"])
