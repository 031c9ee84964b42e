"""Parse the options of a user's own training code: --script, its arguments, --train-func, --vary, --bind, --env."""

import csv
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from study.cli.inputs import script_or_module, workload_spec
from study.errors import ConfigurationError, clipped, near, one_line, shown
from study.studies.basic import STUDIES
from study.studies.study import TYPE_OF_PLAN_FIELD
from trainables.fields import FIELD_FACTS, TrialFields, explain

Axes = dict[str, tuple[Any, ...]]

ABSENT, PRESENT = False, True
"""Values of a flag that --vary names without values."""

DERIVED_FIELDS = (
    "script_digest", "train_function_digest", "script_flags", "script_env", "function_config", "bindings",
)  # fmt: skip
"""Fields of a trial that follow from options and are no options themselves."""


def own_code_axes(
    script: str,
    script_arguments: str,
    train_function: str,
    vary: Sequence[str],
    bind: Sequence[str],
    env: Sequence[str],
    add_ddp: bool,
) -> Axes:
    """Return the axes for a user's own script or train function, empty without one. Raises ConfigurationError."""
    if script and train_function:
        raise ConfigurationError("--script and --train-func cannot be combined; give one of them")
    if not (script or train_function):
        for option, given in (
            ("--vary", vary),
            ("--bind", bind),
            ("--env", env),
            ("arguments after --", script_arguments),
            ("--add-ddp", add_ddp),
        ):
            if given:
                raise ConfigurationError(
                    f"{option}: requires --script FILE.py, or --train-func FILE.py:NAME for a config"
                )
        return {}
    values = dict(_name_and_values(text, "--vary") for text in _without_repeats(vary, "--vary"))
    axes: Axes = {"bindings": (_bindings(bind, values),)} if bind else {}
    if train_function:
        for option, given in (("--env", env), ("arguments after --", script_arguments)):
            if given:
                raise ConfigurationError(f"{option}: only for --script; a train function has a config, see --vary")
        if add_ddp:
            raise ConfigurationError("--add-ddp: only for --script; let the train function put its model into DDP")
        spec, digest = workload_spec(train_function, "--train-func")
        axes |= {"train_function": (spec,), "train_function_digest": (digest,)}
        if values:
            axes["function_config"] = tuple(map(_as_json, _combinations(values)))
        return axes
    path, digest = script_or_module(script, "--script")
    axes |= {"script": (path,), "script_digest": (digest,)}
    arguments = _split(script_arguments)
    flags = [*values, *(flag for _, flag in map(_field_and_flag, bind))]
    if double := next((flag for flag in flags if _names(arguments, flag)), None):
        raise ConfigurationError(f"{double} is among the script's arguments and also varied or bound; give it once")
    if arguments:
        axes["script_arguments"] = (shlex.join(arguments),)
    if add_ddp:
        axes["add_ddp"] = (True,)
    if values:
        axes["script_flags"] = tuple(map(_as_flags, _combinations(values)))
    if env:
        variables = dict(_name_and_values(text, "--env") for text in _without_repeats(env, "--env"))
        if unset := next((name for name in variables if variables[name] == (ABSENT, PRESENT)), None):
            raise ConfigurationError(f"--env {shown(unset)}: expected NAME=value or NAME=value,value")
        axes["script_env"] = tuple(
            shlex.join(f"{name}={value}" for name, value in chosen.items()) for chosen in _combinations(variables)
        )
    return axes


def varying_options(vary: Sequence[str], env: Sequence[str]) -> list[str]:
    """Return the options for flags, config entries and variables that have several values, as they were typed."""
    given = [(f"--vary={text}", text) for text in vary] + [(f"--env {text}", text) for text in env]
    return [option for option, text in given if len(_name_and_values(text, option)[1]) > 1]


def refuse_unread_fields(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigurationError for an axis that the user's script or train function does not read."""
    if not {"script", "train_function"} & set(axes):
        return
    bound = {entry.partition("=")[0] for entry in shlex.split(axes.get("bindings", ("",))[0])}
    kind, other = ("script", "workload") if "script" in axes else ("train function", "workload")
    if other in axes:
        raise ConfigurationError(f"--workload cannot be combined with a {kind}; give one of them")
    for name in axes:
        known = TYPE_OF_PLAN_FIELD.get(name, name)
        if not FIELD_FACTS[known].any_door and known not in bound:
            readable = ", ".join(
                field for field, facts in FIELD_FACTS.items() if facts.any_door and facts.kind in ("layout", "timing")
            )
            raise ConfigurationError(
                f"{name}: a {kind} does not read this field; pass it on with --bind {known}=FLAG, or vary a flag of "
                f"its own with --vary=FLAG=a,b; fields for every {kind}: {readable}"
            )


def _field_and_flag(text: str) -> tuple[str, str]:
    field, equals, flag = text.partition("=")
    if not (equals and field.strip() and flag.strip()):
        raise ConfigurationError(f"--bind {shown(text)}: expected FIELD=FLAG, such as batch_per_gpu=--batch-size")
    return field.strip(), flag.strip()


def _bindings(bind: Sequence[str], varied: Mapping[str, Any]) -> str:
    pairs = list(map(_field_and_flag, bind))
    for index in (0, 1):
        names = [pair[index] for pair in pairs]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"--bind: {double} is given twice; give it once")
    for field, flag in pairs:
        if field not in TrialFields.model_fields:
            raise ConfigurationError(
                f"--bind: {shown(field)} is not a field of a trial{near(field, TrialFields.model_fields)}"
            )
        if flag in varied:
            raise ConfigurationError(f"{flag} is both varied and bound; give it once")
    text = shlex.join(f"{field}={flag}" for field, flag in pairs)
    try:
        TrialFields(bindings=text)
    except ValidationError as error:
        raise ConfigurationError(f"--bind: {clipped(explain(error)[0])}") from None
    return text


def _without_repeats(options: Sequence[str], source: str) -> Sequence[str]:
    names = [text.partition("=")[0].strip() if not text.startswith("-") else _flag_of(text)[0] for text in options]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(
            f"{source}: {one_line(double)} is given twice; give it once, with commas between its values"
        )
    return options


def _flag_of(text: str) -> tuple[str, str | None]:
    name, equals, values = text.partition("=")
    return name.strip(), values if equals else None


def _name_and_values(text: str, source: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `NAME=a,b`, or a flag without values. Values that contain commas are enclosed in double quotes."""
    name, values = _flag_of(text)
    if not name or any(character.isspace() or character == "\0" for character in name):
        raise ConfigurationError(f"{source} {shown(text)}: expected a name, as in --batch-size=16,32")
    if values is None:
        return name, (ABSENT, PRESENT)
    if "\0" in values or "\n" in values or "\r" in values:
        raise ConfigurationError(f"{source} {shown(text)}: values must be on one line")
    parts = [part.strip() for part in next(csv.reader([values], skipinitialspace=True), [])]
    if not parts or "" in parts:
        raise ConfigurationError(f"{source} {shown(text)}: {name} has an empty value")
    return name, tuple(dict.fromkeys(parts))


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def _as_flags(chosen: Mapping[str, Any]) -> str:
    """Return chosen values as arguments: `--name value`, or `name=value` if it has no dashes.

    Flags without a value come last, so that what follows a flag is always its value.
    """
    arguments: list[str] = []
    for flag, value in chosen.items():
        if isinstance(value, str):
            together = not flag.startswith("-") or value.startswith("-")
            arguments += [f"{flag}={value}"] if together else [flag, value]
    return shlex.join([*arguments, *(flag for flag, value in chosen.items() if value is PRESENT)])


def _as_json(chosen: Mapping[str, Any]) -> str:
    """Return chosen values as JSON. Numbers, true, false and null are typed, all else is text."""
    return json.dumps({name: _typed(value) for name, value in chosen.items()}, sort_keys=True)


def _typed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        typed = json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)
    is_finite = not isinstance(typed, float) or typed == typed and abs(typed) != float("inf")
    return typed if is_finite else value


def _names(arguments: Sequence[str], flag: str) -> bool:
    """Return True if a flag is among arguments, alone or with its value."""
    return any(argument == flag or argument.startswith(f"{flag}=") for argument in arguments)


def _split(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise ConfigurationError(f"script-arguments {shown(arguments)}: {error}") from None


def study_name(script: str, function: str) -> str:
    """Return the name of the study of a script, or of a function FILE.py:NAME: that of its file or function."""
    name = Path(script).stem if script else function.rpartition(":")[2]
    return f"own-{name}" if name in STUDIES else name or "script"
