"""The state of this host before a run: its load, its GPUs, and other studies that measure on it."""

import contextlib
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from study.errors import DOES_NOT_FIT
from trainables.scratch import open_regular

_HOLDER = re.compile(r"pid \d+, since [\d: -]+")

LOCK_NAME = "scaling-study-{user}.lock"


class HostBusy(Exception):
    """The host is busy, and the user wants no measurement then."""

    exit_code = DOES_NOT_FIT


def busy_lines(on_gpus: bool, folder: Path | None = None) -> list[str]:
    """Return at most two lines: what disturbs timings on this host, and which other studies measure on it.

    The checks are those of `doctor`. `folder` has the locks of running studies, see `measuring`.
    """
    from study.cli.doctor import gpus, processors

    checks = [*processors(), *(gpus() if on_gpus else ())]
    problems = [check for check in checks if check.status != "ok" and not check.name.endswith(" links")]
    others = list(_others(folder or Path(tempfile.gettempdir())))
    lines = []
    if problems:
        found = "; ".join(f"{check.name}: {check.message}" for check in problems)
        lines.append(f"this host is busy: {found}; fix: {problems[0].fix}")
    if others:
        lines.append(f"another study measures on this host ({'; '.join(others)}); fix: wait until it ends")
    return lines


@contextlib.contextmanager
def measuring(folder: Path | None = None) -> Iterator[None]:
    """Hold the lock that tells other studies of this host that one measures. It ends with this process.

    There is one lock per user. No error if it cannot be taken, such as by a second study of the same user.
    """
    path = (folder or Path(tempfile.gettempdir())) / LOCK_NAME.format(user=os.getuid())
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = held.enter_context(open_regular(path, os.O_RDWR | os.O_CREAT, os.getuid()))
            os.fchmod(file.fileno(), 0o644)  # other users read it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate()
            file.write(f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M')}".encode())
            file.flush()
        yield


def _others(folder: Path) -> Iterable[str]:
    """Yield process id and start of every study that holds a lock in this folder."""
    for path in sorted(folder.glob(LOCK_NAME.format(user="*"))):
        with contextlib.suppress(OSError), open_regular(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read(100).decode(errors="replace")  # another user may have written anything
                yield holder if _HOLDER.fullmatch(holder) else "pid unknown"
