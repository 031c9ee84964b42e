"""The clocks of all measurements, taken at import: a user's workload that replaces `time.perf_counter` changes nothing.

`user_workload` imports this module, so that it is loaded before any code of the user.
"""

from time import monotonic, perf_counter
from time import time as unix_s

__all__ = ["monotonic", "perf_counter", "unix_s"]
