"""How does data-parallel training scale here, what holds it back, what should change?

Examples:

  python -m study.scaling                                  the default study on what is here

  python -m study.scaling plan strong --gpus 1,2,4         what would run, and how long

  python -m study.scaling run --model resnet50 --batch-per-gpu 64,256 --out results/resnet50

  python -m study.scaling report results/resnet50          the report again, from the results alone

  python -m study.scaling predict results/resnet50 --gpus 64   what more GPUs would bring
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

from study.errors import DOES_NOT_FIT, DONE, INTERRUPTED, NO_CLUSTER, SOME_FAILED, USAGE
from study.options import Address, Debug, Json, Quiet, with_study_options

app = typer.Typer(
    help=__doc__,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

PackedInto = Annotated[str | None, typer.Argument(metavar="DIR2", help="New folder; left out: in place.")]
Directory = Annotated[str, typer.Argument(metavar="DIR", help="Results folder of a study, or its URI.")]


@app.command("list")
def list_studies(json_: Json = False) -> None:
    """The studies, each with the question that it answers."""
    from study.studies.basic import STUDIES

    questions = {name: study([]).question for name, study in STUDIES.items()}
    if json_:
        return _print_json([{"name": name, "question": question} for name, question in questions.items()])
    indent = max(map(len, questions)) + 2
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize  # a pipe gets lines whole
    for name, question in questions.items():
        print(textwrap.fill(f"{name:{indent}}{question}", columns, subsequent_indent=" " * indent))


@app.command()
@with_study_options
def plan(json_: Json = False, **options: Any) -> int:
    """Dry run: every trial with its status, the time and the money that is left to spend."""
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
    session.say_warnings(prepared)
    session.say_what_does_not_fit(prepared)
    return DOES_NOT_FIT if prepared.unfit else DONE


@app.command("run")
@with_study_options
def run_study(**options: Any) -> int:
    """Run what is missing in the results folder, then write the report."""
    from study.cli import commands as session

    configuration = session.configure(options)
    if options["print_config"]:
        print(session.prepare(configuration, session.planning_nodes(configuration.address)).yaml, end="")
        return DONE
    return session.run(configuration, command=_command(), quiet=options["quiet"])


@app.command()
def status(directory: Directory, json_: Json = False, debug: Debug = False) -> None:
    """What is in a results folder: counts, failures with reason and log, what is left."""
    from study.cli import terminal as display
    from study.cli.status import status_of

    found = status_of(directory)
    if json_:
        return _print_json(found)
    display.print_status(found)


@app.command()
def report(
    directory: Directory,
    out: Annotated[str | None, typer.Option(metavar="DIR2", help="Where to; left out: DIR/report.")] = None,
    debug: Debug = False,
) -> None:
    """Write tables, figures and report again, from the results alone."""
    from analysis.report.report import write_report

    print(write_report(directory, out).path)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Image folder, Tiny-ImageNet, or a converted set.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to make; not there yet.")],
    storage: Annotated[str, typer.Option(metavar="FORMAT", help="jpeg, lmdb, arrow_jpeg, arrow_raw.")],
    image_size: Annotated[
        int, typer.Option(metavar="N", min=8, max=4096, help="For arrow_raw: the image_size of the trials to come.")
    ] = 224,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> int:
    """An image folder into another storage format: verified; goes on where it was stopped."""
    from study.cli.convert import convert_set

    try:
        manifest = convert_set(source, destination, storage, image_size, quiet=quiet)
    except KeyboardInterrupt:
        print(f"interrupted; resume with: {_command()}", file=sys.stderr)
        return INTERRUPTED
    if json_:
        _print_json(manifest)
        return DONE
    for split, found in manifest["splits"].items():
        print(f"{destination}: {split}: {found['count']:,} images in {storage}, verified, sha256 {found['sha256']}")
    print(f"use it with: --data-dir {shlex.quote(destination)} --set storage={storage}")
    return DONE


@app.command()
def predict(
    directory: Directory,
    gpus: Annotated[str, typer.Option(metavar="LIST", help="GPUs (on CPUs: ranks) to predict, such as 8 or 16,64.")],
    interconnect: Annotated[
        str | None,
        typer.Option(
            metavar="X", help="A measured one (auto, no_p2p, socket), or LATENCY_US:BANDWIDTH_GB_S, such as 5:50."
        ),
    ] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(metavar="PRICE", help="For the predicted cost.")] = None,
    goal: Annotated[
        str | None, typer.Option(metavar="GOAL", help="Best configuration for throughput, time-to-accuracy or cost.")
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Step time, efficiency and cost on GPUs that were not measured, with intervals and held-out error."""
    from study.cli import terminal as display
    from study.cli.predict import outlook

    found = outlook(directory, gpus, interconnect, price_per_gpu_hour, goal)
    if json_:
        return _print_json(found.as_json)
    display.print_outlook(found)


@app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="DIR_A", help="Results folder, or its URI: what to compare with.")],
    after: Annotated[str, typer.Argument(metavar="DIR_B", help="Results folder, or its URI: what to judge.")],
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit code 1 where throughput is shown to have fallen by more than this, such as 5%: "
            "where the whole 95 % interval of its ratio lies below; 3 where nothing has repeats, and so no interval.",
        ),
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> int:
    """The same trials of two results folders side by side: ratios with intervals, regressions first."""
    from analysis.compare.folders import compare as compare_folders
    from study.cli import compare as comparison

    threshold = comparison.share(fail_above) if fail_above is not None else None
    found = compare_folders(before, after)
    if json_:
        _print_json(comparison.as_json(found, threshold))
    else:
        comparison.show(found, before, after, threshold)
    if threshold is not None and not found.judged:
        return DOES_NOT_FIT
    return SOME_FAILED if threshold is not None and len(found.regressions(threshold)) else DONE


@app.command()
def pack(
    directory: Directory,
    out: PackedInto = None,
    drop_traces: Annotated[
        bool, typer.Option("--drop-traces", help="In place: remove profiler traces, which a packed folder cannot hold.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Pack a results folder into at most six files. Every command but run reads them, and unpack restores the folder."""
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
    """What is wrong here, and the mend: versions, GPUs, links, memory, disk, cluster, data."""
    from study.cli import terminal as display
    from study.cli.configuration import address_of
    from study.cli.doctor import examine

    checks = examine(address_of(address))
    if json_:
        _print_json([check.__dict__ for check in checks])
    else:
        display.print_checks(checks, only_troubles=quiet)
    return NO_CLUSTER if any(check.name == "cluster" and check.status == "fail" for check in checks) else DONE


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and gives its exit code. A user's mistake is one line on stderr."""
    if twice := _given_twice(arguments):
        print(f"error: {twice} is given twice; give it once, a list with commas between its values", file=sys.stderr)
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
    except Exception as error:  # noqa: BLE001 - the last line of defence: no traceback reaches a user
        return _explained(error, arguments)


def _given_twice(arguments: Sequence[str]) -> str | None:
    """An option of which the parser would drop all but the last value; --set alone may be repeated."""
    names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return next((name for name in names if name != "--set" and names.count(name) > 1), None)


def _explained(error: Exception, arguments: Sequence[str]) -> int:
    """The exit code of an error, which is told in one line; an internal error's traceback goes to a file."""
    if hasattr(error, "format_message"):  # of the option parser, which typer has brought along or imported by turns
        print(f"error: {error.format_message().rstrip('.')}; see --help", file=sys.stderr)
        return USAGE
    # of the class itself: an error that Ray brings from another process inherits from its cause, and holds its traceback
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
