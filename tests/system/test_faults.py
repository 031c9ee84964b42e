"""Faults on two hosts while a study runs: no trial is lost, the error names the node, and the study continues.

These tests kill a rank and the driver. `make test-faults` adds each other fault once, and
`python -m benchmarks.truth.faults` injects each fault ten times at random moments.
"""

import random
from collections.abc import Sequence

import pytest

from tests.support.faults import CLOCKS, COMMAND, COMPLETED, FAULTS, SHORT_PAUSES, cluster, suffer
from tests.support.system import HOSTS, needs

pytestmark = [pytest.mark.timeout(1800), needs("libfaketime", *HOSTS)]

ALWAYS = ("rank killed", "driver killed")
OTHERS = [name for name in FAULTS if name not in ALWAYS]


def survives(names: Sequence[str], repeats: int, command: Sequence[str] = COMMAND, **more: str) -> None:
    with cluster(repeats, command, **more) as made:
        met = [found["fault"] for found in suffer(made, random.Random(0), names)]
    assert met == [*names, CLOCKS, COMPLETED]


def test_a_study_survives_a_killed_rank_and_a_killed_driver() -> None:
    survives(ALWAYS, repeats=1, batches="4,6,8,10,12,14")  # one repeat needs one worker group


@pytest.mark.faults
@pytest.mark.parametrize(
    ("names", "repeats"),
    [  # groups of their own, because these tests mostly wait
        pytest.param(OTHERS[:3], 6, id="processes", marks=pytest.mark.xdist_group("faults of processes")),
        pytest.param(OTHERS[3:], 7, id="hosts", marks=pytest.mark.xdist_group("faults of hosts")),
    ],
)
def test_a_study_survives_every_other_fault_and_is_completed_by_the_same_command(
    names: Sequence[str], repeats: int
) -> None:
    survives(names, repeats, SHORT_PAUSES)
