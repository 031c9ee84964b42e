"""Sizes of statistical tests: a tenth in every run, the whole by `python -m benchmarks.truth.full_statistics`."""

import os

FULL = "FULL_STATISTICS"
"""environment variable that asks for whole samples"""


def sampled(full: int, divisor: int = 10) -> int:
    """Return the size of a sample: `full` if FULL_STATISTICS=1, otherwise a part of it."""
    return full if os.environ.get(FULL) == "1" else full // divisor
