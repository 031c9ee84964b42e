"""What an exception in a rank says about a trial: did memory run out, and one line for people."""

import re
import traceback

from study.orchestrate.protocol import Failure
from study.store.redaction import redacted

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""colours of a terminal, which Ray puts into what it says"""


def describe_failure(rank: int, node_id: str, error: BaseException) -> Failure:
    """Describe an exception of this rank. Secrets are removed here, because only the rank's environment holds them."""
    return Failure(
        rank=rank,
        node_id=node_id,
        out_of_memory=is_out_of_memory(error),
        line=first_line(error),
        traceback=redacted("".join(traceback.format_exception(error))),
    )


def cause_of(error: BaseException | None) -> BaseException | None:
    """What Ray's errors wrap: they say no more than that a controller was stopped, a health check or a task failed."""
    for name in ("controller_failure", "health_check_failure", "cause"):
        error = getattr(error, name, None) or error
    return error


def first_line(error: BaseException | None) -> str:
    """An exception as one line: its kind and the first line of what it says.

    What Ray wraps is taken out of its wrapping, see `cause_of`.
    """
    error = cause_of(error)
    if error is None:
        return "no reason given"
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("Caught ") and " in DataLoader worker process " in lines[0]:
        # torch's own wrapping of what a loader process raised: the traceback's last line says what that was
        lines = [lines[-1].partition(": ")[2]]
    line = redacted(_ESCAPES.sub("", next(iter(lines), "")))
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: the device's, or the host's as Python or torch's allocator says it."""
    import torch  # here: only a process that met such an error needs it, and it has it already

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
