"""Replace time.sleep for Python under libfaketime.

time.sleep uses clock_nanosleep since Python 3.11, and libfaketime's fails with EINVAL if the monotonic clock is not
faked. `select` without descriptors sleeps as long.
"""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]
