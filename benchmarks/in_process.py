"""The orchestration of a study without Ray, for benchmarks that count what it costs at sizes that no machine here has.

Real: the keeper, its worker groups, jobs and verdicts; layouts; each Tune trial's function; rows from ranks to the store.
Replaced: Ray itself (calls of actors become calls, a TorchTrainer becomes what the benchmark starts), and the measurement.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from study import rank as rank_side
from study import tuning, worker_group
from study.capacity import NodeCapacity
from trainables.rank import CHECKPOINT_EVERY_S, RankOutput, RankSetup
from trainables.trial import Trial

GPUS_PER_NODE = 8
MOST_RANKS = 4096
ACCOUNT_STEPS, BUCKETS, SWEEP_ROWS = 10, 6, 40


def fake_nodes(ranks: int) -> list[NodeCapacity]:
    """Nodes of 8 GPUs that nobody has, as many as `ranks` need."""
    per_node = min(ranks, GPUS_PER_NODE)
    return [
        NodeCapacity(node_id=f"fake-node-{number:04}", address=f"fake-{number:04}", cpus=per_node, gpus=per_node)
        for number in range(-(-ranks // per_node))
    ]


def fake_trial(ranks: int, **fields: Any) -> Trial:
    """A trial on `ranks` GPUs that nobody has."""
    nodes = len(fake_nodes(ranks))
    return Trial(device="cuda", model="resnet50", world_size=ranks, nodes=nodes, cpus_per_rank=1, **fields)


def fake_measurement(trial: Trial, setup: RankSetup) -> RankOutput:
    """As many rows as a rank hands in for such a trial, with numbers that mean nothing."""
    rank = setup.rank
    windows = {
        "warmup": trial.warmup_steps,
        "plain": trial.window_steps,
        "phases": trial.steps,
        "account": ACCOUNT_STEPS,
    }
    rows: list[dict[str, Any]] = []
    for window, steps in windows.items():
        for step in range(steps):
            parts = {
                "load_wait_s": 0.001,
                "host_to_device_s": 0.001,
                "forward_s": 0.03 + 1e-6 * step,
                "optimizer_s": 0.002,
            }
            of_rank = {
                "rank": rank,
                "window": window,
                "step": step,
                "samples": trial.batch_per_gpu,
                "window_s": 0.1 * steps,
            }
            rows.append(of_rank | parts | {"backward_s": 0.06 + 1e-6 * rank, "step_s": 0.1, "loss": 2.0})
    bucket = {"bytes": 25 * 2**20, "ready_s": 0.05, "end_s": 0.06}
    buckets = [
        {"rank": rank, "window": "account", "step": step, "bucket": number} | bucket
        for step in range(ACCOUNT_STEPS)
        for number in range(BUCKETS if trial.world_size > 1 else 0)
    ]
    sweep = [
        {"rank": rank, "bytes": 2 ** (n // 5 + 10), "repetition": n % 5, "seconds": 1e-3} for n in range(SWEEP_ROWS)
    ]
    state = {"throttle_reasons": [], "load_average_1min": 1.0}
    swept = sweep if trial.world_size > 1 else []
    energy = [{"energy_j": 1.0, "at": 1.0}]
    unknown = dict.fromkeys(("peak_memory_by_device_bytes", "step_flops", "dataset_samples"))
    evidence = {"before": state, "after": state, "plain_window": {"before": energy, "after": energy}}
    return RankOutput({"steps": rows, "buckets": buckets, "sweep": swept}, evidence | unknown, (0.0, 1.0))


class Calls:
    """Stands for the handle of an actor: `handle.method.remote(...)` gives a future, in a loop of its own."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="actor", daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(getattr(self.actor, method)(*arguments), self.loop)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


@contextmanager
def without_ray(
    keeper: Calls, fit: Callable[[Any, Any], None] | None, reported: list[dict[str, Any]]
) -> Iterator[None]:
    """`fit(group, keeper)` stands for a TorchTrainer; what trials tell Tune is appended to `reported`."""
    stub = SimpleNamespace(
        get=lambda future, **_: future.result(),
        kill=lambda handle: None,
        get_runtime_context=lambda: SimpleNamespace(current_actor=keeper),
        exceptions=worker_group.ray.exceptions,
    )
    with (
        mock.patch.object(worker_group, "ray", stub),
        mock.patch.object(tuning, "ray", stub),
        mock.patch.object(tuning, "alive_nodes", lambda: fake_nodes(MOST_RANKS)),
        mock.patch.object(tuning.tune, "report", reported.append),
        mock.patch.object(worker_group.WorkerGroup, "_fit", fit or worker_group.WorkerGroup._fit),
    ):
        yield


class InstantKeeper:
    """In the place of the keeper: every trial is measured at once, by ranks that are function calls."""

    def __init__(self, *_: Any) -> None:
        self.payloads: dict[tuple[int, int], list[dict[str, Any]]] = {}

    async def measure(self, job: dict[str, Any], layout: Any, block: Any, timeout_s: float) -> dict[str, Any]:
        trial = Trial.model_validate(job["trial"])
        shape = trial.world_size, trial.steps
        if (
            shape not in self.payloads
        ):  # the same rows for all trials of a shape: making them is no part of what is timed
            self.payloads[shape] = [fake_payload(trial, rank) for rank in range(trial.world_size)]
        ranks = [{"rank": rank, "node_id": layout.node_ids[rank], "device": "cpu"} for rank in range(trial.world_size)]
        environment = {"nodes": [], "ranks": ranks, "versions": {}, "variables": {}, "git": {}}
        ended = {"status": "done", "reason": "", "log": "", "worker_group": block, "started_at": 0.0, "duration_s": 1.0}
        return ended | {"environment": environment, "payloads": self.payloads[shape], "side_by_side": 1}

    async def prepare(self, layout: Any, block: Any) -> None:
        """Nothing is to be started."""

    async def exhausted_trials(self) -> list[dict[str, Any]]:
        return []

    async def ended(self, *_: Any) -> None:
        """Nobody looks."""

    async def close(self) -> None:
        """Nothing is open."""


def fake_payload(trial: Trial, rank: int) -> dict[str, Any]:
    """What a rank hands in, from a fake measurement."""
    with mock.patch.object(rank_side, "run", fake_measurement):
        job: dict[str, Any] = {"id": trial.trial_id, "trial": trial.model_dump(), "source": None}
        job["checkpoint_every_s"] = CHECKPOINT_EVERY_S
        return rank_side.measure(job, rank, torch.device("cpu"), None, None, reports=None)  # type: ignore[arg-type]  # no training
