"""Declare the fields of a trial: their kinds and labels, how reports compare values, and the first groups of fields."""

import shlex
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from trainables.messages import near

FieldKind = Literal[
    "loading", "storage", "execution", "communication", "layout", "batch", "machine", "workload", "recipe", "training",
    "timing", "run",
]  # fmt: skip
"""What a field determines. Reports compare fields in this order.

loading: how batches reach the device. storage: how samples are stored and read. execution: how a step runs.
communication: what ranks exchange. layout: number of ranks and nodes. batch: batch size. machine: the machine, or the
edition of the files. workload: what is computed. recipe: what is learned. training: how training by epochs proceeds.
timing: how a step is timed. run: which run of a configuration it is.
"""

Door = Literal["factory", "script", "function"]
"""How a user's code enters a study. The project's own models use the factory."""


@dataclass(frozen=True)
class FieldFacts:
    """Properties of a field besides its type, default and limits.

    order: values, the reference first, which reports compare the others to; () for ascending order. table: reports
    compare the values in a separate table ("own"), in the table of all settings, or not at all ("").
    needs_epochs: the field applies only to training by epochs. image_folders_only: it applies only to image folders.
    any_door: it also applies to scripts and train functions, which read no other field.
    label: the field with a value, as reports name it in prose; "" for its name and the value. {value} is the value,
    {value:,} with thousands separators, {file} the last part of a path, {rank} what a rank is called; (s) and (es) stay
    unless the value is 1. header: the field as header of a column, "" for its name.
    """

    kind: FieldKind
    order: tuple[Any, ...] = ()
    table: Literal["own", "settings", ""] = ""
    needs_epochs: bool = False
    image_folders_only: bool = False
    any_door: bool = False
    label: str = ""
    header: str = ""


def field(
    default: Any,
    kind: FieldKind,
    description: str,
    *,
    order: tuple[Any, ...] = (),
    table: Literal["own", "settings", ""] = "",
    needs_epochs: bool = False,
    image_folders_only: bool = False,
    any_door: bool = False,
    label: str = "",
    header: str = "",
    **limits: Any,
) -> Any:
    """Declare a field of a trial, see `FieldFacts`. `limits` are passed to pydantic's `Field`."""
    facts = FieldFacts(kind, order, table, needs_epochs, image_folders_only, any_door, label, header)
    return Field(default, description=description, json_schema_extra={"facts": facts}, **limits)  # type: ignore[dict-item]


class OwnCodeFields(BaseModel):
    """The fields of a script or train function. All are empty in trials of the factory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    script: str = field(
        "",
        "workload",
        "path of an unmodified torchrun script, or name of a module; replaces model and dataset",
        any_door=True,
        label="{file}",
    )
    script_digest: str = field(
        "", "machine", "hash of the script, so that an edited file is another trial", any_door=True
    )
    script_arguments: str = field(
        "", "workload", "arguments of the script that do not vary, quoted for a shell", any_door=True, label="{value}"
    )
    script_flags: str = field(
        "", "execution", "arguments of the script that vary (--vary), quoted for a shell", any_door=True
    )
    script_env: str = field(
        "", "execution", "environment variables of the script: NAME=value, quoted for a shell", any_door=True
    )
    train_function: str = field(
        "",
        "workload",
        "FILE.py:NAME of a Ray Train function, replaces model and dataset",
        any_door=True,
        label="{file}",
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
    add_ddp: bool = field(
        False,
        "workload",
        "put the model of a script for one GPU into DDP; every rank reads the same samples",
        any_door=True,
        label="with added DDP",
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
                raise ValueError(f"names no field of a trial{near(name, cls.model_fields)}")
        return value

    @property
    def door(self) -> Door:
        """How the user's code is run and measured."""
        return "script" if self.script else "function" if self.train_function else "factory"

    @property
    def bound_fields(self) -> dict[str, str]:
        """The script's flag, or the key of the function's config, by the field that is passed to it."""
        return dict(entry.split("=", 1) for entry in shlex.split(self.bindings))

    @property
    def command_line(self) -> tuple[str, ...]:
        """The script's arguments: fixed ones, varied flags, then fields bound to flags."""
        bound = (part for field, flag in self.bound_fields.items() for part in _flag_with(flag, getattr(self, field)))
        return (*shlex.split(self.script_arguments), *shlex.split(self.script_flags), *bound)


def _flag_with(flag: str, value: Any) -> list[str]:
    """Return a flag and its value as arguments: `--name value`, or `name=value` if it has no dashes (Hydra)."""
    return [flag, str(value)] if flag.startswith("-") else [f"{flag}={value}"]


class DataFields(OwnCodeFields):
    """How samples are stored, ordered, read and decoded, and how batches reach the device."""

    storage: str = field("jpeg", "storage", "storage format of an image folder", table="own", image_folders_only=True)
    storage_place: Literal["disk", "shared_memory"] = field(
        "disk",
        "storage",
        "read an image folder from disk, or from a copy in shared memory (tmpfs)",
        table="settings",
        image_folders_only=True,
    )
    page_cache: Literal["as_is", "cold", "warm"] = field(
        "as_is",
        "storage",
        "state of the host's page cache for an image folder's files when the trial starts",
        table="settings",
        image_folders_only=True,
    )
    order: Literal["shuffled", "in_order"] = field(
        "shuffled", "storage", "order of samples in an epoch", table="settings"
    )
    set_epoch: bool = field(True, "storage", "reshuffle every epoch; if false, every epoch repeats the first shuffle")
    decode: str = field("pil", "storage", "JPEG decoder", table="settings", image_folders_only=True)
    augment: Literal["none", "cpu", "device"] = field(
        "none",
        "storage",
        "where images are randomly cropped and flipped: nowhere, in the loaders, or on the rank's device",
        table="settings",
        image_folders_only=True,
    )
    loader_workers: int = field(
        0,
        "loading",
        "loader processes per rank; 0: load in the rank itself",
        ge=0,
        le=256,
        table="settings",
        label="{value} loader worker(s)",
    )
    prefetch_batches: int = field(
        2,
        "loading",
        "batches prefetched by each loader process",
        ge=1,
        le=64,
        table="settings",
        label="{value} prefetched batch(es)",
    )
    pin_memory: bool = field(
        True, "loading", "copy batches to page-locked memory (CUDA)", table="settings", order=(False, True)
    )
    non_blocking: bool = field(
        True, "loading", "copy batches to the device asynchronously (CUDA)", table="settings", order=(False, True)
    )
    copy_ahead: bool = field(
        False,
        "loading",
        "copy upcoming batches to the device concurrently with the step, in a separate stream (CUDA)",
        table="settings",
    )
