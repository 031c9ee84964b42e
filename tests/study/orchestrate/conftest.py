"""What the tests of the orchestration under Ray share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from study.orchestrate.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(local_ray: str) -> "Iterator[Cluster]":
    """The local Ray of all tests, to which this process is connected."""
    from study.orchestrate.cluster import connect

    with connect(local_ray) as connected:
        yield connected
