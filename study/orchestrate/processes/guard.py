"""End what a rank leaves running, and a rank that starts processes without end:  python -P guard.py PID MOST [HOST]

A rank leads a process group. The processes that it starts, and those that they start, belong to the group unless they
leave it on purpose, as daemons do. A separate process watches it, because the rank itself may be busy or stopped. It
also ends a rank whose host, the process that started it, has ended.
"""

import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

MOST_PROCESSES = 1000
"""of a rank: far more than loader processes and compilers need, and few enough for other programs on the host"""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
"""Linux, include/uapi/linux/prctl.h"""

POLL_S = 1.0
COUNT_POLLS = 10
"""polls after which the processes of a rank are counted in any case"""


def guard_this_process(most: int = MOST_PROCESSES, host: int | None = None) -> None:
    """Let this process lead a group whose other processes end with it, and all of which end beyond `most`.

    They also end with the process `host`, if it is given.
    """
    with contextlib.suppress(PermissionError):  # a process that leads a session leads a group already
        os.setpgid(0, 0)
    if os.getpgrp() == os.getpid():
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(most), *([str(host)] if host else [])]
        os.posix_spawn(sys.executable, command, os.environ, setsid=True)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Exits if that has happened."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_this_process(name: str) -> None:
    """Let `ps -o comm` and `top` show this process with a name of up to 15 characters."""
    _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, value: Any) -> None:
    import ctypes  # here, because commands that start no process start faster without it

    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value)


def watch(group: int, most: int, host: int | None = None) -> None:
    """Wait for the end of this process's parent, which leads `group`, or of `host`, then kill the group.

    Kill it earlier if it grows.

    Counting processes takes milliseconds, so it is done at once only if the number of tasks on the host has risen.
    """
    fewest = _tasks()
    for poll in itertools.count():
        if os.getppid() != group or (host and not _exists(host)):
            time.sleep(POLL_S)  # loader processes and trackers of shared memory clean up when the rank ends
            break
        tasks = _tasks()
        fewest = min(fewest, tasks)
        if (tasks - fewest >= most // 2 or poll % COUNT_POLLS == 0) and _members(group) > most:
            print(f"this rank has started more than {most} processes and is killed with them", file=sys.stderr)
            break
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # also hits processes that are being forked


def _exists(process: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(process, 0)
        return True
    return False


def _tasks() -> int:
    """Return the number of processes and threads on this host, and 0 without /proc (Linux, proc_loadavg(5))."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    return 0


def _members(group: int) -> int:
    """Return the number of processes in a group."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            count += int(status.read_text(errors="replace").rpartition(")")[2].split()[2]) == group
    return count


if __name__ == "__main__":
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # connections of the rank must end with it
    watch(*map(int, sys.argv[1:]))
