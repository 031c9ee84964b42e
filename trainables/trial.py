"""A trial: one point of a study's grid, as an immutable value with a unique id."""

import hashlib
import json
from typing import Any, Self

from pydantic import model_validator

from trainables.fields import TrialFields
from trainables.rules import refuse_invalid


class Trial(TrialFields):
    """The complete specification of a measurement.

    Raises pydantic's ValidationError for unknown names and for values that are out of range or do not go together;
    `trainables.fields.explain` formats it, one line per problem.
    """

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        refuse_invalid(self)
        return self

    @property
    def trial_id(self) -> str:
        """A readable slug followed by eight hex digits of a hash over all fields. Do not parse it."""
        digest = hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:8]
        name = self.workload.rpartition(":")[2] if self.workload else self.model
        return (
            f"{name}-{self.parallel}-{self.precision}-n{self.nodes}x{self.world_size // self.nodes}"
            f"-b{self.batch_per_gpu}-w{self.loader_workers}-r{self.repeat}-{digest}"
        )

    def but(self, **changes: Any) -> "Trial":
        """Return a validated copy of this trial with changed fields."""
        return Trial.model_validate(self.model_dump() | changes)
