"""Each fault once, on two hosts under Ray while a study runs: nothing is lost, its node is named, the same command completes.

Ten times each at random moments: `python -m benchmarks.faults`.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import FAULTS, Cluster, cluster, suffer
from tests.hosts import unavailable

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    assert list(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), "libfaketime is missing; .ci/run installs it"
    with cluster() as made:
        yield made


@pytest.mark.parametrize("name", FAULTS)
def test_a_study_survives(name: str, two_hosts: Cluster) -> None:
    found = suffer(two_hosts, name, random.Random(name))
    assert found["exit_codes"][-1] == 0
