"""The options that `plan` and `run` share, declared once: on the command line, in a configuration file, in the report."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from typer import Argument, Option

from trainables.registry import PRECISIONS

_AXES, _RUN, _OUTPUT = "What to measure (comma lists)", "How to run it", "Output"

Json = Annotated[bool, Option("--json", help="Machine-readable output.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress, only results and errors.", rich_help_panel=_OUTPUT)]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an internal error.", rich_help_panel=_OUTPUT)]
Address = Annotated[
    str | None,
    Option(
        metavar="auto|local|HOST:PORT",
        help="Ray cluster; left out: RAY_ADDRESS, else a running cluster that this host belongs to, else a local Ray.",
        rich_help_panel=_RUN,
    ),
]


@dataclass(frozen=True)
class StudyOption:
    """One option of `plan` and `run`.

    name: on the command line without dashes, and in a configuration file. field: the field of a trial that it sets; an
    axis takes a comma list of its values. setting: the field of a `Configuration` that it sets instead. derived: fields
    of a trial that follow from it. in_file: whether it is also a key of a configuration file.
    """

    name: str
    help: str
    metavar: str | None = None
    type: Any = str
    panel: str = _RUN
    field: str = ""
    is_axis: bool = False
    setting: str = ""
    derived: tuple[str, ...] = ()
    in_file: bool = True

    @property
    def usage(self) -> str:
        """How it is written on the command line, such as `--repeats N`."""
        return f"--{self.name} {self.metavar}"

    @property
    def parameter(self) -> inspect.Parameter:
        """It as a parameter of a command, as typer reads one."""
        name = "set_" if self.name == "set" else self.name.replace("-", "_")
        default = False if self.type is bool else None
        if self.name == "study":
            declared: Any = Argument(metavar=self.metavar, help=self.help, show_default=False)
        else:
            names = ("--set",) if self.name == "set" else (f"--{self.name}",) if self.type is bool else ()
            declared = Option(*names, metavar=self.metavar, help=self.help, rich_help_panel=self.panel)
        kind = bool if self.type is bool else self.type | None
        return inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, declared]
        )


def _axis(name: str, field: str, help: str) -> StudyOption:
    return StudyOption(name, help, "LIST", panel=_AXES, field=field, is_axis=True)


STUDY_OPTIONS = (
    StudyOption("study", "One of `list`; left out: default.", "STUDY", setting="study"),
    _axis("gpus", "world_size", "GPUs, one rank each; on a machine without any, CPU ranks."),
    _axis("nodes", "nodes", "Hosts, with equally many ranks on each; left out: as few as fit."),
    _axis("batch-per-gpu", "batch_per_gpu", "Samples per rank and step."),
    _axis("global-batch", "global_batch", "Samples per step of all ranks together, instead of --batch-per-gpu."),
    _axis("loader-workers", "loader_workers", "Loader processes per rank; 0 loads in the rank itself."),
    _axis("precision", "precision", f"{', '.join(PRECISIONS)}."),
    _axis("model", "model", "Networks, such as resnet50."),
    _axis(
        "interconnect", "interconnect",
        "auto, no_p2p, socket: slow ones are emulated, by forbidding NCCL direct copies, then shared memory.",
    ),
    _axis("steps", "steps", "Steps of a timed window."),
    _axis("epochs", "epochs", "Train for so many epochs, with validation after each, instead of timed windows."),
    _axis("target-accuracy", "target_accuracy", "Share of validation samples, such as 0.93, at which training ends early."),
    _axis("seed", "seed", "Seeds of weights and data; the first also orders the trials."),
    StudyOption("set", "Any other field of a trial; may be repeated.", "FIELD=LIST", list[str], _AXES),
    StudyOption("repeats", "Repetitions of every combination.", "N", int, _AXES, "repeat", setting="repeats"),
    StudyOption(
        "workload", "Your own model and data: a function in a file.", "FILE.py:NAME", panel=_AXES, field="workload",
        derived=("workload_digest",),
    ),
    StudyOption(
        "data-dir",
        "Folder with images by class, Tiny-ImageNet, a converted set, Fashion-MNIST, CIFAR-10, or reviews as JSON Lines.",
        "DIR", panel=_AXES, field="data_dir",
    ),
    StudyOption(
        "profile", "Keep a profiler trace of rank 0; of others: --set profile_ranks=0+3, or all.", type=bool, panel=_AXES
    ),
    StudyOption("out", "Results folder or URI; left out: results/STUDY.", "DIR", setting="out"),
    StudyOption("config", "YAML file with these options, under the same names.", "FILE", in_file=False),
    StudyOption("print-config", "Print the YAML that runs the same again, and stop.", type=bool, in_file=False),
    StudyOption("address", "", setting="address"),
    StudyOption("isolate", "A fresh worker group for every trial; slow.", type=bool, setting="isolate"),
    StudyOption(
        "trial-timeout", "A trial, or an epoch of a training, that takes longer is ended; left out: 600.", "SECONDS", float,
        setting="trial_timeout_s",
    ),
    StudyOption(
        "max-concurrent", "So many trainings on one GPU each run side by side, and are marked; timed trials never do.", "N",
        int, setting="max_concurrent",
    ),
    StudyOption("price-per-gpu-hour", "For the estimated cost.", "PRICE", float, setting="price_per_gpu_hour"),
    StudyOption(
        "goal", "What the report names the best configuration for: throughput, time-to-accuracy, cost.", "GOAL",
        setting="goal",
    ),
)  # fmt: skip

FILE_KEYS = tuple(option.name for option in STUDY_OPTIONS if option.in_file)

OPTION_OF_FIELD: Mapping[str, StudyOption] = {
    field: option for option in STUDY_OPTIONS for field in (option.field, *option.derived) if field
}
"""fields of a trial with an option of their own"""


def recorded_fields() -> dict[str, dict[str, Any]]:
    """What results say of the fields of a trial, for reports: kind, default, and so on, see `analysis.load.fields.FieldFacts`."""
    from trainables.fields import FIELD_FACTS, FieldKind, TrialFields, only_with, reference_order

    kinds = get_args(FieldKind)
    return {
        name: {
            "kind": facts.kind,
            "default": TrialFields.model_fields[name].default,
            "order": reference_order(name) if facts.table else [],
            "table": facts.table,
            "option": _option_of(name),
            "only_with": only_with(name),
        }
        for name, facts in sorted(FIELD_FACTS.items(), key=lambda item: kinds.index(item[1].kind))
    }


def _option_of(field: str) -> str | None:
    """The option that sets a field of a trial: its own, else `set`; None if the study sets it."""
    option = OPTION_OF_FIELD.get(field)
    if option is None:
        return "set"
    return option.name if field == option.field and not option.setting else None


_SHARED = {"address": Address, "quiet": Quiet, "debug": Debug}
"""options that other commands have too"""


def _parameters() -> list[inspect.Parameter]:
    by_name = {option.parameter.name: option.parameter for option in STUDY_OPTIONS}
    for name, annotation in _SHARED.items():
        default = None if name == "address" else False
        by_name[name] = inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
    return list(by_name.values())


def with_study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that takes `**options` the parameters of all `STUDY_OPTIONS` before its own."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [parameter for parameter in _parameters() if parameter.name not in {p.name for p in own}]
    command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a user gave and that decide the study, under their names on the command line."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in options.items()}
    return {
        name: value for name, value in named.items() if name in FILE_KEYS and value is not None and value is not False
    }
