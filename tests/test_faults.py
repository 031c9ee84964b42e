"""Each fault once, on two hosts under Ray while a study runs: nothing is lost, its node is named, the next trial runs.

Ten times each at random moments: `python -m benchmarks.faults`.
"""

import random

import pytest

from tests.faults import CLOCKS, COMPLETED, FAULTS, cluster, suffer
from tests.system import HOSTS, needs

pytestmark = [pytest.mark.timeout(1800), needs("libfaketime", *HOSTS)]


def test_a_study_survives_each_fault_and_is_completed_by_the_same_command() -> None:
    with cluster() as made:
        met = [found["fault"] for found in suffer(made, random.Random(0))]
    assert met == [*FAULTS, CLOCKS, COMPLETED]
