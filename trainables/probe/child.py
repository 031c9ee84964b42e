"""Run a script as `python SCRIPT ARGUMENTS` would, with the probe installed. Started by `launch.run_script`.

Everything of this project is imported before the script, and then forgotten: `study`, `analysis` and `trainables` are
names that a script may use for its own modules.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    PROJECT = str(Path(__file__).resolve().parent.parent.parent)
    sys.path[0] = PROJECT  # instead of this file's folder

import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import runpy
import signal
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.multiprocessing

from trainables.messages import one_line
from trainables.probe.added_ddp import SEARCHED_STEPS, AddedDdp
from trainables.probe.job import ScriptJob
from trainables.probe.loop import PROBE_MODULE
from trainables.probe.probe import Probe
from trainables.probe.session import measured

NAMES = ("study", "analysis", "trainables")
"""packages of this project, which a script may have as well"""

PROGRESS_FILE, RESULT_FILE, ERROR_FILE, END_FILE, TRACE_FILE = (
    "progress",
    "result.json",
    "error.json",
    "end",
    "trace.gz",
)
"""files in a job's folder: steps so far (a machine integer); what was measured; the script's exception; written by the
parent when all ranks have measured; gzipped Chrome trace"""

PR_SET_PDEATHSIG = 1
"""prctl(2)"""

END_POLL_S = 0.01


class StartsProcesses(RuntimeError):
    """The script starts its ranks itself."""


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Exits if that has happened."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(frozen=True)
class Folder:
    """The folder through which the script and the rank that started it communicate."""

    path: Path

    def write(self, name: str, content: str) -> None:
        """Write a file that appears complete."""
        temporary = self.path / f"{name}.part"
        temporary.write_text(content)
        temporary.rename(self.path / name)

    def progress(self) -> Callable[[int], None]:
        """Return a function that publishes the number of steps, without a system call."""
        with (self.path / PROGRESS_FILE).open("r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
        return lambda number: view.__setitem__(0, number)


def main(job_path: Path) -> NoReturn:
    """Run the job's script in this process, which ends with it."""
    end_with_parent(int(os.environ.pop("SCALING_STUDY_PARENT")))
    job, folder = ScriptJob.from_json(job_path.read_text()), Folder(job_path.parent)
    process = os.getpid()

    def save() -> None:
        folder.write(RESULT_FILE, json.dumps(measured(probe)))

    def on_end() -> None:
        save()
        if not probe.uses_loop:
            _exit_with_all_ranks(folder)

    progress = folder.progress()
    if job.add_ddp and int(os.environ["WORLD_SIZE"]) > 1:
        progress = _add_ddp(progress)
    probe = Probe(job.probe, folder.path / TRACE_FILE, progress, on_end)
    probe.install()
    _refuse_to_start_ranks()
    try:
        _run(job, probe, folder.path)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            _write_error(f"{end.code}\n")
            folder.write(ERROR_FILE, json.dumps({"type": "SystemExit", "text": end.code, "place": None, "bases": []}))
    except BaseException as error:  # noqa: BLE001 - the parent reports every exception
        _describe(error, job, folder)
        code = 1
    if os.getpid() != process:  # a forked process of the script
        os._exit(code)
    if not probe.ended:
        with contextlib.suppress(Exception):  # a device that failed cannot be read
            probe.remove()
            save()
    _flush()
    if code:
        os._exit(code)  # as the script has failed, no exit handler of its libraries may wait for other ranks
    sys.exit(0)


def _add_ddp(progress: Callable[[int], None]) -> Callable[[int], None]:
    """Put the script's modules into DDP in its first steps. Returns what is called with the number of steps."""
    added = AddedDdp()
    added.install()

    def next_step(number: int) -> None:
        progress(number)
        if number >= SEARCHED_STEPS:  # numbers are missing if several optimizers form a step
            added.end_search()

    return next_step


def _run(job: ScriptJob, probe: Probe, folder: Path) -> None:
    """Execute the script or module as `__main__`."""
    handle = types.ModuleType(PROBE_MODULE)
    vars(handle)["probe"] = probe
    sys.path.remove(PROJECT)
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]
    sys.modules[PROBE_MODULE] = handle
    # `from trainables.probe import steps`, unless the script has a module of that name. No other package of the project
    # is on the path: `benchmarks`, with an `__init__.py`, would replace a folder of the script without one.
    modules = folder / "modules"
    modules.mkdir()
    (modules / "trainables").symlink_to(Path(PROJECT, "trainables"))
    sys.path.append(str(modules))
    sys.argv = [job.script, *job.arguments]
    if job.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
        return
    script = Path(job.script).absolute()  # as Python does: a link's own path, but the folder that it points to
    sys.path.insert(0, str(script.resolve().parent))
    module = types.ModuleType("__main__")
    vars(module).update(__file__=str(script), __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), vars(module))  # noqa: S102 - the script that was asked for


def _refuse_to_start_ranks() -> None:
    """Make functions that start one process per GPU raise StartsProcesses."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StartsProcesses

    # the module has the name of its function: `torch.multiprocessing.spawn` is the latter
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            setattr(module, name, refuse)


def _exit_with_all_ranks(folder: Folder) -> NoReturn:
    """Wait until all ranks have measured, because the last step's communication may involve this process; then exit.

    The script gets no opportunity to continue: no `except BaseException` and no exit handler runs.
    """
    for worker in multiprocessing.active_children():
        worker.terminate()
    while not (folder.path / END_FILE).exists():
        time.sleep(END_POLL_S)
    _flush()
    os._exit(0)


def _flush() -> None:
    """Write out what the script printed. It may have closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _write_error(text: str) -> None:
    """Write to stderr. Many scripts replace `print` by one that is silent on all ranks but the first."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def _describe(error: BaseException, job: ScriptJob, folder: Folder) -> None:
    """Print the traceback without the frames of this file, and write the error's type, text and place."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    lines = [*traceback.format_list(own), *traceback.format_exception_only(error)]
    _write_error("".join(["Traceback (most recent call last):\n", *lines]))
    users = [frame for frame in own if _is_of_script(frame.filename, job)] or own
    place = f"{Path(users[-1].filename).name}:{users[-1].lineno}" if users else None
    description = {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "text": one_line(str(error).strip() or (users[-1].line if users else "") or error),  # `assert` may have no text
        "errno": getattr(error, "errno", None),
        "place": place,
        "module": _missing_module(error, job) if isinstance(error, ImportError) else None,
    }
    folder.write(ERROR_FILE, json.dumps(description))


def _is_of_script(filename: str, job: ScriptJob) -> bool:
    """Return True for the user's files: those next to the script, except packages that are installed there."""
    if filename.startswith("<"):  # <string>, <frozen os>
        return False
    folder = Path.cwd() if job.is_module else Path(job.script).resolve().parent
    path = Path(filename).resolve()
    return path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts


def _missing_module(error: ImportError, job: ScriptJob) -> dict[str, Any]:
    """Return the package that could not be imported: whether it is installed, and whether it is in this folder."""
    package = (error.name or "").partition(".")[0]
    installed = not isinstance(error, ModuleNotFoundError) or package in sys.modules
    is_here = not job.is_module and any(Path(name).exists() for name in (package, f"{package}.py"))
    return {"package": package, "installed": installed, "is_here": bool(package) and is_here}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
