"""Sample sizes of statistical tests: a tenth by default, all in `python -m benchmarks.truth.full_statistics`."""

import os

FULL = "FULL_STATISTICS"
"""environment variable for full samples"""


def sampled(full: int, divisor: int = 10) -> int:
    """Return the size of a sample: `full` if FULL_STATISTICS=1, otherwise `full // divisor`."""
    return full if os.environ.get(FULL) == "1" else full // divisor
