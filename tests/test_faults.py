"""Each fault once, on two hosts under Ray while a study runs: nothing is lost, its node is named, the next trial runs.

Ten times each at random moments: `python -m benchmarks.faults`.
"""

import random

import pytest

from tests.faults import CLOCKS, COMPLETED, FAKETIME, FAULTS, cluster, suffer
from tests.hosts import unavailable

pytestmark = [
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.skipif(FAKETIME is None, reason="clocks apart need a package: apt install libfaketime"),
    pytest.mark.timeout(1800),
]


def test_a_study_survives_each_fault_and_is_completed_by_the_same_command() -> None:
    with cluster() as made:
        met = [found["fault"] for found in suffer(made, random.Random(0))]
    assert met == [*FAULTS, CLOCKS, COMPLETED]
