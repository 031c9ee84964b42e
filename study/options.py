"""The options of `plan` and `run`, declared once for the command line, configuration files and the report."""

import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from typer import Argument, Option

from study.errors import shown
from trainables.registry import MODELS, PRECISIONS

_FIRST, _AXES = "What to measure (comma lists)", "What else to vary (comma lists)"
_RUN, _OUTPUT = "How to run it", "Output"
_OWN = "Your own training code"

# metavar: Typer's help would show a flag as `--json <bool>`
Json = Annotated[bool, Option("--json", metavar="", help="Print JSON.", rich_help_panel=_OUTPUT)]
Quiet = Annotated[
    bool, Option("--quiet", "-q", metavar="", help="Print only results and errors.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool, Option("--debug", metavar="", help="Show the traceback of an internal error.", rich_help_panel=_OUTPUT)
]
Address = Annotated[
    str | None,
    Option(
        metavar="auto|local|HOST:PORT",
        help="Ray cluster. Default: RAY_ADDRESS, else the running cluster of this host, else a new local Ray.",
        rich_help_panel=_RUN,
    ),
]


@dataclass(frozen=True)
class StudyOption:
    """One option of `plan` and `run`."""

    name: str
    """Name on the command line without dashes, and in a configuration file."""
    help: str
    metavar: str | None = None
    type: Any = str
    panel: str = _RUN
    field: str = ""
    """Field of a trial that the option sets."""
    is_axis: bool = False
    """True if the option takes a comma-separated list of values."""
    setting: str = ""
    """Field of a `Configuration` that the option sets instead."""
    derived: tuple[str, ...] = ()
    """Fields of a trial that follow from this option's value."""
    hidden: bool = False
    """True if `--help` does not list it."""
    in_file: bool = True
    """True if the option is also a key of a configuration file."""
    words: Callable[[], Iterable[str]] = tuple
    """Returns values that the completion of a shell suggests."""

    @property
    def usage(self) -> str:
        """Option and metavar, such as `--repeats N`."""
        return f"--{self.name} {self.metavar}" if self.metavar else f"--{self.name}"

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as a parameter of a typer command."""
        name = "set_" if self.name == "set" else self.name.replace("-", "_")
        default = False if self.type is bool else None
        if self.name == "study":
            declared: Any = Argument(
                metavar=self.metavar, help=self.help, show_default=False, autocompletion=self._completions
            )
        else:
            names = ("--set",) if self.name == "set" else (f"--{self.name}",) if self.type is bool else ()
            declared = Option(
                *names, metavar="" if self.type is bool else self.metavar, help=self.help,
                rich_help_panel=self.panel, hidden=self.hidden,
                autocompletion=self._completions if self.type is str else None,
            )  # fmt: skip
        kind = bool if self.type is bool else self.type | None
        return inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, declared]
        )

    def _completions(self, incomplete: str) -> list[str]:
        """Return the words that continue the last value of an incomplete comma list."""
        given, comma, last = incomplete.rpartition(",")
        return [f"{given}{comma}{word}" for word in self.words() if word.startswith(last)]


def _axis(name: str, field: str, help: str, panel: str = _AXES, words: Iterable[str] = ()) -> StudyOption:
    return StudyOption(name, help, "LIST", panel=panel, field=field, is_axis=True, words=lambda: words)


def _studies() -> Iterable[str]:
    from study.studies.basic import STUDIES

    return STUDIES


def _goals() -> Iterable[str]:
    from analysis.read.study_record import GOALS

    return GOALS


STUDY_OPTIONS = (
    StudyOption("study", "A study from `list`. Default: default.", "STUDY", setting="study", words=_studies),
    _axis("gpus", "world_size", "Number of GPUs, one rank each. Without GPUs: number of CPU ranks.", _FIRST),
    _axis("batch-per-gpu", "batch_per_gpu", "Samples per rank and step.", _FIRST),
    _axis("model", "model", "Models, such as resnet50.", _FIRST, MODELS),
    _axis("precision", "precision", f"Any of {', '.join(PRECISIONS)}.", _FIRST, PRECISIONS),
    StudyOption("repeats", "Repetitions of each combination.", "N", int, _FIRST, "repeat", setting="repeats"),
    _axis("nodes", "nodes", "Number of nodes, with the same number of ranks on each. Default: as few as possible."),
    _axis("global-batch", "global_batch", "Samples per step, summed over all ranks; replaces --batch-per-gpu."),
    _axis("tokens-per-step", "tokens_per_step", "Tokens per step of all ranks; batches are accumulated to reach them."),
    _axis("loader-workers", "loader_workers", "Loader processes per rank; 0 loads in the rank's own process."),
    _axis(
        "interconnect", "interconnect",
        "Any of auto, no_p2p, socket. no_p2p disables direct copies between GPUs in NCCL; socket also disables shared "
        "memory and InfiniBand.", words=("auto", "no_p2p", "socket"),
    ),
    _axis("steps", "steps", "Steps per timed window."),
    _axis("epochs", "epochs", "Train for N epochs with validation after each, instead of timing windows."),
    _axis("target-accuracy", "target_accuracy", "Validation accuracy, such as 0.93, at which training stops early."),
    _axis("seed", "seed", "Seeds of weights and data. The first also sets the order of trials."),
    StudyOption(
        "case", "Run only this case of a study of cases, such as 'weak, 8' of gpt2-scaling. May be repeated.", "NAME",
        list[str], _AXES, setting="case",
    ),
    StudyOption("set", "Set any other field of a trial. May be repeated.", "FIELD=LIST", list[str], _AXES),
    StudyOption(
        "workload", "Your own model and data: a function in a Python file.", "FILE.py:NAME", panel=_OWN,
        field="workload", derived=("workload_digest",),
    ),
    StudyOption(
        "script", "Your own training script, as torchrun would start it, or a module, as torchrun -m would. Its "
        "arguments follow after --.", "FILE.py", panel=_OWN, field="script", derived=("script_digest",),
        setting="script",
    ),
    StudyOption(
        "train-func", "Your own Ray Train function: train_func(config) in a Python file.", "FILE.py:NAME", panel=_OWN,
        field="train_function", derived=("train_function_digest",), setting="train_function",
    ),
    StudyOption(
        "vary", "Vary a flag of the script: --vary=--batch-size=16,32. --vary=--amp runs without and with the flag. "
        "For --train-func: an entry of its config. May be repeated.", "FLAG=LIST", list[str], _OWN,
        derived=("script_flags", "function_config"), setting="vary",
    ),
    StudyOption(
        "bind", "Pass a field of the trial as a flag: --bind batch_per_gpu=--batch-size. May be repeated.",
        "FIELD=FLAG", list[str], _OWN, derived=("bindings",), setting="bind",
    ),
    StudyOption(
        "env", "Vary or set an environment variable of the script. May be repeated.", "NAME=LIST", list[str], _OWN,
        derived=("script_env",), setting="env",
    ),
    StudyOption(
        "add-ddp", "Put the model of a script for one GPU into DDP, so that it runs on several. The script is not "
        "changed.", type=bool, panel=_OWN, field="add_ddp", setting="add_ddp",
    ),
    StudyOption("script-arguments", "", panel=_OWN, field="script_arguments", setting="script_arguments", hidden=True),
    StudyOption(
        "tokens-per-sample", "Tokens per sample of your own code, if its inputs do not show them.", "N", panel=_OWN,
        field="tokens_per_sample", is_axis=True,
    ),
    StudyOption(
        "data-dir",
        "Data folder: images by class, Tiny-ImageNet, a converted data set, Fashion-MNIST, CIFAR-10, or reviews as "
        "JSON Lines.",
        "DIR", panel=_AXES, field="data_dir",
    ),
    StudyOption(
        "profile", "Save a profiler trace of rank 0. For other ranks: --set profile_ranks=0+3, or all.", type=bool,
        panel=_AXES,
    ),
    StudyOption("out", "Results folder or URI. Default: results/STUDY.", "DIR", setting="out"),
    StudyOption("config", "YAML file with these options under the same names.", "FILE", in_file=False),
    StudyOption("print-config", "Print a YAML file that reproduces this run, and stop.", type=bool, in_file=False),
    StudyOption(
        "table", "Print one row per configuration after the summary.", type=bool, panel=_OUTPUT, in_file=False
    ),
    StudyOption("strict", "Refuse to run while this host is busy, instead of warning.", type=bool, in_file=False),
    StudyOption("address", "", setting="address"),
    StudyOption("isolate", "Start a new worker group for every trial. Slow.", type=bool, setting="isolate"),
    StudyOption(
        "trial-timeout", "Time limit per trial, or per epoch of a training trial. Default: 600.", "SECONDS", float,
        setting="trial_timeout_s",
    ),
    StudyOption(
        "max-concurrent",
        "Run up to N one-GPU training trials at the same time, and mark them. Timed trials always run alone.", "N", int,
        setting="max_concurrent",
    ),
    StudyOption(
        "price-per-gpu-hour", "Price of a GPU-hour, in any currency, for costs.", "PRICE", float,
        setting="price_per_gpu_hour",
    ),
    StudyOption(
        "goal", "Criterion for the best configuration in the report: throughput, time-to-accuracy or cost.", "GOAL",
        setting="goal", words=_goals,
    ),
)  # fmt: skip

LACKS: Mapping[str, Collection[str]] = {
    "improve": (
        "study", "case", "repeats", "goal", "max-concurrent", "profile", "print-config", "table",
    )
}  # fmt: skip
"""Options of `run` that a command does not have, by command. `improve` makes its own plan."""

FILE_KEYS = tuple(option.name for option in STUDY_OPTIONS if option.in_file)

OPTION_OF_FIELD: Mapping[str, StudyOption] = {
    field: option for option in STUDY_OPTIONS for field in (option.field, *option.derived) if field
}
"""Fields of a trial that have their own option."""


def recorded_fields() -> dict[str, dict[str, Any]]:
    """Return facts about each field of a trial, as study.json stores them; see `analysis.read.fields.FieldFacts`."""
    from trainables.field_facts import FieldKind
    from trainables.fields import FIELD_FACTS, TrialFields, only_with, reference_order

    kinds = get_args(FieldKind)
    return {
        name: {
            "kind": facts.kind,
            "default": TrialFields.model_fields[name].default,
            "order": reference_order(name) if facts.table else [],
            "table": facts.table,
            "option": _option_of(name),
            "only_with": only_with(name),
            "any_door": facts.any_door,
            "label": facts.label,
            "header": facts.header,
        }
        for name, facts in sorted(FIELD_FACTS.items(), key=lambda item: kinds.index(item[1].kind))
    }


def _option_of(field: str) -> str | None:
    """Return the option that sets a field of a trial: its own or `set`. None if only the study sets it."""
    option = OPTION_OF_FIELD.get(field)
    if option is None:
        return "set"
    return option.name if field == option.field and not option.setting else None


_SHARED = {"address": Address, "quiet": Quiet, "debug": Debug}
"""Options that other commands have too."""


def _parameters() -> list[inspect.Parameter]:
    by_name = {option.parameter.name: option.parameter for option in STUDY_OPTIONS}
    for name, annotation in _SHARED.items():
        default = None if name == "address" else False
        by_name[name] = inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
    return list(by_name.values())


def with_study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Insert `STUDY_OPTIONS`, except those in `LACKS`, before the parameters of a command that takes `**options`."""
    signature = inspect.signature(command)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    lacks = LACKS.get(command.__name__, ())
    left_out = {option.parameter.name for option in STUDY_OPTIONS if option.name in lacks}
    left_out |= {parameter.name for parameter in parameters}
    shared = [parameter for parameter in _parameters() if parameter.name not in left_out]
    command.__signature__ = inspect.Signature([*shared, *parameters])  # type: ignore[attr-defined]
    return command


def explicit_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration options that the user set, under their names on the command line."""
    by_name = {name.rstrip("_").replace("_", "-"): value for name, value in options.items()}
    return {
        name: value for name, value in by_name.items() if name in FILE_KEYS and value is not None and value is not False
    }


REPEATABLE_OPTIONS = tuple(f"--{option.name}" for option in STUDY_OPTIONS if option.type == list[str])


def refused_argument(arguments: Sequence[str]) -> str | None:
    """Return the error for an argument that no record can hold, or an option given twice; None if there is neither.

    The parser would use only the last value of an option that is given twice.
    """
    for argument in arguments:
        if "\0" in argument or argument.encode(errors="backslashreplace").decode() != argument:
            return f"argument {shown(argument)} is no valid UTF-8 text; rename the file"
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    twice = next((name for name in names if name not in REPEATABLE_OPTIONS and names.count(name) > 1), None)
    return twice and f"{twice} is given twice; give it once, a list with commas between its values"


def with_script_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those after `--`, which are for the user's script, as one option."""
    if "--" not in arguments:
        return list(arguments)
    end = list(arguments).index("--")
    return [*arguments[:end], f"--script-arguments={shlex.join(arguments[end + 1 :])}"]
