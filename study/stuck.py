"""Where ranks are when a trial does not end: the calls that each is in, and which of them keeps the others waiting."""

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

LIBRARY = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
SERVES = (str(Path(__file__).with_name("rank.py")), "serve")
"""file and function that every rank's thread of trials is in"""

Calls = Sequence[tuple[str, int, str]]
"""file, line and function of each call, the innermost last"""


def calls() -> list[tuple[str, int, str]]:
    """The calls that this process' thread of trials is in; none where no trial is served."""
    for frame in sys._current_frames().values():
        found = [(call.filename, call.lineno or 0, call.name) for call in traceback.extract_stack(frame)]
        if any((file, name) == SERVES for file, _, name in found):
            return found
    return []


def culprits(ranks: Sequence[Calls | None]) -> dict[int, str]:
    """Ranks that keep the others waiting, and what each does; none where all do alike, or nobody can tell.

    `ranks`: the calls of each rank, None where its process does not answer. Of those that answer, they are the ones that
    are in no call of torch.distributed or of the backward pass, where a rank waits for others, while another one is.
    """
    silent = {rank: "does not answer" for rank, found in enumerate(ranks) if found is None}
    if silent:
        return silent
    waiting = [_waits(found or ()) for found in ranks]
    if not any(waiting):
        return {}
    return {rank: f"is in {_own(found or ())}" for rank, found in enumerate(ranks) if not waiting[rank]}


def wait_for_each_other(ranks: Sequence[Calls | None]) -> bool:
    """Whether every rank, and there are several, answers and waits for others: then what is between them is to blame."""
    return len(ranks) > 1 and all(found is not None and _waits(found) for found in ranks)


def _waits(found: Calls) -> bool:
    return any("/torch/distributed/" in file or "/torch/autograd/" in file for file, *_ in found)


def calls_as_text(rank: int, found: Calls | None) -> str:
    """Return a rank's calls as text for a log."""
    lines = ["does not answer"] if found is None else [f"{file}:{line} {name}" for file, line, name in found]
    return f"rank {rank} at the time limit\n" + "".join(f"  {line}\n" for line in lines)


def _own(found: Calls) -> str:
    """The innermost call that is in no library."""
    own = [call for call in found if not call[0].startswith(LIBRARY)] or list(found)
    return f"{own[-1][2]} ({Path(own[-1][0]).name}:{own[-1][1]})" if own else "no trial"
