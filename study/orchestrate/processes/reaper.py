"""End what is left of a local Ray after its driver was killed:  python -P reaper.py RAYLET_PID < PIPE

Ray's own reaper ends most processes at once. Two agents of the raylet then wait 60 s for a server that has ended too
(`publish_error_to_driver` in ray/_private/utils.py, Ray 2.60, where no variable changes it). This process reads a pipe
from the driver. It ends at once if the driver says so, and otherwise kills them after `GRACE_S`.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

GRACE_S = 8.0


@contextlib.contextmanager
def reaper(raylet_pid: int) -> Iterator[None]:
    """Watch this process until the context ends."""
    command = [sys.executable, "-P", __file__, str(raylet_pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                process.communicate(b"ended")


def kill_children(raylet_pids: set[str]) -> None:
    """Kill all processes that these raylets have started, and their children."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_RAYLET_PID") in raylet_pids:
                process.kill()


if __name__ == "__main__" and not sys.stdin.read():
    time.sleep(GRACE_S)
    kill_children({sys.argv[1]})
