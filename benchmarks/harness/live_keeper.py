"""The product's own keeper in a local Ray, for benchmarks that measure single trials in warm worker groups."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray
from ray.util.metrics import Gauge

from study.capacity import NodeCapacity
from study.orchestrate.cluster import connect
from study.orchestrate.keeper import Keeper
from study.orchestrate.protocol import Job, Outcome
from study.orchestrate.worker_group import RayRanks
from study.plan.placement import Layout

TIMEOUT_S = 300.0

Measure = Callable[[Job, Layout, str], Outcome]
"""(job, layout, block) -> its outcome. A change of layout or block starts another worker group. Raises RuntimeError
with reason and log unless the trial is done."""


@contextmanager
def live_keeper() -> Iterator[tuple[Sequence[NodeCapacity], Measure]]:
    """Start a local Ray and the keeper. Yield the nodes, and a function that measures a job."""
    with connect("local") as cluster:
        keeper = (
            ray.remote(Keeper)
            .options(num_cpus=0, resources=cluster.driver_resource)
            .remote("benchmark", [], None, {}, Gauge, RayRanks())
        )

        def measure(job: Job, layout: Layout, block: str) -> Outcome:
            outcome: Outcome = ray.get(keeper.measure.remote(job, layout, block, TIMEOUT_S))
            if outcome.status != "done":
                raise RuntimeError(f"{job.trial.trial_id}: {outcome.reason}\n{outcome.log}")
            return outcome

        try:
            yield cluster.nodes, measure
        finally:
            ray.get(keeper.close.remote())
