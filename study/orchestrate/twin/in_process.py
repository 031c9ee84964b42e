"""A Ray cluster replaced by one process: `run_trials` with simulated or local ranks, for tests and benchmarks.

Keeper, worker groups, verdicts, layouts, the driver of each trial, events, metrics and the store are real. A loop
replaces Ray Tune, and a `RankBackend` replaces Ray Train (`simulated_ranks.py` and `local_ranks.py` in this package).
It does not import Ray.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from study.capacity import NodeCapacity
from study.orchestrate.activity import OnActivity, watched
from study.orchestrate.cluster import Cluster, SharedKeeper
from study.orchestrate.driver import (
    CHECKPOINT_EVERY_S,
    Grid,
    Narrator,
    OnEvent,
    Point,
    Report,
    RunOptions,
    TrialDriver,
    UpdateKnownTrials,
    grids_of,
)
from study.orchestrate.group import RankBackend
from study.orchestrate.keeper import Keeper
from study.orchestrate.metrics import MakeGauge, counts
from study.orchestrate.protocol import Job, KnownTrials, Outcome
from study.plan.placement import Layout
from study.store.store import Store
from trainables.trial import Trial

EPOCHS_POLL_S = 0.01


def local_cluster(nodes: Sequence[NodeCapacity]) -> Cluster:
    """Return a cluster of these nodes, without Ray."""
    return Cluster(list(nodes), "simulated nodes", None, {}, "", is_local=True)


@dataclass
class LocalGauge:
    """A gauge that stores its values by tags, in the order of `tag_keys`."""

    name: str
    description: str
    tag_keys: tuple[str, ...]
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.values[tuple(tags[key] for key in self.tag_keys)] = value


def run_trials(
    study_name: str,
    blocks: Sequence[Sequence[Trial]],
    store: Store,
    cluster: Cluster,
    *,
    ranks: RankBackend,
    isolate: bool = False,
    trial_timeout_s: float = 600.0,
    max_concurrent: int = 1,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    on_event: OnEvent = lambda event: None,
    on_activity: OnActivity | None = None,
    known: KnownTrials | None = None,
    make_gauge: MakeGauge = LocalGauge,
    shared: SharedKeeper | None = None,
) -> bool:
    """Run all trials on `ranks`. Return True if Ctrl-C ended the run early.

    Works like `study.orchestrate.tune.run_trials`, but errors of the driver itself are raised, and `shared` is ignored.
    """
    known = KnownTrials.of(store.records()) if known is None else known
    options = RunOptions(isolate, trial_timeout_s, checkpoint_every_s)
    try:
        for grid in grids_of(blocks, cluster.nodes, isolate, max_concurrent):
            left = counts(known.statuses, [trial.trial_id for trial in grid.trials])
            keeper = Keeper(study_name, known.out_of_memory, store, left, make_gauge, ranks, grid.slots)
            with LocalKeeper(keeper) as client, watched(partial(client.call, "next_activity"), on_activity):
                driver = TrialDriver.of(grid.trials, cluster.nodes, client, store, options, lambda: cluster.nodes)
                client.call("prepare", driver.layout(grid.trials[0]), grid.points[0].block)
                if "done" not in known.statuses.values():
                    driver.check(grid)
                _run_grid(grid, driver, client, Narrator(UpdateKnownTrials(known, on_event)), lambda: known.unusable)
    except KeyboardInterrupt:
        return True
    return False


def _run_grid(
    grid: Grid, driver: TrialDriver, client: "LocalKeeper", narrator: Narrator, unusable: Callable[[], str]
) -> None:
    """Run one trial per slot at a time. Events are handled in this thread."""
    events: queue.Queue[Callable[[], None]] = queue.Queue()

    def run(point: Point) -> None:
        events.put(lambda: narrator.started(point))
        driver.run(point, lambda report: events.put(lambda: narrator.reported(point.trial, report)))

    pool = ThreadPoolExecutor(max(1, len(grid.slots)))
    try:
        running = [pool.submit(run, point) for point in grid.points]
        while not all(future.done() for future in running):
            with contextlib.suppress(queue.Empty):
                events.get(timeout=0.01)()
            if unusable():
                return
        while not events.empty():
            events.get()()
        for future in running:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        client.close()
        pool.shutdown()


class LocalKeeper:
    """A `KeeperClient` whose keeper runs in an event loop in its own thread. A context manager, which closes it."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="keeper", daemon=True)
        self.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(self.keeper, method)(*arguments), self.loop)

    def call(self, method: str, *arguments: Any) -> Any:
        return self.submit(method, *arguments).result()

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        pending = self.submit("measure", job, layout, block, timeout_s)
        reported = 0
        while job.trial.epochs and not wait([pending], timeout=EPOCHS_POLL_S).done:
            for row in self.call("epochs_of", job.id)[reported:]:
                reported += 1
                on_epoch(row)
        return pending.result()

    def trials_out_of_memory(self) -> Sequence[Trial]:
        return self.call("trials_out_of_memory")

    def ended(self, trial: Trial, status: str, values: Mapping[str, float]) -> None:
        self.call("ended", trial, status, values)

    def close(self) -> None:
        self.call("close")


@dataclass(frozen=True)
class CallInLoop:
    """Calls a method of a keeper in its event loop and returns the answer."""

    keeper: Any
    loop: asyncio.AbstractEventLoop

    def __call__(self, method: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self.keeper, method)(*arguments), self.loop).result()


class RankDied(Exception):
    """A rank ended without a report, for example killed by the kernel. Corresponds to Ray Train's error."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} died: {error}")
        self.worker_failures = {rank: error}
