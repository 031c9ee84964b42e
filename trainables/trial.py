"""A trial: one point of a study's grid, as an immutable value with a unique id."""

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from trainables.field_facts import OwnCodeFields
from trainables.fields import TrialFields
from trainables.rules import refuse_invalid

MIN_LIMITED_STEPS = 5
"""Fewest steps of a window that `window_limit_s` shortens."""

MAX_SLUG = 100
"""Maximum length of the readable part of a trial's id with a user's own arguments."""

_NEWER = (
    "fused_loss", "attention", "split_graph", "activation_checkpointing", "window_limit_s", "first_bucket_mb",
    "shard_ranks",
)  # fmt: skip

_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def _words(text: str) -> list[str]:
    """Return the words of a text that are safe in a folder name, up to `MAX_SLUG` characters."""
    return "-".join(re.findall(r"[A-Za-z0-9_][A-Za-z0-9_.]*", text))[:MAX_SLUG].rstrip("-").split("-") if text else []


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
        fields = self.model_dump()
        for name in (*OwnCodeFields.model_fields, *_NEWER):  # they are newer than many stored trials
            if fields[name] == type(self).model_fields[name].default:
                del fields[name]
        fields["account_steps"] = fields.pop("communication_steps")  # its name when the first results were stored
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
        layout = f"n{self.nodes}x{self.world_size // self.nodes}"
        if self.door == "factory":
            parts = [self.code_name, self.parallel, self.precision, layout, f"b{self.batch_per_gpu}"]
            parts += [f"w{self.loader_workers}"]
        else:
            parts = [Path(self.code_name).stem, layout, *_words(self._varied_values())]
        text = "-".join([*parts, f"r{self.repeat}", digest])
        return "".join(character if character.isprintable() else "_" for character in text)  # a file's name may be any

    def _varied_values(self) -> str:
        """Return the flags, config and variables of a user's own code as text, without variables that may be secret."""
        bound = [f"{flag}={getattr(self, name)}" for name, flag in self.bound_fields.items()]
        variables = [entry for entry in shlex.split(self.script_env) if not _SECRET.search(entry.partition("=")[0])]
        return " ".join([self.script_flags, self.function_config, *bound, *variables])

    def shortened(self, step_s: float) -> "Trial":
        """Return this trial with as many steps per window as `window_limit_s` allows for steps of this duration."""
        if self.window_limit_s is None:
            return self
        most = max(MIN_LIMITED_STEPS, int(self.window_limit_s / step_s))
        return self.but(steps=min(self.steps, most), communication_steps=min(self.communication_steps, most))

    def but(self, **changes: Any) -> "Trial":
        """Return a validated copy of this trial with changed fields."""
        return Trial.model_validate(self.model_dump() | changes)
