"""Ranks simulated by one function in a thread, and payloads like those of real ranks: no GPU, process or Ray."""

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.read.schema import SCHEMAS
from study.orchestrate.failures import describe_failure
from study.orchestrate.protocol import Environment, Evidence, Job, KeeperProxy, Payload, RankProcess
from study.orchestrate.stuck import Calls, calls_in
from study.orchestrate.twin.in_process import CallInLoop, RankDied
from study.plan.placement import Layout
from study.store.tables import packed
from trainables.trial import Trial

COMMUNICATION_STEPS, BUCKETS, SWEEP_ROWS = 10, 6, 40

Play = Callable[[Job, KeeperProxy], Sequence[Payload]]
"""Simulates the ranks of a job: returns one payload per rank of its trial, or raises an exception like a rank."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class SimulatedProcess:
    """Process handle of simulated ranks: their thread, and the event that ends their group."""

    thread: threading.Thread
    over: threading.Event


def simulated_environment(layout: Layout) -> Environment:
    """Return the environment of simulated ranks."""
    device = layout.kind.device
    return Environment(
        nodes=[{"node_id": node_id, "host": node_id} for node_id in dict.fromkeys(layout.node_ids)],
        ranks=[
            {"rank": rank, "node_id": node_id, "device": device, "gpu_uuid": None}
            for rank, node_id in enumerate(layout.node_ids)
        ],
    )


@dataclass(frozen=True)
class SimulatedRanks:
    """A `RankBackend` in which one function in one thread simulates all ranks of a group.

    An exception of `play` is rank 0's failure and ends the group; RankDied is the end of a rank without a report. The
    thread of a killed group continues, but the keeper ignores its answers.
    """

    play: Play
    environment: Callable[[Layout], Environment] = simulated_environment

    def prepare(self) -> None:
        pass

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        proxy = KeeperProxy(CallInLoop(keeper, asyncio.get_running_loop()), name)
        return lambda: self._run(proxy, layout)

    def renews(self, layout: Layout) -> bool:
        return False

    def _run(self, keeper: KeeperProxy, layout: Layout) -> None:
        over = threading.Event()
        errors: list[BaseException] = []

        def serve() -> None:
            try:
                self._serve(keeper, layout, SimulatedProcess(threading.current_thread(), over))
            except BaseException as error:  # noqa: BLE001  any exception is the group's error
                errors.append(error)
            over.set()

        threading.Thread(target=serve, name=f"ranks of {keeper.group}", daemon=True).start()
        over.wait()
        if errors:
            raise errors[0]

    def _serve(self, keeper: KeeperProxy, layout: Layout, process: SimulatedProcess) -> None:
        keeper.starting(RankProcess(0, layout.node_ids[0], "", process))
        keeper.opened(self.environment(layout))
        while (job := keeper.next_job()) is not None:
            of_job = keeper.for_job(job.id)
            try:
                payloads = self.play(job, of_job)
            except RankDied:
                raise
            except BaseException as error:
                of_job.failed(describe_failure(0, layout.node_ids[0], error))
                raise
            of_job.finished(payloads)

    def kill(self, process: SimulatedProcess) -> None:
        process.over.set()

    async def calls_of(self, process: SimulatedProcess) -> Calls | None:
        frame = sys._current_frames().get(process.thread.ident or 0)
        return calls_in(frame) if frame else None

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return False


def simulated_payloads(trial: Trial) -> list[Payload]:
    """Return payloads of all ranks of a timed trial, with as many rows as real ones. The numbers mean nothing."""
    return [simulated_payload(trial, rank) for rank in range(trial.processes)]


def simulated_payload(trial: Trial, rank: int) -> Payload:
    """Return one rank's payload, see `simulated_payloads`."""
    rows = {"steps": _step_rows(trial, rank), "buckets": _bucket_rows(trial, rank), "sweep": _sweep_rows(trial, rank)}
    return payload_of(trial, rows)


def payload_of(trial: Trial, rows: Mapping[str, Rows]) -> Payload:
    """Return a payload with these rows by table name, and with minimal evidence."""
    state = {"throttle_reasons": [], "load_average_1min": 1.0}
    energy = [{"energy_j": 1.0, "at": 1.0}]
    evidence = Evidence(
        before=state,
        after=state,
        memory={"before_bytes": None, "after_bytes": None},
        threads=trial.cpus_per_rank,
        peak_memory_by_device_bytes=None,
        step_flops=None,
        dataset_samples=None,
        plain_window={"before": energy, "after": energy},
    )
    return Payload({name: packed(name, rows.get(name, ())) for name in SCHEMAS}, evidence, started_at=0.0, ended_at=1.0)


def _step_rows(trial: Trial, rank: int) -> Rows:
    windows = {
        "warmup": trial.warmup_steps,
        "plain": trial.window_steps,
        "phases": trial.steps,
        "communication": COMMUNICATION_STEPS,
    }
    phases = {"load_wait_s": 0.001, "host_to_device_s": 0.001, "optimizer_s": 0.002, "backward_s": 0.06 + 1e-6 * rank}
    return [
        {"rank": rank, "window": window, "step": step, "samples": trial.batch_per_gpu, "window_s": 0.1 * steps}
        | {"step_s": 0.1, "loss": 2.0, "forward_s": 0.03 + 1e-6 * step}
        | phases
        for window, steps in windows.items()
        for step in range(steps)
    ]


def _bucket_rows(trial: Trial, rank: int) -> Rows:
    bucket = {"bytes": 25 * 2**20, "ready_s": 0.05, "end_s": 0.06}
    return [
        {"rank": rank, "window": "communication", "step": step, "bucket": number} | bucket
        for step in range(COMMUNICATION_STEPS)
        for number in range(BUCKETS if trial.world_size > 1 else 0)
    ]


def _sweep_rows(trial: Trial, rank: int) -> Rows:
    return [
        {"rank": rank, "bytes": 2 ** (row // 5 + 10), "repetition": row % 5, "seconds": 1e-3}
        for row in range(SWEEP_ROWS if trial.world_size > 1 else 0)
    ]
