"""Fields of trials that ran a user's own script or train function: one column per flag, and the batch that was seen."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.read.fields import Fields
from analysis.text import FLAG

SCRIPT, FUNCTION = "script", "train_function"

_OF_OWN_CODE = (
    SCRIPT, "script_digest", "script_arguments", "script_flags", "script_env", FUNCTION, "train_function_digest",
    "function_config", "bindings", "tokens_per_sample", "add_ddp",
)  # fmt: skip
"""Fields that only trials of a user's own code have."""

_EXPANDED = ("script_flags", "script_env", "function_config", "bindings", "tokens_per_sample")
"""Fields that are replaced by a column per flag, variable or entry."""

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")

COMMAND_COLUMN = "own_code"
"""Column of `Results.trials` with the fields of a user's own code as they were set; None for other trials."""


def is_own_code(fields: Mapping[str, Any]) -> bool:
    """Return True if a trial ran a user's own script or train function."""
    return bool(fields.get(SCRIPT) or fields.get(FUNCTION))


def trial_columns(fields: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], declared: Fields) -> dict[str, Any]:
    """Return the columns of a trial's fields.

    A user's own code does not read the fields of the project's loop, so they are left out. Its flags, variables and
    config entries have a column each. Its batch is the one that the probe saw: samples per rank and backward pass; None
    if unknown.
    """
    if not is_own_code(fields):
        return {**fields, COMMAND_COLUMN: None}
    bound = dict(entry.split("=", 1) for entry in shlex.split(fields.get("bindings") or ""))
    kept = {
        name: value
        for name, value in fields.items()
        if (declared[name].any_door or name in bound) and name not in _EXPANDED and value != ""
    }
    batch, accumulation = _observed_batch(ranks)
    batch = batch if batch is not None else fields["batch_per_gpu"] if "batch_per_gpu" in bound else None
    kept |= {"batch_per_gpu": batch, "accumulation_steps": accumulation}
    command = {name: fields[name] for name in _OF_OWN_CODE if fields.get(name)}
    return kept | _varied(fields) | {COMMAND_COLUMN: command}


def _varied(fields: Mapping[str, Any]) -> dict[str, Any]:
    columns = {f"config {name}": value for name, value in json.loads(fields.get("function_config") or "{}").items()}
    columns |= dict(entry.split("=", 1) for entry in shlex.split(fields.get("script_env") or ""))
    columns |= flags_of(fields.get("script_flags") or "")
    return {f"{FLAG}{name}" if _PLAIN_NAME.fullmatch(name) else name: value for name, value in columns.items()}


def flags_of(text: str) -> dict[str, Any]:
    """Return value by flag of arguments such as `--batch-size 16 lr=0.1 --amp`. A flag without a value is True."""
    flags: dict[str, Any] = {}
    open_flag = None
    for argument in shlex.split(text):
        name, equals, value = argument.partition("=")
        if open_flag is not None and not argument.startswith("-"):
            flags[open_flag], open_flag = argument, None
        elif equals:
            flags[name], open_flag = value, None
        else:
            flags[argument], open_flag = True, argument
    return flags


def _observed_batch(ranks: Sequence[Mapping[str, Any]]) -> tuple[int | None, int | None]:
    """Return samples per rank and backward pass, the mean over ranks, and backward passes per step; None if unknown."""
    seen = [rank.get("probe") or {} for rank in ranks]
    samples: list[Any] = [probe.get("samples_per_step") for probe in seen]
    passes = max((probe.get("micro_batches") or 0 for probe in seen), default=0) or None
    if not samples or None in samples:
        return None, passes
    return round(sum(samples) / len(samples) / (passes or 1)), passes


def finish_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame of trials with typed values of flags, and without flags that only set the batch.

    A flag only sets the batch if, with everything else equal, each of its values has a batch of its own. The batch that
    was seen then names the configuration, so that scripts that divide a global batch among ranks form strong series.
    """
    if COMMAND_COLUMN not in frame or frame[COMMAND_COLUMN].isna().all():
        return frame
    varied = list(dict.fromkeys(name for command in frame[COMMAND_COLUMN].dropna() for name in _varied(command)))
    for name in varied:
        values = frame[name].astype(object)
        if values.dropna().map(lambda value: value is True).any():
            values = values.where(values.notna(), False)
        numbers = pd.to_numeric(values, errors="coerce")
        is_text = values.map(lambda value: isinstance(value, str))
        if is_text.any() and numbers[values.notna()].notna().all():
            whole = (numbers.dropna() % 1 == 0).all()
            values = numbers.astype("Int64").astype(object) if whole else numbers
            values = values.where(pd.notna(values), None)
        frame = frame.assign(**{name: values})
    return frame.drop(columns=[name for name in varied if _sets_the_batch(frame, name, varied)])


def _sets_the_batch(frame: pd.DataFrame, flag: str, varied: Sequence[str]) -> bool:
    own = frame[frame[COMMAND_COLUMN].notna() & frame["batch_per_gpu"].notna()]
    if own[flag].nunique(dropna=False) < 2:
        return False
    others = ["world_size", "nodes", *(name for name in varied if name != flag)]
    groups = own.groupby(others, dropna=False)
    values, batches = groups[flag].nunique(dropna=False), groups["batch_per_gpu"].nunique()
    pairs = own.drop_duplicates([*others, flag, "batch_per_gpu"]).groupby(others, dropna=False).size()
    return bool(((values == batches) & (values == pairs)).all() and (values > 1).any())
