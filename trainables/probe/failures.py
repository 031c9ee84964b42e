"""Say in one line why a script has no complete result."""

import errno
import re
import signal
from collections.abc import Mapping
from typing import Any

from trainables.probe.job import FailureKind

TAIL_BYTES = 64 * 1024
"""part of the log that is searched for a reason"""

MOST_QUOTED = 160
"""characters of a script's output in a line"""

ARGUMENT_EXIT_CODE = 2
"""argparse, click and most other parsers exit with this code"""

_WITHOUT_GPU = (
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA enabled",
    "ProcessGroupNCCL is only supported with GPUs",
    "nccl2 requires at least one CUDA device",
    "device_ids and output_device arguments only work with",
)
"""starts or parts of torch's messages for code that was written for GPUs and runs on a CPU"""

_OF_LAUNCHERS = re.compile("'(SLURM|OMPI_COMM|PMI|MV2_COMM)_[A-Z_]+'")
"""keys of variables that srun and mpirun set for each process"""

_ERROR_LINE = re.compile(r"^(?:\S+: )?error: .*|^[\w.]*(?:Error|Exception)\b: .*|^Usage: .*", re.IGNORECASE)


def exception(error: Mapping[str, Any]) -> tuple[FailureKind, str]:
    """Return kind and line of the exception that ended a script; `error` is what `child` wrote."""
    bases, text, place = error["bases"], error["text"], error["place"]
    at = f" ({place})" if place else ""
    if "StartsProcesses" in bases:
        return "starts_processes", (
            f"the script starts its ranks itself{at}; the study starts one process per rank, as torchrun does: call "
            "the function that trains one rank with RANK and LOCAL_RANK from the environment"
        )
    if "NotDataParallel" in bases:
        return "alone", f"{text}{at}"
    if "ImportError" in bases:
        return "import", "; ".join(filter(None, (f"{text}{at}", _import_hint(**error["module"]))))
    if "OutOfMemoryError" in bases or "MemoryError" in bases or "out of memory" in text.lower():
        return "out_of_memory", f"out of memory{at}: {text}"
    if error.get("errno") in (errno.EROFS, errno.EACCES, errno.EPERM) and "OSError" in bases:
        return "read_only", f"cannot write{at}: {text}; pass the script another output folder"
    if error["type"] == "SystemExit":
        return "exit", f"the script exited: {text}"
    hint = ""
    if any(part in text for part in _WITHOUT_GPU):
        hint = "; the script requires GPUs: run it on a host with GPUs, or pass its option for CPUs"
    elif error["type"] == "KeyError" and _OF_LAUNCHERS.fullmatch(text):
        hint = "; ranks have the variables of torchrun: let the script read RANK, LOCAL_RANK and WORLD_SIZE"
    return "error", f"{error['type']}: {text}{at}{hint}"


def _import_hint(package: str, installed: bool, is_here: bool) -> str:
    """Return what to do about a package that could not be imported; "" if the error does not name it."""
    if not package:
        return ""
    if is_here and not installed:
        return (
            f"{package} is in the working directory, from which a script imports nothing: give the script as a module "
            "(package.train for package/train.py), or add --env PYTHONPATH=."
        )
    if installed:
        return f"the script requires another version of {package}"
    return "install it in the environment of the study"


def exit_code(code: int, log: str) -> tuple[FailureKind, str]:
    """Return kind and line of a script that ended with a code other than 0 and without an exception."""
    reason = last_error(log)
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; the kernel kills processes when the host's memory is full" if name == "SIGKILL" else ""
        return "killed", f"the script was ended by {name}{hint}"
    if code == ARGUMENT_EXIT_CODE and reason:
        fix = "give the options of the study before --, and those of the script after it"
        if re.search("required.*--local[-_]rank", reason):  # which torch.distributed.launch passed
            fix = "torchrun sets LOCAL_RANK in the environment instead: let the script read it"
        return "arguments", f"{reason}; {fix}"
    return "exit", f"the script exited with code {code}" + (f": {reason}" if reason else "")


def last_error(log: str) -> str | None:
    """Return the last line of a log that states an error, or None."""
    for line in reversed(log.splitlines()):
        if _ERROR_LINE.match(line.strip()):
            return line.strip()
    return None


def alone(ranks: int, group_size: int) -> tuple[FailureKind, str]:
    """Return kind and line of a script of which each rank trains without the others."""
    if group_size > 1:
        found, fix = f"a process group of {group_size} ranks", "call torch.distributed.init_process_group with env://"
    else:
        found = "no process group"
        fix = (
            "for a script for one GPU add --add-ddp, or initialise torch.distributed and put the model into "
            "DistributedDataParallel (docs/own-code.md, 'A script for one GPU')"
        )
    return "alone", (
        f"{found} at the end of the measurement, but {ranks} ranks: each trains alone, so this is no data-parallel "
        f"training; {fix}, or pass the script's option for it"
    )


def too_few_steps(run: int, needed: int, starts_processes: bool, log: str = "") -> tuple[FailureKind, str]:
    """Return kind and line of a script that ended by itself before its last window. log: the end of its output."""
    if run:
        return "early", (
            f"the script ended after {run} optimizer steps, but {needed} are needed; let it run longer, or lower the "
            "steps per window"
        )
    hint = "; it starts processes, in which the steps cannot be seen" if starts_processes else ""
    lines = [line.strip() for line in log.splitlines() if any(map(str.isalnum, line))]
    said = f', and its last output was "{lines[-1][:MOST_QUOTED]}"' if lines else ""
    return "no_step", (
        f"the script ended without a step of a torch optimizer{said}{hint}; if it has its own optimizer, mark the "
        "steps with `for batch in steps(loader):`"
    )


def no_progress(run: int, seconds: float) -> tuple[FailureKind, str]:
    """Return kind and line of a script that did not step in time."""
    if run:
        return "step_timeout", f"no optimizer step for {seconds:.0f} s after step {run}"
    return "start_timeout", f"no optimizer step within {seconds:.0f} s after the start"
