"""Show what a study's trials are doing while they run, without any message from within a timed window.

rank 0 --window_starting, between windows--> keeper --activity, only when it changes--> driver
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

REPEAT_S = 30.0
"""The keeper also reports an activity that has not changed for this long."""

RETRY_S = 1.0

GROUP_STARTING = "starting a worker group"
BUILDING = "building model and data"
OWN_CODE = "running your code"

Activity = Mapping[str, str]
"""What each running job is doing, by its id."""

OnActivity = Callable[[Activity], None]


@contextlib.contextmanager
def watched(read: Callable[[Activity], Activity], on_activity: OnActivity | None) -> Iterator[None]:
    """Call `on_activity` with each activity, from a thread of its own, within a `with` block.

    `read` waits until the activity differs from the one it gets. Its errors are ignored: the keeper may be restarting.
    """
    over = threading.Event()

    def follow(on_activity: OnActivity) -> None:
        activity: Activity = {}
        while not over.is_set():
            try:
                activity = read(activity)
            except Exception:  # noqa: BLE001  whatever it is, the trials do not depend on it
                over.wait(RETRY_S)
                continue
            if not over.is_set():
                on_activity(activity)

    if on_activity is not None:
        threading.Thread(target=follow, args=(on_activity,), name="activity", daemon=True).start()
    try:
        yield
    finally:
        over.set()


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
