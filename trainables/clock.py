"""The clocks of all measurements, taken at import: a user's workload that replaces `time.perf_counter` changes nothing.

`user_workload` imports this module, so that it is loaded before any code of the user.
"""

import time
from time import monotonic, perf_counter

__all__ = ["monotonic", "perf_counter", "unix_s"]

_STARTED_AT, _STARTED_S = time.time(), monotonic()


def unix_s() -> float:
    """Return the Unix time when this process started by the host's clock, plus the seconds since then.

    A host's clock may be set back or forward. Differences of these times are durations even then.
    """
    return _STARTED_AT + (monotonic() - _STARTED_S)
