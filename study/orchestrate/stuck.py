"""Diagnose trials that do not end: the call stack of each rank, and the ranks that block the others."""

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

LIBRARY = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
SERVE_CALL = (str(Path(__file__).with_name("rank.py")), "serve")
"""File and function of the call that identifies a rank's main thread."""

Calls = Sequence[tuple[str, int, str]]
"""File, line and function of each call, innermost last."""


def calls() -> list[tuple[str, int, str]]:
    """Return the calls of this process' thread that serves trials, or an empty list without one."""
    for frame in sys._current_frames().values():
        stack = calls_in(frame)
        if any((file, name) == SERVE_CALL for file, _, name in stack):
            return stack
    return []


def calls_in(frame: FrameType) -> list[tuple[str, int, str]]:
    """Return the call stack of a frame."""
    return [(call.filename, call.lineno or 0, call.name) for call in traceback.extract_stack(frame)]


def culprits(ranks: Sequence[Calls | None]) -> dict[int, str]:
    """Return the ranks that block the others and what each is doing; empty if the stacks do not show it.

    `ranks` has the calls of each rank, None for a process that does not answer. If any does not answer, it blocks the
    others. Otherwise, a rank blocks the others if they wait in torch.distributed or the backward pass and it does not.
    """
    silent = {rank: "does not answer" for rank, calls in enumerate(ranks) if calls is None}
    if silent:
        return silent
    waiting = [_waits(calls or ()) for calls in ranks]
    if not any(waiting):
        return {}
    return {rank: f"is in {_innermost(calls or ())}" for rank, calls in enumerate(ranks) if not waiting[rank]}


def wait_for_each_other(ranks: Sequence[Calls | None]) -> bool:
    """Return True if there are several ranks and all wait for others, so the network between them is the cause."""
    return len(ranks) > 1 and all(calls is not None and _waits(calls) for calls in ranks)


def _waits(calls: Calls) -> bool:
    return any("/torch/distributed/" in file or "/torch/autograd/" in file for file, *_ in calls)


def calls_as_text(rank: int, calls: Calls | None) -> str:
    """Return a rank's calls as text for a log."""
    lines = ["does not answer"] if calls is None else [f"{file}:{line} {name}" for file, line, name in calls]
    return f"rank {rank} at the time limit\n" + "".join(f"  {line}\n" for line in lines)


def _innermost(calls: Calls) -> str:
    """Return the innermost call outside of libraries."""
    candidates = [call for call in calls if not call[0].startswith(LIBRARY)] or list(calls)
    if not candidates:
        return "no trial"
    file, line, name = candidates[-1]
    return f"{name} ({Path(file).name}:{line})"
