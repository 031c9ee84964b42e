"""Describe exceptions of ranks: one line for users, and whether memory ran out."""

import re
import traceback

from study.orchestrate.protocol import Failure
from study.store.redaction import LOG_LENGTH, redacted, redacted_line, redacted_log

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal colors, which Ray puts into its messages."""


_LOST_PEER = re.compile(r"Connection (closed|reset|refused)|[Bb]roken pipe|NCCL|TCPStore|[Rr]emote process")
"""Errors of ranks that lost the connection to another. That rank's own error tells why."""


class RankDeathError(Exception):
    """A rank's process died while its group started. The message says which process, and on which node."""


def describe_failure(rank: int, node_id: str, error: BaseException) -> Failure:
    """Describe an exception of this rank. Secrets are removed here, because only the rank's environment holds them."""
    line = first_line(error)
    return Failure(
        rank=rank,
        node_id=node_id,
        out_of_memory=is_out_of_memory(error),
        line=line,
        traceback=redacted_log("".join(traceback.format_exception(error))),
        is_consequence=is_lost_peer(line),
    )


def is_lost_peer(line: str) -> bool:
    """Return True if an error in one line means that another rank is gone, so that it is not the cause itself."""
    return bool(_LOST_PEER.search(line))


def cause_of(error: BaseException | None) -> BaseException | None:
    """Return the error that Ray's errors wrap. Ray's own only say that a controller, health check or task failed."""
    for name in ("controller_failure", "health_check_failure", "cause"):
        error = getattr(error, name, None) or error
    return error


def first_line(error: BaseException | None) -> str:
    """Return class and first line of an exception's message, without secrets. Unwraps errors of Ray, see `cause_of`."""
    error = cause_of(error)
    if error is None:
        return "no reason given"
    lines = redacted(str(error)[:LOG_LENGTH]).strip().splitlines()  # a secret may have several lines
    if lines and lines[0].startswith("Caught ") and " in DataLoader worker process " in lines[0]:
        # torch wraps errors of loader processes: the last line of the traceback is the original error
        lines = [lines[-1].partition(": ")[2]]
    line = _ESCAPES.sub("", next(iter(lines), ""))
    return redacted_line(f"{type(error).__name__}: {line}" if line else type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory ran out: the device's, or the host's according to Python or torch's allocator."""
    import torch  # only processes that raised such an error need it, and they have imported it already

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
