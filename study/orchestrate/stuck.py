"""Where ranks are when a trial does not end: the calls that each is in, and which of them keeps the others waiting."""

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

LIBRARY = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
SERVES = (str(Path(__file__).with_name("rank.py")), "serve")
"""file and function that every rank's thread of trials is in"""

Calls = Sequence[tuple[str, int, str]]
"""file, line and function of each call, the innermost last"""


def calls() -> list[tuple[str, int, str]]:
    """The calls that this process' thread of trials is in; none where no trial is served."""
    for frame in sys._current_frames().values():
        stack = calls_in(frame)
        if any((file, name) == SERVES for file, _, name in stack):
            return stack
    return []


def calls_in(frame: FrameType) -> list[tuple[str, int, str]]:
    """Return the calls that lead to a frame."""
    return [(call.filename, call.lineno or 0, call.name) for call in traceback.extract_stack(frame)]


def culprits(ranks: Sequence[Calls | None]) -> dict[int, str]:
    """Ranks that keep the others waiting, and what each does; none where all do alike, or nobody can tell.

    `ranks`: the calls of each rank, None where its process does not answer. Of those that answer, they are the ones that
    are in no call of torch.distributed or of the backward pass, where a rank waits for others, while another one is.
    """
    silent = {rank: "does not answer" for rank, calls in enumerate(ranks) if calls is None}
    if silent:
        return silent
    waiting = [_waits(calls or ()) for calls in ranks]
    if not any(waiting):
        return {}
    return {rank: f"is in {_innermost(calls or ())}" for rank, calls in enumerate(ranks) if not waiting[rank]}


def wait_for_each_other(ranks: Sequence[Calls | None]) -> bool:
    """Whether every rank, and there are several, answers and waits for others: then what is between them is to blame."""
    return len(ranks) > 1 and all(calls is not None and _waits(calls) for calls in ranks)


def _waits(calls: Calls) -> bool:
    return any("/torch/distributed/" in file or "/torch/autograd/" in file for file, *_ in calls)


def calls_as_text(rank: int, calls: Calls | None) -> str:
    """Return a rank's calls as text for a log."""
    lines = ["does not answer"] if calls is None else [f"{file}:{line} {name}" for file, line, name in calls]
    return f"rank {rank} at the time limit\n" + "".join(f"  {line}\n" for line in lines)


def _innermost(calls: Calls) -> str:
    """Name the innermost call outside of libraries."""
    outside = [call for call in calls if not call[0].startswith(LIBRARY)] or list(calls)
    if not outside:
        return "no trial"
    file, line, name = outside[-1]
    return f"{name} ({Path(file).name}:{line})"
