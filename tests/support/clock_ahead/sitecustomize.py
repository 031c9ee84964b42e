"""For Pythons under libfaketime: its clock_nanosleep, left alone with the monotonic clock, fails with EINVAL, and
time.sleep (Python 3.11 and later) is made of it. Waiting for nothing sleeps as long.
"""

import select
import time


def sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]
