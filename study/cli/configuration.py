"""Resolve the command line and a YAML file into one validated configuration. The command line takes precedence."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from analysis.read.study_record import GOALS
from study.cli.inputs import data_dir_path, dataset_in, refuse_endless, storage_axis, workload_spec
from study.cli.own_code import DERIVED_FIELDS, own_code_axes, refuse_unread_fields, study_name
from study.errors import ConfigurationError, clipped, near, one_line, shown
from study.options import FILE_KEYS, OPTION_OF_FIELD, STUDY_OPTIONS
from study.studies.basic import STUDIES
from study.studies.study import TYPE_OF_PLAN_FIELD, Study
from trainables.fields import TrialFields, explain
from trainables.registry import (
    DATASETS,
    MODELS,
    PRECISIONS,
    SAMPLE_DATASETS,
    kind_of_dataset,
    kind_of_model,
    names_with,
)

AXIS_OPTIONS = {option.name: option.field for option in STUDY_OPTIONS if option.is_axis}
"""options that take a comma list -> the field of a trial that they set"""

PLAIN_OPTIONS = {option.name: option.setting for option in STUDY_OPTIONS if option.setting}
"""options with one value -> the field of `Configuration` that they set"""

OTHER_OPTION_OF_FIELD = {field: option.usage for field, option in OPTION_OF_FIELD.items() if not option.is_axis}
"""fields of a trial that --set does not accept -> the option that sets them"""

OWN_CODE_SETTINGS = ("script", "script_arguments", "train_function", "vary", "bind", "env", "add_ddp")
"""fields of `Configuration` that describe a user's own training code"""

PROFILED_RANKS = ("0",)
"""profile_ranks for --profile; --set profile_ranks selects other ranks"""


def address_of(value: str | None) -> str | None:
    """Validate the `--address` of a command that plans nothing. Raises ConfigurationError."""
    return None if value is None else _parse_single("address", value, "--address")


class Configuration(BaseModel):
    """All options of a run. `axes` contains only what was requested; the study determines the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    study: str = "default"
    out: str = ""
    script: str = ""
    script_arguments: str = ""
    train_function: str = ""
    vary: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    add_ddp: bool = False
    axes: dict[str, tuple[Any, ...]] = {}
    repeats: int | None = Field(None, ge=1, le=1000)
    address: str | None = Field(None, pattern=r"^(auto|local|[^\s/]+:\d{1,5})$")
    isolate: bool = False
    max_concurrent: int = Field(1, ge=1, le=1000)
    trial_timeout_s: float = Field(600.0, gt=0)
    price_per_gpu_hour: float | None = Field(None, ge=0)
    goal: Literal[GOALS] | None = None  # type: ignore[valid-type]

    @field_validator("address")
    @classmethod
    def _has_valid_port(cls, address: str | None) -> str | None:
        if address and ":" in address and not 0 < int(address.rpartition(":")[2]) < 2**16:
            raise ValueError("its port must be between 1 and 65535")
        return address

    @field_validator("case", "vary", "bind", "env", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def has_own_code(self) -> bool:
        """True if the user's own script or train function is the study."""
        return bool(self.script or self.train_function)

    @property
    def is_named(self) -> bool:
        """True for a study of `STUDIES`, False for one that is named after the user's code."""
        return self.study in STUDIES

    @property
    def order_seed(self) -> int:
        """Seed of the random order of trials: the first of the trials' seeds."""
        return int(self.axes.get("seed", (0,))[0])


def resolve(command_line: Mapping[str, Any], config_file: str | None = None) -> Configuration:
    """Return the configuration that the command line and a YAML file describe. Raises ConfigurationError.

    command_line: option names without dashes -> values as given, without the options that were not given.
    """
    plain: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}
    sources: list[tuple[Mapping[str, Any], Callable[[str], str]]] = [(command_line, "--{}".format)]
    if config_file is not None:
        sources.insert(0, (_read_yaml(config_file), f"{config_file}: {{}}".format))
    for options, source_of in sources:
        plain_of_source, axes_of_source = _read_options(options, source_of)
        if {"batch_per_gpu", "global_batch"} & set(axes_of_source):
            axes = {name: values for name, values in axes.items() if name not in ("batch_per_gpu", "global_batch")}
        plain |= plain_of_source
        axes |= axes_of_source
    axes |= _data_axes(axes)
    configuration = Configuration(**plain)
    axes |= own_code_axes(**{name: getattr(configuration, name) for name in OWN_CODE_SETTINGS})
    if configuration.has_own_code:
        if "study" in plain:
            raise ConfigurationError(f"study {configuration.study!r} has its own code; leave the study out")
        plain["study"] = study_name(configuration.script, configuration.train_function)
    elif "workload" in axes and "study" not in plain:
        plain["study"] = study_name("", axes["workload"][0])
    refuse_unread_fields(axes)
    configuration = Configuration(**plain, axes=axes)
    return configuration.model_copy(update={"out": _out(configuration)})


def _data_axes(requested: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return the data set and storage format that follow from the requested axes. Raises ConfigurationError."""
    axes = dict(requested)
    if "data_dir" in axes and not {"dataset", "workload"} & set(axes):
        axes["dataset"] = (dataset_in(axes["data_dir"][0]),)
    kinds = {kind_of_model(name) for name in axes.get("model", ("",))}
    if not {"dataset", "data_dir", "workload"} & set(axes) and len(kinds) == 1 and kinds != {"images"}:
        axes["dataset"] = (SAMPLE_DATASETS[kinds.pop()],)
    if (
        "data_dir" in axes
        and "storage" not in axes
        and any(DATASETS[name].image_folder for name in axes.get("dataset", ()))
    ):
        axes |= storage_axis(axes["data_dir"][0])
    if "workload" not in axes and "data_dir" not in axes:
        for dataset in sorted({*names_with(DATASETS, "needs_data_dir")} & set(axes.get("dataset", ()))):
            sample = SAMPLE_DATASETS[kind_of_dataset(dataset)]
            raise ConfigurationError(
                f"--set dataset: {dataset!r} needs --data-dir DIR with its files; {sample!r} needs no files"
            )
    return axes


def to_yaml(configuration: Configuration, study: Study) -> str:
    """Return YAML that reproduces a configuration, including the study's default axes."""
    options: dict[str, Any] = {
        option: getattr(configuration, field)
        for option, field in PLAIN_OPTIONS.items()
        if getattr(configuration, field) not in (None, "", ())
    }
    if not configuration.is_named:
        del options["study"]
    options |= {name: list(options[name]) for name in ("case", "vary", "bind", "env") if name in options}
    options["repeats"] = study.repeats
    in_cases = {name for of_case in study.cases.values() for name in of_case}  # as axes, they would override the cases
    all_fields = {name: [value] for name, value in study.base.items()} | {
        name: list(v) for name, v in study.axes.items()
    }
    fields = {name: values for name, values in all_fields.items() if name not in in_cases}
    own = ("script", "script_arguments", "train_function", "add_ddp", *DERIVED_FIELDS)
    for derived in ("workload_digest", "most_per_gpu", "epoch_steps", *own):
        fields.pop(derived, None)
    for option, field in AXIS_OPTIONS.items():
        if field in fields:
            options[option] = fields.pop(field)
    for field in ("data_dir", "workload"):
        if field in fields:
            options[OPTION_OF_FIELD[field].name] = fields.pop(field)[0]
    if fields:
        options["set"] = fields
    import yaml

    return yaml.safe_dump(options, sort_keys=False, default_flow_style=None)


# ------------------------------------------------------------------------------------------------- options to values


def _read_options(
    options: Mapping[str, Any], source_of: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the plain values and the axes of one source, each validated on its own."""
    plain: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}

    def add(field: str, values: tuple[Any, ...], source: str) -> None:
        if field in axes:
            raise ConfigurationError(f"{source}: {field} is given twice; give it once")
        axes[field] = values

    for option, value in options.items():
        source = source_of(option)
        if option in AXIS_OPTIONS:
            add(AXIS_OPTIONS[option], _values(AXIS_OPTIONS[option], value, source), source)
        elif option == "set":
            for field, values in _settings(value, source):
                add(field, _values(field, values, source), source)
        elif option == "data-dir":
            add("data_dir", (data_dir_path(value, source),), source)
        elif option == "workload":
            spec, digest = workload_spec(value, source)
            axes |= {"workload": (spec,), "workload_digest": (digest,)}
        elif option == "profile":
            if not isinstance(value, bool):
                raise ConfigurationError(
                    f"{source} {shown(value)}: expected true or false; to select ranks, set profile_ranks"
                )
        else:
            plain[PLAIN_OPTIONS[option]] = _parse_single(option, value, source)
    for one, other in (("global_batch", "batch_per_gpu"), ("tokens_per_step", "global_batch")):
        if {one, other} <= set(axes):
            names = (source_of(one.replace("_", "-")), f"--{other.replace('_', '-')}")
            raise ConfigurationError("{}: cannot be combined with {}; give only one of them".format(*names))
    if {"tokens_per_step", "accumulation_steps"} <= set(axes):
        raise ConfigurationError(
            f"{source_of('tokens-per-step')}: determines accumulation_steps; give only one of them"
        )
    if options.get("profile"):
        axes.setdefault("profile_ranks", PROFILED_RANKS)
    return plain, axes


def _parse_single(option: str, value: Any, source: str) -> Any:
    field = PLAIN_OPTIONS[option]
    if option == "study":
        if not isinstance(value, str) or value not in STUDIES:
            hint = "; separate the values of a list by commas, without spaces" if _is_list_value(value) else ""
            file = "" if source.startswith("--") else f"{source}: "
            names = ", ".join(STUDIES)
            raise ConfigurationError(
                f"{file}unknown study {shown(value)}{near(value, STUDIES) or f'; studies: {names}{hint}'}"
            )
        return value
    if option == "out" and isinstance(value, str) and not value.strip():
        raise ConfigurationError(f"{source} {shown(value)} is not a path")
    try:
        if isinstance(value, bool) and Configuration.model_fields[field].annotation is not bool:
            raise ConfigurationError(f"{source} {shown(value)}: input should not be true or false")
        return getattr(Configuration.model_validate({field: value}), field)
    except ValidationError as error:
        if option == "address":
            client = "; fix: Ray Client is not supported, so give HOST:PORT of Ray's GCS, whose default port is 6379"
            raise ConfigurationError(
                f"{source} {shown(value)} is not an address; allowed: auto, local, HOST:PORT"
                + (client if str(value).startswith("ray://") else "")
            ) from None
        if option == "goal":
            raise ConfigurationError(
                f"{source} {shown(value)} is not known; allowed: {', '.join(GOALS)}{near(value, GOALS)}"
            ) from None
        message = error.errors()[0]["msg"]
        raise ConfigurationError(f"{source} {shown(value)}: {message[0].lower()}{message[1:]}") from None


def _is_list_value(value: Any) -> bool:
    """Return True if a study's name is probably another value of the preceding option, as in `--gpus 1 2`."""
    if not isinstance(value, str):
        return False
    return value in MODELS or value in PRECISIONS or value.replace(",", "").strip().isdecimal()


def _settings(value: Any, source: str) -> Iterable[tuple[str, Any]]:
    """Yield (field, values) for every `--set field=a,b`, or for the equivalent mapping in a file."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        pairs = []
        for setting in value if isinstance(value, (list, tuple)) else [value]:
            field, equals, values = setting.partition("=") if isinstance(setting, str) else ("", "", "")
            if not equals or not field.strip():
                raise ConfigurationError(f"{source} {shown(setting)}: expected field=value or field=value,value")
            pairs.append((field.strip(), values))
    for field, values in pairs:
        if field in OTHER_OPTION_OF_FIELD:
            raise ConfigurationError(f"{source}: {field} cannot be set here; use {OTHER_OPTION_OF_FIELD[field]}")
        if field not in TYPE_OF_PLAN_FIELD and field not in TrialFields.model_fields:
            hint = near(field, TrialFields.model_fields) or "; docs/fields.md lists all"
            raise ConfigurationError(f"{source}: {shown(field)} is not a field of a trial{hint}")
        yield field, values


def _values(field: str, value: Any, source: str) -> tuple[Any, ...]:
    """Parse a comma list, a YAML list or one value by the trial's rules, without duplicates."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    if not parts:
        raise ConfigurationError(f"{_where(field, source)} has no values")
    return tuple(
        dict.fromkeys(_typed(field, part.strip() if isinstance(part, str) else part, source) for part in parts)
    )


def _typed(field: str, value: Any, source: str) -> Any:
    if value == "":
        raise ConfigurationError(f"{_where(field, source)} has an empty value")
    known = TYPE_OF_PLAN_FIELD.get(field, field)
    if isinstance(value, bool) and TrialFields.model_fields[known].annotation is not bool:
        raise ConfigurationError(f"{_where(field, source)} {value}: input should not be true or false")
    if _is_too_large(value):
        raise ConfigurationError(f"{_where(field, source)} is larger than any 64-bit number")
    try:  # only the value by itself; the plan validates combinations
        typed = getattr(TrialFields.model_validate({known: value}), known)
    except ValidationError as error:
        line = explain(error)[0].removeprefix(f"{known} ")
        raise ConfigurationError(f"{_where(field, source)} {clipped(line)}") from None
    if _is_too_large(typed):
        raise ConfigurationError(f"{_where(field, source)} is larger than any 64-bit number")
    if isinstance(typed, float) and not math.isfinite(typed):
        raise ConfigurationError(f"{_where(field, source)} {value!r}: input should be a finite number")
    return typed


def _where(field: str, source: str) -> str:
    """Return the option that sets a field, or where else it is set and its name."""
    option = OPTION_OF_FIELD.get(field)
    return source if option and source == f"--{option.name}" else f"{source}: {field}"


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= 2**63


def _out(configuration: Configuration) -> str:
    out = configuration.out or f"results/{configuration.study}"
    if "\0" in out:
        raise ConfigurationError(f"--out {shown(out)} is not a path")
    return out


def _read_yaml(path: str) -> dict[str, Any]:
    """Read the options in a YAML file, by their names on the command line. `_` and `-` are equivalent."""
    import yaml  # planning without a file starts faster

    try:
        refuse_endless(path, "--config")
        text = Path(path).read_text()
        content = yaml.safe_load(text)
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), path)
    except OSError as error:
        raise ConfigurationError(f"--config: {path} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}{position} is not valid YAML: {one_line(error.problem or error)}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{path} contains a {type(content).__name__}; expected a mapping of option names to values, "
            "such as `gpus: [1, 2]`"
        )
    options: dict[str, Any] = {}
    for key, value in content.items():
        option = key.replace("_", "-") if isinstance(key, str) else None
        if option not in FILE_KEYS:
            name = str(key).replace("-", "_")
            is_field = name in TrialFields.model_fields and name not in OTHER_OPTION_OF_FIELD
            hint = f"; it is a field of a trial: put {name} under `set:`" if is_field else near(option, FILE_KEYS)
            raise ConfigurationError(f"{path}: unknown key {shown(key)}{hint}; keys: {', '.join(FILE_KEYS)}")
        if option in options:
            raise ConfigurationError(f"{path}: {option} is given twice")
        options[option] = value
    return options


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """Refuse a repeated key in the file's mapping or in a nested one. YAML itself would keep only the last."""
    mappings = [node, *(value for _, value in node.value)] if node is not None and node.id == "mapping" else []
    for mapping in mappings:
        seen: set[str] = set()
        for key, _ in mapping.value if mapping.id == "mapping" else ():
            if key.id == "scalar" and key.value in seen:
                raise ConfigurationError(f"{path} line {key.start_mark.line + 1}: {clipped(key.value)} is given twice")
            seen.add(str(key.value))
