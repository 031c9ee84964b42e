"""Faults on two hosts under Ray while a study runs: nothing is lost, its node is named, the next trial runs.

Every run of the tests kills a rank and the driver; `make test-faults` adds each of the others once. Ten times each at random
moments: `python -m benchmarks.truth.faults`.
"""

import random
from collections.abc import Sequence

import pytest

from tests.support.faults import CLOCKS, COMPLETED, FAULTS, cluster, suffer
from tests.support.system import HOSTS, needs

pytestmark = [pytest.mark.timeout(1800), needs("libfaketime", *HOSTS)]

ALWAYS = ("rank killed", "driver killed")


def survives(names: Sequence[str], repeats: int) -> None:
    with cluster(repeats) as made:
        met = [found["fault"] for found in suffer(made, random.Random(0), names)]
    assert met == [*names, CLOCKS, COMPLETED]


def test_a_study_survives_a_killed_rank_and_a_killed_driver() -> None:
    survives(ALWAYS, repeats=3)


@pytest.mark.faults
def test_a_study_survives_every_other_fault_and_is_completed_by_the_same_command() -> None:
    survives([name for name in FAULTS if name not in ALWAYS], repeats=8)
