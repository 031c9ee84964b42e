"""The clocks of all measurements, taken at import: a user's workload that replaces `time.perf_counter` changes nothing.

`user_workload` imports this module, so that it is loaded before any code of the user.
"""

import os
import time
from pathlib import Path
from time import monotonic, perf_counter

__all__ = ["monotonic", "perf_counter", "process_start_unix_s", "unix_s"]

_STARTED_AT, _STARTED_S = time.time(), monotonic()


def unix_s() -> float:
    """Return the Unix time when this process started by the host's clock, plus the seconds since then.

    A host's clock may be set back or forward. Differences of these times are durations even then.
    """
    return _STARTED_AT + (monotonic() - _STARTED_S)


def process_start_unix_s() -> float:
    """Return the Unix time when this process was created, to 10 ms (Linux, proc_pid_stat(5)).

    psutil's is up to 1 s too early, because it adds the time of boot, which Linux gives in whole seconds.
    """
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
