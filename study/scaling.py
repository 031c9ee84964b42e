"""Measure how data-parallel training scales on this machine or cluster, what limits it, and what to change."""

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.completion import completion_init

from study.arguments import (
    AllowMissing,
    Baseline,
    Budget,
    Compared,
    CompleteTable,
    ConvertedFrom,
    ConvertedTo,
    Details,
    Directory,
    DropTraces,
    FailAbove,
    Format,
    Goal,
    Improved,
    ImprovementGoal,
    KeepArithmetic,
    LatestDirectory,
    Laws,
    MostTrials,
    OfScaling,
    OutDirectory,
    PackedInto,
    PredictedLink,
    PredictedSizes,
    Price,
    StorageFormat,
    StoredSize,
)
from study.bytecode import keep_bytecode
from study.cli.process import OutputClosed, report_error, standard_streams, supervised
from study.errors import DOES_NOT_FIT, DONE, INTERRUPTED, NO_CLUSTER, USAGE, print_to_stderr
from study.help import (
    COMPLETE_VARIABLE,
    MODULE,
    SHELL_COMMAND,
    SHELLS,
    answer_with,
    completion_script,
    examples,
    names_command,
    trimmed,
    version_line,
)
from study.options import Address, Debug, Json, Quiet, refused_argument, with_script_arguments, with_study_options

app = typer.Typer(
    help=__doc__,
    epilog=examples(""),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MEASURE, _READ, _FILES = "Measure", "Read results", "Files and machine"

RESUMABLE = ("run", "improve", "convert")
SUPERVISED = ("run", "improve")
"""Commands that stay connected to a cluster, which may end them."""


def _subcommand(name: str, panel: str) -> Callable[..., Any]:
    """Return a decorator that declares a command. Ctrl-C ends the command with a line and an exit code."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def interruptible(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except KeyboardInterrupt:  # typer would end without a word
                resume = f"; resume with: {_command()}" if name in RESUMABLE else ""
                print_to_stderr(f"warning: interrupted{resume}")
                return INTERRUPTED

        return app.command(name, epilog=examples(name), rich_help_panel=panel)(interruptible)

    return declare


_VERSION = answer_with(lambda _: version_line())


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", help="Show version and commit.", callback=_VERSION, is_eager=True),
    ] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(SHELLS),
            help=f'Show code for a shell that defines the command scaling-study, with completion: put eval "$({MODULE} '
            '--completion bash)" into ~/.bashrc.',
            callback=answer_with(completion_script),
            is_eager=True,
        ),
    ] = None,
) -> None:
    pass


@_subcommand("list", _MEASURE)
def list_studies(json_: Json = False, quiet: Quiet = False) -> None:
    """List the studies, the question that each answers, what it needs here, and how long it takes."""
    from study.capacity import local_capacity
    from study.cli.terminal import print_studies
    from study.plan.needs import needs
    from study.studies.basic import STUDIES

    nodes = local_capacity()
    listed = {name: (study([]).question, needs(study, nodes)) for name, study in STUDIES.items()}
    if json_:
        rows = listed.items()
        return _print_json([{"name": name, "question": text, "needs": needs.__dict__} for name, (text, needs) in rows])
    print_studies(listed)


@_subcommand("plan", _MEASURE)
@with_study_options
def plan(json_: Json = False, **options: Any) -> int:
    """Show every trial with its status, and the remaining time and cost, without running anything."""
    from study.cli import commands as session
    from study.cli import terminal as display
    from study.cli.prepared import plan_as_json

    configuration = session.configure(options)
    prepared = session.prepare(configuration, session.planning_nodes(configuration.address))
    if options["print_config"]:
        print(prepared.yaml, end="")
        return DONE
    if json_:
        _print_json(plan_as_json(prepared))
    else:
        display.print_plan(prepared)
    session.print_warnings(prepared)
    session.print_what_does_not_fit(prepared)
    return DOES_NOT_FIT if prepared.does_not_fit else DONE


@_subcommand("run", _MEASURE)
@with_study_options
def run_study(**options: Any) -> int:
    """Run the trials that the results folder lacks, then write the report."""
    from study.cli import commands as session

    configuration = session.configure(options)
    if options["print_config"]:
        print(session.prepare(configuration, session.planning_nodes(configuration.address)).yaml, end="")
        return DONE
    quiet, strict, table = (options[name] for name in ("quiet", "strict", "table"))
    return session.run(configuration, command=_command(), quiet=quiet, strict=strict, table=table)


@_subcommand("improve", _MEASURE)
@with_study_options
def improve(
    directory: Improved = None,
    goal: ImprovementGoal = None,
    budget: Budget = None,
    trials: MostTrials = None,
    keep_arithmetic: KeepArithmetic = False,
    json_: Json = False,
    **options: Any,
) -> int:
    """Measure the advice: try changes one after another, combine those that gain, and verify the result."""
    from study.improve import session, start

    asked = start.request(options, directory, goal, budget, trials, keep_arithmetic)
    return session.improve(asked, _command(), quiet=options["quiet"], strict=options["strict"], as_json=json_)


@_subcommand("status", _READ)
def status(directory: LatestDirectory = None, json_: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show the state of a results folder: trial counts, the answer so far, failures with reason, remaining trials."""
    from study.cli import terminal as display
    from study.cli.progress import reading

    with reading(directory, quiet) as folder:
        from study.cli.status import card_so_far, status_of

        found = status_of(folder)
        card = None if json_ else card_so_far(folder, found)
    if json_:
        return _print_json(found)
    display.print_status(found, card)


@_subcommand("show", _READ)
def show(directory: LatestDirectory = None, json_: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Show the answer: does it scale, what is lost, what limits it, what to change, what would more GPUs bring."""
    from study.cli import terminal as display
    from study.cli.progress import reading

    with reading(directory, quiet) as folder:
        from analysis.report.card import as_json, card_at

        card = card_at(folder)
    if json_:
        return _print_json(as_json(card))
    display.print_card(card)


@_subcommand("report", _READ)
def report(
    directory: LatestDirectory = None, out: OutDirectory = None, quiet: Quiet = False, debug: Debug = False
) -> None:
    """Rewrite tables, figures and report from stored results."""
    from study.cli import terminal as display
    from study.cli.progress import reading

    with reading(directory, quiet, "writing the report") as folder:
        from analysis.report.report import write_report

        written = write_report(folder, out)
    if not quiet:
        display.print_card(written.card)
        print()
    print(written.path)


@_subcommand("convert", _FILES)
def convert(
    source: ConvertedFrom,
    destination: ConvertedTo,
    storage: StorageFormat,
    image_size: StoredSize = 224,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Convert an image folder to another storage format and verify it. Resumes if interrupted."""
    from study.cli.convert import convert_set, converted_lines

    manifest = convert_set(source, destination, storage, image_size, quiet=quiet)
    if json_:
        _print_json(manifest)
    else:
        print("\n".join(converted_lines(manifest, destination, storage)))
    return DONE


@_subcommand("predict", _READ)
def predict(
    gpus: PredictedSizes,
    directory: LatestDirectory = None,
    interconnect: PredictedLink = None,
    price_per_gpu_hour: Price = None,
    goal: Goal = None,
    laws: Laws = False,
    details: Details = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Predict step time, efficiency and cost for more GPUs than measured, with intervals and held-out error."""
    from study.cli import terminal as display
    from study.cli.progress import reading

    with reading(directory, quiet, "fitting the laws") as folder:
        from study.cli.predict import outlook

        found = outlook(folder, gpus, interconnect, price_per_gpu_hour, goal)
    if json_:
        return _print_json(found.as_json)
    display.print_outlook(found, details, laws)


@_subcommand("compare", _READ)
def compare(
    before: Baseline,
    after: Compared,
    fail_above: FailAbove = None,
    scaling: OfScaling = False,
    allow_missing: AllowMissing = False,
    table: CompleteTable = False,
    format_: Format = "text",
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Compare the trials of two results folders: ratios with intervals, regressions first."""
    from study.cli.progress import waiting

    with waiting("reading results", quiet):
        from study.cli import compare as comparison

        gate = comparison.gate(fail_above, scaling, allow_missing, format_)
        before, after, found = comparison.compared(before, after)
    comparison.show_as("json" if json_ else format_, found, before, after, gate, table)
    return comparison.exit_code(found, gate)


@_subcommand("pack", _FILES)
def pack(
    directory: Directory,
    out: PackedInto = None,
    drop_traces: DropTraces = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Pack a results folder into at most seven files. All commands except run read them; unpack restores the folder."""
    from study.cli.inputs import existing_results
    from study.store.packing import pack as pack_folder

    packed = pack_folder(existing_results(directory), out, drop_traces=drop_traces)
    if packed.left_out_line and not quiet:
        print_to_stderr(f"warning: {packed.left_out_line}")
    print(f"{packed.out}: {packed.trials} trials packed and verified")


@_subcommand("unpack", _FILES)
def unpack(directory: Directory, out: PackedInto = None, quiet: Quiet = False, debug: Debug = False) -> None:
    """Restore the results folder, with a folder per trial, of which pack made a few files."""
    from study.cli.inputs import existing_results
    from study.store.packing import unpack as unpack_folder

    unpacked = unpack_folder(existing_results(directory), out)
    print(f"{unpacked.out}: {unpacked.trials} trials unpacked and verified")


@_subcommand("clean", _FILES)
def clean(json_: Json = False, quiet: Quiet = False, debug: Debug = False) -> None:
    """Remove your temporary files on this host that no running study needs: of Ray, of scripts, logs. No results."""
    from study.cli import terminal as display
    from trainables.scratch import clean as remove_unused

    removed, kept = remove_unused()
    if json_:
        entries = {"removed": removed, "kept": kept}
        return _print_json({name: [entry.as_json for entry in found] for name, found in entries.items()})
    display.print_removed(removed, kept)


@_subcommand("doctor", _FILES)
def doctor(address: Address = None, json_: Json = False, quiet: Quiet = False, debug: Debug = False) -> int:
    """Check this machine and cluster, and suggest a fix for each problem: versions, GPUs, links, memory, disk, data."""
    from study.cli import terminal as display
    from study.cli.configuration import address_of
    from study.cli.doctor import examine

    checks = examine(address_of(address))
    if json_:
        _print_json([check.as_json for check in checks])
    else:
        display.print_checks(checks, only_problems=quiet)
    return NO_CLUSTER if any(check.name == "cluster" and check.status == "fail" for check in checks) else DONE


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code. Errors of the user are one line on stderr."""
    if COMPLETE_VARIABLE in os.environ:
        completion_init()
        app([], prog_name=SHELL_COMMAND, complete_var=COMPLETE_VARIABLE)  # ends the program
    keep_bytecode()
    arguments = with_script_arguments(arguments)
    if refusal := refused_argument(arguments):
        print_to_stderr(f"error: {refusal}")
        return USAGE
    with standard_streams():
        try:
            parsed = list(arguments) if names_command(arguments) else ["run", *arguments]
            with trimmed(arguments):
                exit_code = int(app(parsed, standalone_mode=False, prog_name=MODULE) or 0)
            sys.stdout.flush()
            return exit_code
        except OutputClosed as error:
            return error.exit_code
        except Exception as error:  # noqa: BLE001 - users see one line, not a traceback
            return report_error(error, arguments)


def _command() -> str:
    return shlex.join(["python", "-m", "study.scaling", *sys.argv[1:]])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


if __name__ == "__main__":
    own_arguments = sys.argv[1:]
    command = own_arguments[0] if names_command(own_arguments) else "run"
    sys.exit(supervised(main, own_arguments) if command in SUPERVISED else main(own_arguments))
