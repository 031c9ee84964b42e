"""The fields of trials that measure a user's own script or Ray Train function."""

import difflib
import shlex

from pydantic import BaseModel, ConfigDict, field_validator

from trainables.field_facts import Door, field


class OwnCodeFields(BaseModel):
    """The fields of a script or train function. All are empty in trials of the factory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str = field(
        "", "workload", "path of an unmodified torchrun script, replaces model and dataset", any_door=True
    )
    script_digest: str = field(
        "", "machine", "hash of the script, so that an edited file is another trial", any_door=True
    )
    script_arguments: str = field(
        "", "workload", "arguments of the script that do not vary, quoted for a shell", any_door=True
    )
    script_flags: str = field(
        "", "execution", "arguments of the script that vary (--vary), quoted for a shell", any_door=True
    )
    script_env: str = field(
        "", "execution", "environment variables of the script: NAME=value, quoted for a shell", any_door=True
    )
    train_function: str = field(
        "", "workload", "FILE.py:NAME of a Ray Train function, replaces model and dataset", any_door=True
    )
    train_function_digest: str = field(
        "", "machine", "hash of that file, so that an edited file is another trial", any_door=True
    )
    function_config: str = field(
        "", "execution", "values in the train function's config that --vary sets, as JSON", any_door=True
    )
    bindings: str = field(
        "",
        "workload",
        "fields passed to the script or to the function's config (--bind): FIELD=FLAG FIELD=FLAG",
        any_door=True,
    )
    tokens_per_sample: int | None = field(
        None,
        "workload",
        "tokens per sample of a script or train function; none: taken from integer inputs",
        ge=1,
        any_door=True,
    )

    @field_validator("bindings")
    @classmethod
    def _fields_and_flags(cls, value: str) -> str:
        for entry in shlex.split(value):
            name, equals, flag = entry.partition("=")
            if not (equals and flag):
                raise ValueError("is not FIELD=FLAG")
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, cls.model_fields, n=1)
                raise ValueError(f"names no field of a trial{f'; did you mean {near[0]!r}?' if near else ''}")
        return value

    @property
    def door(self) -> Door:
        """How the user's code is run and measured."""
        return "script" if self.script else "function" if self.train_function else "factory"

    @property
    def bound_fields(self) -> dict[str, str]:
        """The script's flag, or the key of the function's config, by the field that is passed to it."""
        return dict(entry.split("=", 1) for entry in shlex.split(self.bindings))
