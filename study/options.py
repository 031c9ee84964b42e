"""The options that `plan` and `run` share, declared once."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

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


def _axis(help: str, metavar: str = "LIST") -> Any:
    return Option(metavar=metavar, help=help, rich_help_panel=_AXES)


def _run(help: str, metavar: str | None = None) -> Any:
    return Option(metavar=metavar, help=help, rich_help_panel=_RUN)


def study_options(
    study: Annotated[
        str | None, Argument(metavar="STUDY", help="One of `list`; left out: default.", show_default=False)
    ] = None,
    gpus: Annotated[str | None, _axis("GPUs, one rank each; on a machine without any, CPU ranks.")] = None,
    nodes: Annotated[str | None, _axis("Hosts, with equally many ranks on each; left out: as few as fit.")] = None,
    batch_per_gpu: Annotated[str | None, _axis("Samples a rank and step.")] = None,
    global_batch: Annotated[
        str | None, _axis("Samples of all ranks together a step, in place of --batch-per-gpu.")
    ] = None,
    loader_workers: Annotated[str | None, _axis("Loader processes a rank; 0 loads in the rank itself.")] = None,
    precision: Annotated[str | None, _axis(f"{', '.join(PRECISIONS)}.")] = None,
    model: Annotated[str | None, _axis("Networks, such as resnet50.")] = None,
    interconnect: Annotated[
        str | None,
        _axis("auto, no_p2p, socket: slow ones are emulated, by forbidding NCCL direct copies, then shared memory."),
    ] = None,
    steps: Annotated[str | None, _axis("Steps of a timed window.")] = None,
    epochs: Annotated[
        str | None, _axis("Train for so many epochs, with validation after each, in place of timed windows.")
    ] = None,
    target_accuracy: Annotated[
        str | None, _axis("Share of validation samples, such as 0.93, at which training ends early.")
    ] = None,
    seed: Annotated[str | None, _axis("Seeds of weights and data; the first also orders the trials.")] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set", metavar="FIELD=LIST", help="Any other field of a trial; may be repeated.", rich_help_panel=_AXES
        ),
    ] = None,
    repeats: Annotated[int | None, _axis("Repetitions of every combination.", "N")] = None,
    workload: Annotated[str | None, _axis("Your own model and data: a function in a file.", "FILE.py:NAME")] = None,
    data_dir: Annotated[
        str | None,
        _axis(
            "Folder with images by class, Tiny-ImageNet, a converted set, Fashion-MNIST, CIFAR-10, or reviews as "
            "JSON Lines.",
            "DIR",
        ),
    ] = None,
    profile: Annotated[
        bool,
        Option(
            "--profile",
            help="Keep a profiler trace of rank 0; of others: --set profile_ranks=0+3, or all.",
            rich_help_panel=_AXES,
        ),
    ] = False,
    out: Annotated[str | None, _run("Results folder or URI; left out: results/STUDY.", "DIR")] = None,
    config: Annotated[str | None, _run("YAML file with these options, under the same names.", "FILE")] = None,
    print_config: Annotated[
        bool, Option("--print-config", help="Print the YAML that runs the same again, and stop.", rich_help_panel=_RUN)
    ] = False,
    address: Address = None,
    isolate: Annotated[
        bool, Option("--isolate", help="A fresh worker group for every trial; slow.", rich_help_panel=_RUN)
    ] = False,
    trial_timeout: Annotated[
        float | None, _run("A trial, or an epoch of a training, that takes longer is ended; left out: 600.", "SECONDS")
    ] = None,
    max_concurrent: Annotated[
        int | None,
        _run("So many trainings on one GPU each run side by side, and are marked; timed trials never do.", "N"),
    ] = None,
    price_per_gpu_hour: Annotated[float | None, _run("For the estimated cost.", "PRICE")] = None,
    goal: Annotated[
        str | None,
        _run("What the report names the best configuration for: throughput, time-to-accuracy, cost.", "GOAL"),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """A signature; see `with_study_options`."""


def with_study_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command that takes `**options` the parameters of `study_options` before its own."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [p for p in inspect.signature(study_options).parameters.values() if p.name not in {p.name for p in own}]
    command.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that a user gave and that decide the study, under their names on the command line."""
    aside = ("config", "print_config", "quiet", "debug")
    return {
        name.rstrip("_").replace("_", "-"): value
        for name, value in options.items()
        if name not in aside and value is not None and value is not False
    }
