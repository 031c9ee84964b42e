"""Trials on simulated GPUs, for benchmarks of orchestration at sizes beyond the machine."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from study.capacity import NodeCapacity
from study.orchestrate.driver import Report
from study.orchestrate.protocol import Job, KeeperProxy, Outcome, Payload
from study.orchestrate.twin.simulated_ranks import simulated_environment, simulated_payloads
from study.plan.placement import Layout
from trainables.trial import Trial

GPUS_PER_NODE = 8


def fake_nodes(ranks: int) -> list[NodeCapacity]:
    """Return simulated nodes of 8 GPUs, as many as `ranks` need."""
    per_node = min(ranks, GPUS_PER_NODE)
    return [
        NodeCapacity(node_id=f"fake-node-{number:04}", address=f"fake-{number:04}", cpus=per_node, gpus=per_node)
        for number in range(-(-ranks // per_node))
    ]


def fake_trial(ranks: int, **fields: Any) -> Trial:
    """Return a trial on `ranks` simulated GPUs."""
    nodes = len(fake_nodes(ranks))
    return Trial(device="cuda", model="resnet50", world_size=ranks, nodes=nodes, cpus_per_rank=1, **fields)


def instant_payloads(job: Job, keeper: KeeperProxy | None = None) -> Sequence[Payload]:
    """Return cached payloads by shape of trial, so that making them does not count in the timings."""
    trial = job.trial
    return _payloads_of_shape(fake_trial(trial.world_size, steps=trial.steps))


@lru_cache
def _payloads_of_shape(trial: Trial) -> Sequence[Payload]:
    return simulated_payloads(trial)


class InstantKeeper:
    """A `KeeperClient` that measures every trial instantly."""

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        environment = simulated_environment(layout)
        return Outcome("done", 0.0, 1.0, worker_group=block, environment=environment, payloads=instant_payloads(job))

    def trials_out_of_memory(self) -> Sequence[Trial]:
        return ()

    def ended(self, trial: Trial, status: str, values: Mapping[str, float]) -> None:
        """Do nothing."""
