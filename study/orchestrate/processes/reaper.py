"""End what is left of a local Ray after its driver was killed:  python -P reaper.py SESSION_FOLDER < PIPE

Ray's own reaper ends most processes at once. Two agents of the raylet then wait 60 s for a server that has ended too
(`publish_error_to_driver` in ray/_private/utils.py, Ray 2.60, where no variable changes it). This process reads a pipe
from the driver. It ends at once if the driver says so, and otherwise kills them after `GRACE_S`.
"""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

GRACE_S = 8.0


@contextlib.contextmanager
def reaper(session: str) -> Iterator[None]:
    """Watch this process until the context ends. session: folder of the local Ray."""
    command = [sys.executable, "-P", __file__, session]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                process.communicate(b"ended")


def kill_session(session: str) -> None:
    """Kill all processes, other than this one, that write files in the folder of a session. Does nothing without /proc.

    All processes of a Ray, and those that they start, log there. Their titles overwrite other marks.
    """
    inside = f"{os.path.realpath(session)}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if int(process.name) != os.getpid() and any(map(_written, (process / "fd").iterdir(), repeat(inside))):
                os.kill(int(process.name), signal.SIGKILL)


def _written(descriptor: Path, inside: str) -> bool:
    """Return True if a file descriptor writes a file in this folder."""
    with contextlib.suppress(OSError):
        return str(descriptor.readlink()).startswith(inside) and bool(descriptor.lstat().st_mode & stat.S_IWUSR)
    return False


if __name__ == "__main__" and not sys.stdin.read():
    time.sleep(GRACE_S)
    kill_session(sys.argv[1])
