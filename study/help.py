"""What the command line says about itself: examples per command, its version, and completion for shells."""

import contextlib
import io
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer import Exit

ROOT = Path(__file__).resolve().parent.parent
MODULE = "python -m study.scaling"
SHELL_COMMAND = "scaling-study"
"""Name of the shell function that `completion_script` defines: shells complete names, not modules of Python."""

COMPLETE_VARIABLE = "_SCALING_STUDY_COMPLETE"
"""Variable with which the completion of a shell asks this program for words."""

SHELLS = ("bash", "zsh", "fish")

_EXAMPLES: Mapping[str, Sequence[tuple[str, str]]] = {
    "": (
        ("", "run the default study on this machine"),
        ("plan strong --gpus 1,2,4", "show the trials, their time and cost"),
        ("run --script train.py --gpus 1,2 -- --lr 0.1", "your own training script"),
        ("report", "rewrite the report of the latest results"),
        ("predict --gpus 64", "predict scaling to more GPUs"),
    ),
    "list": (("list", "the studies, their questions and needs"),),
    "plan": (
        ("plan", "the default study"),
        ("plan weak --gpus 1,2,4,8 --repeats 3", "other numbers of GPUs and repeats"),
        ("plan strong --price-per-gpu-hour 2.5", "with the cost of the GPUs"),
    ),
    "run": (
        ("run", "the default study, into results/default"),
        ("run weak --gpus 1,2,4 --model resnet50", "one model, on more and more GPUs"),
        ("run --batch-per-gpu 64,256 --out results/batch", "another results folder"),
        ("run --script train.py --gpus 1,2 -- --lr 0.1", "your own script, with its arguments"),
        ("run --workload my.py:build --gpus 1,2", "your own model, data and step"),
    ),
    "improve": (
        ("improve results/default", "what the study of that folder should change"),
        ("improve --model resnet50 --gpus 2 --budget 20m", "a model, within 20 minutes"),
        ("improve --script train.py --bind batch_per_gpu=--batch-size", "your own script"),
        ("improve --model vgg19 --goal cost --gpus 4,1,2", "on the cheapest of these numbers of GPUs"),
    ),
    "status": (
        ("status", "the most recent folder below results/"),
        ("status results/default --json", "for a program"),
    ),
    "show": (
        ("show", "the answer of the most recent results"),
        ("show results/default --json", "for a program"),
    ),
    "report": (
        ("report", "the most recent folder below results/"),
        ("report results/default --out /tmp/report", "into another folder"),
    ),
    "convert": (("convert IMAGES IMAGES/lmdb --storage lmdb", "one LMDB file instead of many JPEG files"),),
    "predict": (
        ("predict --gpus 8,64", "the most recent results, on 8 and 64 GPUs"),
        ("predict results/default --gpus 64 --interconnect 5:50", "with a stated network"),
    ),
    "compare": (
        ("compare results/before results/after", "is B faster than A?"),
        ("compare results/before results/after --fail-above 5%", "for CI"),
    ),
    "pack": (("pack results/default", "a few files instead of a folder per trial"),),
    "unpack": (("unpack results/default", "back to a folder per trial"),),
    "clean": (("clean", "free the space of ended studies"),),
    "doctor": (
        ("doctor", "check this machine"),
        ("doctor --address HOST:6379", "check a cluster"),
    ),
}


def examples(command: str) -> str:
    """Return the examples of a command as the epilog of its help; "" is the program itself."""
    lines = [f"  [dim]# {purpose}[/dim]\n  {f'{MODULE} {line}'.rstrip()}" for line, purpose in _EXAMPLES[command]]
    return "\n".join(["[bold]Examples:[/bold]", *lines])


def answer_with(text: Callable[[Any], str]) -> Callable[[Any], None]:
    """Return the callback of an option that prints a text and ends the program."""

    def show(value: Any) -> None:
        if value:
            print(text(value))
            raise Exit

    return show


def names_command(arguments: Sequence[str]) -> bool:
    """Return False if `run` is left out."""
    own_options = ("-h", "--help", "--version", "--completion")
    return bool(arguments) and (not arguments[0].startswith("-") or arguments[0].split("=")[0] in own_options)


@contextlib.contextmanager
def trimmed(arguments: Sequence[str]) -> Iterator[None]:
    """Print help that is not for a terminal without the blanks that fill its lines. Other output is left as it is."""
    if sys.stdout.isatty() or not {"-h", "--help"} & {*arguments}:
        yield
        return
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def version_line() -> str:
    """Return the program's name, version and commit."""
    from study.store.environment import git_state

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    git = git_state()
    commit = f"commit {git['commit'][:12]}" if git["commit"] else "commit unknown"
    return f"{SHELL_COMMAND} {version}, {commit}{' with uncommitted changes' if git['dirty'] else ''}"


def completion_script(shell: str) -> str:
    """Return shell code that defines the command `scaling-study`, with completion of its options and values."""
    from typer.completion import get_completion_script

    program = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} -m study.scaling"
    script = get_completion_script(prog_name=SHELL_COMMAND, complete_var=COMPLETE_VARIABLE, shell=shell)
    # `env` runs programs, not functions of the shell; the environment may be given before the program
    for name in ("complete_bash $1", f"complete_zsh {SHELL_COMMAND}"):
        script = script.replace(name, f"{name.split()[0]} {program}")
    script = script.replace(f"(commandline -cp) {SHELL_COMMAND}", f"(commandline -cp) {program}")
    arguments = "$argv" if shell == "fish" else '"$@"'
    body = f"env {program} {arguments}"
    function = f"function {SHELL_COMMAND}; {body}; end" if shell == "fish" else f"{SHELL_COMMAND}() {{ {body}; }}"
    return f"{function}\n{script.removeprefix(f'#compdef {SHELL_COMMAND}').strip()}"
