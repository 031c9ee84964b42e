"""Show what a study's trials are doing while they run, without reports from within timed windows.

rank 0 --window_starting, between windows--> keeper <--activity, once per second-- driver
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

POLL_S = 1.0

GROUP_STARTING = "starting a worker group"
BUILDING = "building model and data"
OWN_CODE = "running your code"

Activity = Mapping[str, str]
"""What each running job is doing, by its id."""

OnActivity = Callable[[Activity], None]


@contextlib.contextmanager
def watched(read: Callable[[], Activity], on_activity: OnActivity | None) -> Iterator[None]:
    """Call `on_activity` with what `read` returns, once per second from a thread of its own, within a `with` block.

    Errors of `read` are ignored: the keeper may be restarting.
    """
    if on_activity is None:
        yield
        return
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_S):
            with contextlib.suppress(Exception):
                on_activity(read())

    thread = threading.Thread(target=poll, name="activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=POLL_S)


class WindowCallbacks:
    """A rank's `observe` and `read_energy` that also announce the window which follows.

    These callbacks run between windows, where a call to the keeper disturbs no timing: before the warm-up, right before
    and after the plain window, and after the phases.
    """

    def __init__(self, observe: Callable[[], Any], read_energy: Callable[..., Any], announce: Callable[[str], None]):
        self._observe, self._read_energy, self._announce = observe, read_energy, announce
        self._observed = self._read = 0

    def observe(self) -> Any:
        value = self._observe()
        self._observed += 1
        self._announce("warm-up" if self._observed == 1 else "communication and other windows")
        return value

    def read_energy(self, *arguments: Any) -> Any:
        self._read += 1
        if self._read == 1:
            self._announce("plain steps")
            return self._read_energy(*arguments)
        value = self._read_energy(*arguments)
        self._announce("phases of steps")
        return value
