"""Write results folders whose step times follow a known law, so that the analysis can be checked against the truth.

The ranks are simulated; no number in such a folder was measured. A rank computes until its last gradient, buckets are
reduced one after another by a ring (alpha-beta model), and the optimizer follows. The law may add a late rank, a host
that needs longer to issue a step, loading, slower kernels, or compute that communication slows down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from analysis.read.schema import SCHEMAS
from study.store.result import TrialResult
from study.store.store import Store
from trainables.trial import Trial

FORWARD_SHARE, LOSS_SHARE = 0.35, 0.02
"""shares of the time to the last gradient"""
WARMUP_STEPS, ISSUE_STEPS, BUSY_STEPS, COMMUNICATION_STEPS, SWEEP_ROUNDS = 3, 10, 5, 10, 3
SWEEP_SIZES = tuple(4**power for power in range(1, 15))
GPUS_PER_HOST = 8
LAUNCH_SHARE = 0.5
"""host time to issue a step / its kernel time, if the law gives no host time"""

ITERATIONS = 20
"""to find how long the device waits for a slow host, whose delay also empties the queue of all-reduces"""

Row = dict[str, Any]
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KnownLaw:
    """Parameters of a law. Seconds are those of a step; "on several ranks" means on every N > 1."""

    to_last_gradient_s: float = 0.028
    optimizer_s: float = 0.002
    ready_s: tuple[float, ...] = (0.014, 0.019, 0.024, 0.028)
    """when each bucket can be reduced; the last one with the last gradient"""
    bucket_bytes: tuple[int, ...] = (30_000_000, 25_000_000, 25_000_000, 20_000_000)
    hop_latency_s: float = 30e-6
    bandwidth: float = 25e9
    """bytes per second of a link of the ring"""
    late_rank: int | None = None
    """rank whose forward pass takes `late_s` longer, if there are so many ranks"""
    late_s: float = 0.006
    slowed_waiting_s: float = 0.0
    """the others lose this much of their lead over the late rank between the first and the last bucket, as waiting
    all-reduces slow their compute"""
    host_s: float | None = None
    """host time to issue a step on several ranks; a step takes at least this long"""
    load_s: float = 0.0
    """wait for a batch on several ranks"""
    slower_compute_s: float = 0.0
    """kernels take this much longer on several ranks, in the forward pass"""
    contention_s: float = 0.0
    """compute takes this much longer in steps with communication, between the first and the last bucket"""
    ranks_per_node: int | None = None
    """ranks per node; None: one node"""
    node_hop_latency_s: float = 30e-6
    node_bandwidth: float = 5e9
    """of the ring, if it spans several nodes"""

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` need."""
        return -(-ranks // (self.ranks_per_node or ranks))

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return seconds of a ring all-reduce: 2(N-1) hops, each with 1/N of the bytes (Patarasuk and Yuan, 2009)."""
        one_node = self.nodes(ranks) == 1
        latency_s = self.hop_latency_s if one_node else self.node_hop_latency_s
        bandwidth = self.bandwidth if one_node else self.node_bandwidth
        return 2 * (ranks - 1) * (latency_s + size_bytes / ranks / bandwidth)

    def step(self, ranks: int, compute: float = 1.0, communication: float = 1.0) -> "LawStep":
        """Return one step on `ranks`. compute, communication: factors of the step's noise."""
        several = float(ranks > 1)
        late = np.array([self.late_s * compute if rank == self.late_rank else 0.0 for rank in range(ranks)])
        load_s = self.load_s * several
        forward_s = compute * (self.to_last_gradient_s * FORWARD_SHARE + self.slower_compute_s * several) + late
        delay_s = load_s + compute * self.slower_compute_s * several + late
        ready = compute * np.array(self.ready_s) + delay_s[:, None]
        last = compute * self.to_last_gradient_s + delay_s
        optimizer_s = compute * self.optimizer_s
        no_sync = last + optimizer_s
        host_s = self.host_s * compute if self.host_s and ranks > 1 else 0.0
        if ranks > 1:
            span = np.array(self.ready_s) - self.ready_s[0]
            waiting_s = np.where(late == 0, self.slowed_waiting_s, 0.0) if late.any() else np.zeros(ranks)
            slowed_s = compute * (self.contention_s + waiting_s)
            ready = ready + slowed_s[:, None] * (span / span[-1] if span[-1] > 0 else 1.0)
            last = last + slowed_s
        transfer = communication * np.array([self.all_reduce_s(size, ranks) for size in self.bucket_bytes])
        idle_s = 0.0
        for _ in range(ITERATIONS):
            # A host that issues for longer than the device works makes every step this long. The device then idles
            # before the last gradient, which is that much later; the all-reduce and the optimizer follow it.
            stretched = ready * ((last + idle_s) / last)[:, None]
            end = _ends(stretched, transfer) if ranks > 1 else stretched[0]
            step_s = float(max(end[-1], last.max() + idle_s)) + optimizer_s
            idle_s += max(0.0, host_s - step_s)
        return LawStep(
            step_s=step_s,
            no_sync_s=np.maximum(no_sync, host_s),
            ready_s=stretched,
            end_s=end,
            last_gradient_s=last + idle_s,
            transfer_s=transfer,
            load_s=load_s,
            forward_s=forward_s,
            loss_s=compute * self.to_last_gradient_s * LOSS_SHARE,
            backward_s=compute * self.to_last_gradient_s * (1 - FORWARD_SHARE - LOSS_SHARE),
            optimizer_s=optimizer_s,
            host_s=host_s or LAUNCH_SHARE * (compute * self.to_last_gradient_s + optimizer_s),
        )


@dataclass(frozen=True)
class LawStep:
    """A step of a law. Arrays have one value per rank, those of buckets one per bucket, `ready_s` [ranks, buckets].

    forward_s, loss_s, backward_s, optimizer_s: kernel time without communication.
    """

    step_s: float
    no_sync_s: Vector
    ready_s: Vector
    end_s: Vector
    last_gradient_s: Vector
    transfer_s: Vector
    load_s: float
    forward_s: Vector
    loss_s: float
    backward_s: float
    optimizer_s: float
    host_s: float


def _ends(ready_s: Vector, transfer_s: Vector) -> Vector:
    """Return when each bucket is reduced: in order, once all ranks have it. ready_s: [ranks, buckets]."""
    ends, free_s = [], 0.0
    for ready_everywhere_s, bucket_s in zip(ready_s.max(axis=0), transfer_s, strict=True):
        free_s = max(ready_everywhere_s, free_s) + bucket_s
        ends.append(free_s)
    return np.array(ends)


@dataclass(frozen=True)
class Noise:
    """Log-normal noise of steps, and effects of worker groups.

    compute, communication: standard deviations of the logarithm, one value per step, the same for all ranks.
    group_effects: relative, such as 0.02 for a group whose steps take 2 % longer; one per group. by_configuration: each
    configuration has the effects in a random order, else all have the same.
    """

    compute: float = 0.0
    communication: float = 0.0
    group_effects: Sequence[float] = (0.0,)
    by_configuration: bool = False


def write_known_law(
    directory: Path,
    law: KnownLaw,
    sizes: Sequence[int] = (1, 2, 4, 8),
    repeats_per_group: Sequence[int] = (1, 1, 1),
    noise: Noise | None = None,
    steps: int = 20,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    name: str = "known-law",
) -> Path:
    """Write a results folder of trials that follow `law` on `sizes` ranks. Returns the folder.

    repeats_per_group: repeats measured by each worker group, such as (2, 1). steps: of the plain and phases windows.
    fields: further fields of the trials. Call again with the same `name` and other fields to add trials.
    """
    noise = noise or Noise()
    rng = np.random.default_rng(seed)
    store = Store.open(
        str(directory), name=name, question="Is the known law recovered?", configuration={}, versions={}, command=""
    )
    groups = [group for group, count in enumerate(repeats_per_group) for _ in range(count)]
    effects = [*noise.group_effects, *[0.0] * (len(repeats_per_group) - len(noise.group_effects))]
    for ranks in sizes:
        of_groups = rng.permutation(effects) if noise.by_configuration else np.array(effects)
        for repeat, group in enumerate(groups):
            base = {"device": "cuda", "model": "resnet50", "dataset": "synthetic", "image_size": 224}
            base |= {"steps": steps, "communication_steps": COMMUNICATION_STEPS, "sweep_bytes": SWEEP_SIZES[-1]}
            layout = {"world_size": ranks, "nodes": law.nodes(ranks), "repeat": repeat}
            trial = Trial(**(base | layout | dict(fields or {})))
            tables = _tables(law, trial, noise, float(1 + of_groups[group]), rng)
            store.save(
                TrialResult(
                    trial=trial,
                    status="done",
                    environment=_environment(trial),
                    worker_group=f"group-{group}",
                    started_at=1.7e9 + 60.0 * repeat,
                    duration_s=60.0,
                    **{table: pa.Table.from_pylist(rows, schema=SCHEMAS[table]) for table, rows in tables.items()},
                )
            )
    return directory


def _tables(law: KnownLaw, trial: Trial, noise: Noise, factor: float, rng: np.random.Generator) -> dict[str, list[Row]]:
    """Return the rows of steps, buckets and sweep of a trial, by table. factor: effect of its worker group."""
    ranks = trial.world_size

    def drawn(count: int) -> list[LawStep]:
        factors = factor * np.exp(rng.standard_normal((count, 2)) * (noise.compute, noise.communication))
        return [law.step(ranks, float(compute), float(communication)) for compute, communication in factors]

    windows = {"warmup": WARMUP_STEPS, "plain": trial.steps, "phases": trial.steps}
    windows |= {"issue": ISSUE_STEPS, "busy": BUSY_STEPS}
    if ranks > 1:
        windows |= dict.fromkeys(("synchronised", "no_sync", "communication"), COMMUNICATION_STEPS)
    rows: list[Row] = []
    buckets: list[Row] = []
    number = 0
    for window, count in windows.items():
        window_steps = drawn(count)
        timed = window in ("plain", "phases", "communication")
        window_s = sum(step.step_s for step in window_steps) if timed else None
        for step in window_steps:
            for rank in range(ranks):
                row = {"rank": rank, "window": window, "step": number, "samples": trial.samples_per_step, "loss": 1.0}
                rows.append(row | {"window_s": window_s} | _columns(window, step, rank))
                if window == "communication":
                    buckets += _bucket_rows(law, step, rank, number)
            number += 1
    sweep = [
        {"rank": rank, "bytes": size, "repetition": repetition, "seconds": law.all_reduce_s(size, ranks) * spread}
        for size in sorted({*SWEEP_SIZES, *law.bucket_bytes})
        for repetition in range(SWEEP_ROUNDS if ranks > 1 else 0)
        for spread in [factor * float(np.exp(noise.communication * rng.standard_normal()))]
        for rank in range(ranks)
    ]
    return {"steps": rows, "buckets": buckets, "sweep": sweep}


def _columns(window: str, step: LawStep, rank: int) -> Row:
    """Return the columns that a window measures of a rank's step."""
    forward_s = float(step.forward_s[rank])
    kernels = {"forward_s": forward_s, "loss_s": step.loss_s, "optimizer_s": step.optimizer_s}
    if window == "busy":
        return kernels | {"backward_s": step.backward_s}
    if window == "issue":
        shares = {"forward": 0.38, "loss": 0.02, "backward": 0.4, "optimizer": 0.2}
        launches = {f"{part}_launch_s": step.host_s * share for part, share in shares.items()}
        return launches | {"step_launch_s": step.host_s, "step_s": max(step.host_s, float(step.no_sync_s[rank]))}
    if window in ("phases", "warmup"):
        backward_s = step.step_s - step.load_s - sum(kernels.values())
        host_bound = step.host_s > 0.999 * step.step_s
        parts = {"load_wait_s": step.load_s, "backward_s": backward_s, "previous_step_done": host_bound}
        return kernels | parts | {"step_s": step.step_s}
    if window == "no_sync":
        return {"step_s": float(step.no_sync_s[rank])}
    if window == "communication":
        return {"step_s": step.step_s, "last_gradient_s": float(step.last_gradient_s[rank])}
    return {} if window == "plain" else {"step_s": step.step_s}


def _bucket_rows(law: KnownLaw, step: LawStep, rank: int, number: int) -> list[Row]:
    return [
        {"rank": rank, "window": "communication", "step": number, "bucket": bucket, "bytes": size}
        | {"ready_s": float(step.ready_s[rank, bucket]), "end_s": float(step.end_s[bucket])}
        for bucket, size in enumerate(law.bucket_bytes)
    ]


def _environment(trial: Trial) -> dict[str, Any]:
    """Return the environment of simulated GPUs."""
    per_node = trial.world_size // trial.nodes
    gpus = [{"name": "simulated GPU", "uuid": f"GPU-{number}"} for number in range(max(GPUS_PER_HOST, per_node))]
    nodes = [
        {"node_id": f"node-{node}", "host": f"node-{node}", "cpu_model": "simulated CPU", "gpus": gpus}
        for node in range(trial.nodes)
    ]
    ranks = [
        {"rank": rank, "node_id": f"node-{rank // per_node}", "device": "simulated GPU"}
        | {"gpu_uuid": f"GPU-{rank % per_node}"}
        for rank in range(trial.world_size)
    ]
    return {"nodes": nodes, "ranks": ranks, "versions": {}, "variables": {}}
