"""The keeper without a cluster: warm groups, interrupts, shared GPUs and time limits."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from study.orchestrate.failures import describe_failure
from study.orchestrate.keeper import Keeper, RunningJob, _any_of, shared_gpus
from study.orchestrate.protocol import Environment, Failure, Job, Outcome, RankProcess
from study.orchestrate.stuck import Calls
from study.orchestrate.twin.in_process import LocalGauge
from study.orchestrate.twin.simulated_ranks import payload_of, simulated_environment
from study.plan.placement import Layout, ProcessKind
from study.store.store import Store
from trainables.trial import Trial

LAYOUT = Layout(ProcessKind.of(Trial()), ("a",), (1,))
ENVIRONMENT = simulated_environment(LAYOUT)
JOB = Job("first", Trial())


class ManualRanks:
    """A `RankBackend` whose groups end when `over` is set. The tests call the keeper instead of ranks."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.over = threading.Event()
        self.error: Exception | None = None

    def prepare(self) -> None:
        pass

    def renews(self, layout: Layout) -> bool:
        return False

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        self.started.append(name)

        def run() -> None:
            self.over.wait()
            if self.error:
                raise self.error

        return run

    def kill(self, process: Any) -> None:
        self.over.set()

    async def calls_of(self, process: Any) -> Calls | None:
        return {"waits": [("/torch/distributed/c10d.py", 1, "wait")], "works": [("/study/own.py", 7, "prepare")]}[
            process
        ]

    def ran_out_of_memory(self, error: BaseException) -> bool:
        return False


def new_keeper(ranks: ManualRanks, start_timeout_s: float = 60.0) -> Keeper:
    return Keeper("study", [], cast(Store, None), {}, LocalGauge, ranks, start_timeout_s=start_timeout_s)


async def prepared_and_measured(ranks: ManualRanks) -> Outcome:
    keeper = new_keeper(ranks)
    await keeper.prepare(LAYOUT, "block-0")
    await keeper.prepare(LAYOUT, "block-0")
    await keeper.opened(ranks.started[0], ENVIRONMENT)
    measuring = asyncio.create_task(keeper.measure(JOB, LAYOUT, "block-0", 60.0))
    assert await keeper.next_job(ranks.started[0]) == JOB
    await keeper.finished(ranks.started[0], "first", [payload_of(JOB.trial, {})])
    outcome = await measuring
    ranks.over.set()
    return outcome


def test_the_first_trial_uses_the_group_started_by_prepare() -> None:
    ranks = ManualRanks()
    outcome = asyncio.run(prepared_and_measured(ranks))
    assert len(ranks.started) == 1
    assert (outcome.status, outcome.worker_group, outcome.duration_s) == ("done", ranks.started[0], 1.0)
    assert outcome.environment is not None
    times = outcome.environment.group
    assert times["asked_at"] <= times["opened_at"]


@pytest.mark.parametrize("ready", [True, False], ids=["during its windows", "while its group starts"])
def test_an_interrupted_trial_has_no_outcome(ready: bool) -> None:
    ranks = ManualRanks()

    async def interrupted() -> None:
        keeper = new_keeper(ranks)
        measuring = asyncio.create_task(keeper.measure(JOB, LAYOUT, "block-0", 60.0))
        while not ranks.started:
            await asyncio.sleep(0)
        if ready:
            await keeper.rank_starting(ranks.started[0], RankProcess(0, LAYOUT.node_ids[0], "host0", "handle"))
            await keeper.opened(ranks.started[0], ENVIRONMENT)
            await keeper.next_job(ranks.started[0])
        else:
            asyncio.get_running_loop().call_later(0.1, ranks.over.set)
        await keeper.close()
        with pytest.raises(asyncio.CancelledError):
            await measuring

    asyncio.run(interrupted())


PAIR = Layout(ProcessKind.of(Trial()), ("node-a", "node-b"), (2,))


def start_of_two(
    reports: Sequence[tuple[float, int, str]], opened_at_s: float | None = None, limit_s: float = 0.5
) -> Outcome:
    """Return the outcome of a job whose group may be silent for `limit_s`. `reports` has times, ranks and handles."""
    ranks = ManualRanks()

    async def play() -> Outcome:
        keeper = new_keeper(ranks, start_timeout_s=limit_s)
        measuring = asyncio.create_task(keeper.measure(JOB, PAIR, "block-0", 60.0))
        while not ranks.started:
            await asyncio.sleep(0)
        began_s = time.monotonic()
        for at_s, rank, handle in reports:
            await asyncio.sleep(began_s + at_s - time.monotonic())
            await keeper.rank_starting(ranks.started[0], RankProcess(rank, PAIR.node_ids[rank], f"host{rank}", handle))
        if opened_at_s is not None:
            await asyncio.sleep(began_s + opened_at_s - time.monotonic())
            await keeper.opened(ranks.started[0], simulated_environment(PAIR))
            await keeper.next_job(ranks.started[0])
            await keeper.finished(ranks.started[0], "first", [payload_of(JOB.trial, {})])
        outcome = await measuring
        ranks.over.set()
        return outcome

    return asyncio.run(play())


def test_each_report_of_a_starting_rank_restarts_the_time_limit_of_the_start() -> None:
    assert start_of_two([(1.2, 0, "works"), (2.4, 1, "works")], opened_at_s=2.5, limit_s=2.0).status == "done"


def test_a_start_without_progress_names_the_ranks_that_have_not_reported() -> None:
    outcome = start_of_two([(0.0, 0, "waits")])
    assert outcome.status == "failed"
    assert outcome.reason.endswith("2 ranks did not start: no progress within 0.5 s; no sign of rank 1")


def test_a_start_without_progress_names_what_the_blocking_rank_is_doing() -> None:
    outcome = start_of_two([(0.0, 0, "waits"), (0.0, 1, "works")])
    assert outcome.reason.endswith("no progress within 0.5 s; rank 1 on node host1 (node-b) is in prepare (own.py:7)")
    assert "prepare" in outcome.log


def group_on(*uuids: str | None) -> Environment:
    return Environment(nodes=[], ranks=[{"gpu_uuid": uuid} for uuid in uuids])


class RanksFailed(Exception):
    """Ray Train's error: those of its workers by rank."""

    def __init__(self, worker_failures: dict[int, Exception]) -> None:
        super().__init__("a worker failed")
        self.worker_failures = worker_failures


BOOM = Failure(0, "a", False, "RuntimeError: boom", "RuntimeError: boom")
LOST_PEER = RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:28389")
LOST = describe_failure(0, "a", LOST_PEER)


async def measured_on_ranks_that_fail(reported: Failure | None, died: dict[int, Exception]) -> Outcome:
    ranks = ManualRanks()
    keeper = new_keeper(ranks)
    await keeper.prepare(LAYOUT, "block-0")
    await keeper.opened(ranks.started[0], ENVIRONMENT)
    measuring = asyncio.create_task(keeper.measure(JOB, LAYOUT, "block-0", 60.0))
    assert await keeper.next_job(ranks.started[0]) == JOB
    if reported:
        await keeper.rank_failed(ranks.started[0], reported)
    ranks.error = RanksFailed(died)
    ranks.over.set()
    return await measuring


@pytest.mark.parametrize(
    "reported, died, reason",
    [
        (BOOM, {1: LOST_PEER}, "RuntimeError: boom"),
        (BOOM, {1: RuntimeError("killed by a signal")}, "RuntimeError: killed by a signal"),
        (LOST, {1: RuntimeError("killed by a signal")}, "RuntimeError: killed by a signal"),
        (LOST, {1: LOST_PEER}, "Connection closed by peer [127.0.0.1]:28389"),
        (None, {1: LOST_PEER}, "Connection closed by peer [127.0.0.1]:28389"),
    ],
)
def test_a_rank_that_lost_its_peer_gives_no_reason_if_another_one_does(
    reported: Failure | None, died: dict[int, Exception], reason: str
) -> None:
    outcome = asyncio.run(measured_on_ranks_that_fail(reported, died))
    assert outcome.status == "failed" and outcome.reason.endswith(reason)


def test_a_gpu_of_two_groups_is_detected_by_its_uuid() -> None:
    assert shared_gpus(group_on("GPU-1", "GPU-2"), [group_on("GPU-3"), group_on("GPU-4")]) == []
    assert shared_gpus(group_on("GPU-1", "GPU-2"), [group_on("GPU-3"), group_on("GPU-2")]) == ["GPU-2"]


def test_cpu_ranks_and_starting_groups_hold_no_gpu() -> None:
    assert shared_gpus(group_on(None), [group_on(None), None]) == []


def wait_for(timeout_s: float, epochs_at_s: list[float], result_at_s: float | None, end_at_s: float | None) -> Any:
    """Wait for a job with events at these times. Return whether it ended in time, and the wait in s."""

    async def play() -> tuple[bool, float]:
        loop = asyncio.get_running_loop()
        started_s = loop.time()  # before the events are scheduled, so that none comes early by this clock
        job = RunningJob(JOB, loop.create_future())
        ended: asyncio.Future[None] = loop.create_future()
        for at_s in epochs_at_s:
            loop.call_later(at_s, job.epoch_reported.set)
        if result_at_s is not None:
            loop.call_later(result_at_s, job.result.set_result, [])
        if end_at_s is not None:
            loop.call_later(end_at_s, ended.set_result, None)
        in_time = await _any_of({job.result, ended}, job.epoch_reported, timeout_s)
        return in_time, loop.time() - started_s

    return asyncio.run(play())


def test_each_epoch_restarts_the_time_limit_of_a_training() -> None:
    in_time, waited_s = wait_for(timeout_s=1.0, epochs_at_s=[0.6, 1.2], result_at_s=1.8, end_at_s=None)
    assert in_time
    assert waited_s > 1.5


def test_the_time_limit_ends_the_wait_without_epoch_result_or_end_of_the_group() -> None:
    in_time, waited_s = wait_for(timeout_s=0.2, epochs_at_s=[0.1], result_at_s=None, end_at_s=None)
    assert not in_time
    assert waited_s >= 0.3


def test_the_end_of_a_group_ends_the_wait_at_once() -> None:
    in_time, waited_s = wait_for(timeout_s=60.0, epochs_at_s=[], result_at_s=None, end_at_s=0.1)
    assert in_time
    assert waited_s < 30
