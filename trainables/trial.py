"""A trial: one point of a study's grid, as a frozen value with an identity of its own."""

import hashlib
import json
from typing import Any, Self

from pydantic import model_validator

from trainables.fields import TrialFields
from trainables.rules import refuse_invalid


class Trial(TrialFields):
    """What to measure, in full: nothing about a measurement is decided elsewhere.

    Unknown names and impossible values raise pydantic's ValidationError; `explain` turns that into one line each.
    """

    @model_validator(mode="after")
    def _possible(self) -> Self:
        refuse_invalid(self)
        return self

    @property
    def trial_id(self) -> str:
        """A readable slug and eight hex digits of a hash over every field. For people and folders: nothing parses it."""
        digest = hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:8]
        what = self.workload.rpartition(":")[2] if self.workload else self.model
        return (
            f"{what}-{self.parallel}-{self.precision}-n{self.nodes}x{self.world_size // self.nodes}"
            f"-b{self.batch_per_gpu}-w{self.loader_workers}-r{self.repeat}-{digest}"
        )

    def but(self, **changes: Any) -> "Trial":
        """This trial with other values in some fields, validated again."""
        return Trial.model_validate(self.model_dump() | changes)
