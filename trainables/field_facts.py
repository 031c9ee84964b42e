"""Declare the fields of a trial: what kind of field each is, and how reports compare its values."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

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
    """

    kind: FieldKind
    order: tuple[Any, ...] = ()
    table: Literal["own", "settings", ""] = ""
    needs_epochs: bool = False
    image_folders_only: bool = False
    any_door: bool = False


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
    **limits: Any,
) -> Any:
    """Declare a field of a trial, see `FieldFacts`. `limits` are passed to pydantic's `Field`."""
    facts = FieldFacts(kind, order, table, needs_epochs, image_folders_only, any_door)
    return Field(default, description=description, json_schema_extra={"facts": facts}, **limits)  # type: ignore[dict-item]
