"""Measure how data-parallel training scales on this machine or cluster, what limits it, and what to change.

Examples:

  python -m study.scaling                                  run the default study on this machine

  python -m study.scaling plan strong --gpus 1,2,4         show which trials would run, and for how long

  python -m study.scaling run --model resnet50 --batch-per-gpu 64,256 --out results/resnet50

  python -m study.scaling report results/resnet50          rewrite the report from stored results

  python -m study.scaling predict results/resnet50 --gpus 64   predict scaling to more GPUs
"""

import json
import shlex
import shutil
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from study.errors import DOES_NOT_FIT, DONE, INTERRUPTED, NO_CLUSTER, SOME_FAILED, USAGE, ConfigurationError, shown
from study.options import Address, Debug, Json, Quiet, with_study_options

app = typer.Typer(
    help=__doc__,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

REPEATABLE_OPTIONS = ("--set", "--vary", "--bind", "--env")

PackedInto = Annotated[str | None, typer.Argument(metavar="DIR2", help="New folder; left out: in place.")]
Directory = Annotated[str, typer.Argument(metavar="DIR", help="Results folder of a study, or its URI.")]


@app.command("list")
def list_studies(json_: Json = False) -> None:
    """List the studies and the question that each answers."""
    from study.studies.basic import STUDIES

    questions = {name: study([]).question for name, study in STUDIES.items()}
    if json_:
        return _print_json([{"name": name, "question": question} for name, question in questions.items()])
    indent = max(map(len, questions)) + 2
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize  # no wrapping in a pipe
    for name, question in questions.items():
        print(textwrap.fill(f"{name:{indent}}{question}", columns, subsequent_indent=" " * indent))


@app.command()
@with_study_options
def plan(json_: Json = False, **options: Any) -> int:
    """Show every trial with its status, and the remaining time and cost, without running anything."""
    from study.cli import commands as session
    from study.cli import terminal as display

    configuration = session.configure(options)
    prepared = session.prepare(configuration, session.planning_nodes(configuration.address))
    if options["print_config"]:
        print(prepared.yaml, end="")
        return DONE
    if json_:
        _print_json(session.plan_as_json(prepared))
    else:
        display.print_plan(prepared)
    session.print_warnings(prepared)
    session.print_what_does_not_fit(prepared)
    return DOES_NOT_FIT if prepared.does_not_fit else DONE


@app.command("run")
@with_study_options
def run_study(**options: Any) -> int:
    """Run the trials that the results folder lacks, then write the report."""
    from study.cli import commands as session

    configuration = session.configure(options)
    if options["print_config"]:
        print(session.prepare(configuration, session.planning_nodes(configuration.address)).yaml, end="")
        return DONE
    return session.run(configuration, command=_command(), quiet=options["quiet"], strict=options["strict"])


@app.command()
def status(directory: Directory, json_: Json = False, debug: Debug = False) -> None:
    """Show the state of a results folder: trial counts, failures with reason and log, remaining trials."""
    from study.cli import terminal as display
    from study.cli.status import status_of

    found = status_of(directory)
    if json_:
        return _print_json(found)
    display.print_status(found)


@app.command()
def report(
    directory: Directory,
    out: Annotated[str | None, typer.Option(metavar="DIR2", help="Output folder. Default: DIR/report.")] = None,
    debug: Debug = False,
) -> None:
    """Rewrite tables, figures and report from stored results."""
    from analysis.report.report import write_report

    print(write_report(directory, out).path)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Image folder, Tiny-ImageNet, or a converted data set.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="New folder to create.")],
    storage: Annotated[str, typer.Option(metavar="FORMAT", help="Any of jpeg, lmdb, arrow_jpeg, arrow_raw.")],
    image_size: Annotated[
        int, typer.Option(metavar="N", min=8, max=4096, help="For arrow_raw: the image_size that trials will use.")
    ] = 224,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """Convert an image folder to another storage format and verify it. Resumes if interrupted."""
    from study.cli.convert import convert_set

    try:
        manifest = convert_set(source, destination, storage, image_size, quiet=quiet)
    except KeyboardInterrupt:
        print(f"interrupted; resume with: {_command()}", file=sys.stderr)
        return INTERRUPTED
    if json_:
        _print_json(manifest)
        return DONE
    for name, split in manifest["splits"].items():
        print(f"{destination}: {name}: {split['count']:,} images in {storage}, verified, sha256 {split['sha256']}")
    print(f"use it with: --data-dir {shlex.quote(destination)} --set storage={storage}")
    return DONE


@app.command()
def predict(
    directory: Directory,
    gpus: Annotated[
        str, typer.Option(metavar="LIST", help="Numbers of GPUs (or CPU ranks) to predict for, such as 8 or 16,64.")
    ],
    interconnect: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="A measured interconnect (auto, no_p2p, socket), or LATENCY_US:BANDWIDTH_GB_S, such as 5:50.",
        ),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price for the predicted cost.")
    ] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            metavar="GOAL", help="Criterion for the best configuration: throughput, time-to-accuracy or cost."
        ),
    ] = None,
    laws: Annotated[
        bool, typer.Option("--laws", help="Show the candidate laws, their weights and errors too.")
    ] = False,
    details: Annotated[bool, typer.Option("--details", help="Show every column and note too.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Predict step time, efficiency and cost for more GPUs than measured, with intervals and held-out error."""
    from study.cli import terminal as display
    from study.cli.predict import outlook

    found = outlook(directory, gpus, interconnect, price_per_gpu_hour, goal)
    if json_:
        return _print_json(found.as_json)
    display.print_outlook(found, details, laws)


@app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="DIR_A", help="Results folder or URI of the baseline.")],
    after: Annotated[str, typer.Argument(metavar="DIR_B", help="Results folder or URI to compare with the baseline.")],
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with code 1 if a configuration lost more throughput than this, such as 5%, according to the "
            "entire 95 % interval of its ratio, or if it failed in DIR_B only. Otherwise exit with code 3 if one is "
            "missing in DIR_B, if none can be judged, or if one that cannot be judged seems to have lost more.",
        ),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="With --fail-above: accept configurations that DIR_B lacks.")
    ] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text, or markdown for a comment on a pull request.")
    ] = "text",
    json_: Json = False,
    debug: Debug = False,
) -> int:
    """Compare the trials of two results folders: ratios with intervals, regressions first."""
    from analysis.compare.folders import compare as compare_folders
    from study.cli import compare as comparison

    if format_ not in ("text", "markdown"):
        raise ConfigurationError(f"--format: unknown format {shown(format_)}; allowed: text, markdown")
    threshold = comparison.share(fail_above) if fail_above is not None else None
    found = compare_folders(before, after)
    if json_:
        _print_json(comparison.as_json(found, threshold))
    elif format_ == "markdown":
        print(comparison.markdown(found, before, after, threshold))
    else:
        comparison.show(found, before, after, threshold)
    return comparison.exit_code(found, threshold, allow_missing)


@app.command()
def pack(
    directory: Directory,
    out: PackedInto = None,
    drop_traces: Annotated[
        bool, typer.Option("--drop-traces", help="In place: remove profiler traces, which a packed folder cannot hold.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Pack a results folder into at most seven files. All commands except run read them; unpack restores the folder."""
    from study.store.packing import pack as pack_folder

    packed = pack_folder(directory, out, drop_traces=drop_traces)
    if packed.left_out_line:
        print(packed.left_out_line, file=sys.stderr)
    print(f"{packed.out}: {packed.trials} trials packed and verified")


@app.command()
def unpack(directory: Directory, out: PackedInto = None, debug: Debug = False) -> None:
    """Restore the results folder, with a folder per trial, of which pack made a few files."""
    from study.store.packing import unpack as unpack_folder

    unpacked = unpack_folder(directory, out)
    print(f"{unpacked.out}: {unpacked.trials} trials unpacked and verified")


@app.command()
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
    arguments = _with_script_arguments(arguments)
    if option := _repeated_option(arguments):
        print(f"error: {option} is given twice; give it once, a list with commas between its values", file=sys.stderr)
        return USAGE
    is_command = arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"))
    try:
        return int(
            app(
                list(arguments) if is_command else ["run", *arguments],
                standalone_mode=False,
                prog_name="python -m study.scaling",
            )
            or 0
        )
    except KeyboardInterrupt:
        print(f"interrupted; resume with: {_command()}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - users see one line, not a traceback
        return _report_error(error, arguments)


def _repeated_option(arguments: Sequence[str]) -> str | None:
    """Return an option that is given twice, although the parser would use only its last value."""
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return next((name for name in names if name not in REPEATABLE_OPTIONS and names.count(name) > 1), None)


def _with_script_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those after `--`, which are for the user's script, as one option."""
    if "--" not in arguments:
        return list(arguments)
    end = list(arguments).index("--")
    return [*arguments[:end], f"--script-arguments={shlex.join(arguments[end + 1 :])}"]


def _report_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error in one line and return its exit code. The traceback of an internal error goes to a file."""
    if hasattr(error, "format_message"):  # an error of click, which typer bundles or imports depending on its version
        print(f"error: {error.format_message().rstrip('.')}; see --help", file=sys.stderr)
        return USAGE
    # only of the class itself: an error that Ray raises from another process also inherits from its cause
    exit_code: int | None = vars(type(error)).get("exit_code")
    if exit_code is not None:
        print(f"error: {error}", file=sys.stderr)
        return exit_code
    if "--debug" in arguments:
        traceback.print_exception(error)
        return SOME_FAILED
    with tempfile.NamedTemporaryFile("w", prefix="scaling-study-error-", suffix=".log", delete=False) as file:
        traceback.print_exception(error, file=file)
    first_line = next(iter(str(error).splitlines()), "")
    print(f"internal error: {type(error).__name__}: {first_line}; traceback in {file.name}", file=sys.stderr)
    return SOME_FAILED


def _command() -> str:
    return shlex.join(["python", "-m", "study.scaling", *sys.argv[1:]])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
