"""One trial from its job to its stored result, with failures of the keeper, a node or the disk."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from study.capacity import NodeCapacity
from study.orchestrate.driver import KeeperKilled, Point, Report, RunOptions, TrialDriver, grids_of
from study.orchestrate.protocol import Job, Outcome
from study.orchestrate.twin.simulated_ranks import simulated_environment, simulated_payloads
from study.plan.placement import Layout
from study.store.result import TrialResult
from study.store.store import Store, StoreError
from tests.support.orchestration import new_store
from tests.support.trials import quick_trial
from trainables.trial import Trial

NODES = [NodeCapacity(f"node-{name}", f"10.0.0.{n}", cpus=2, gpus=0) for n, name in enumerate("ab")]


class InstantKeeper:
    """A `KeeperClient` that measures at once, or fails if `killed_by` is set."""

    def __init__(self, killed_by: str = "") -> None:
        self.killed_by = killed_by
        self.jobs: list[tuple[Job, Layout]] = []
        self.statuses: list[str] = []

    def measure(self, job: Job, layout: Layout, block: str, timeout_s: float, on_epoch: Report) -> Outcome:
        self.jobs.append((job, layout))
        if self.killed_by:
            raise KeeperKilled from ConnectionError(self.killed_by)
        environment = simulated_environment(layout)
        return Outcome("done", 1.0, 2.0, "", "", block, environment, simulated_payloads(job.trial))

    def trials_out_of_memory(self) -> Sequence[Trial]:
        return ()

    def ended(self, trial: Trial, status: str, values: Mapping[str, float]) -> None:
        self.statuses.append(status)


class FullStore(Store):
    """A store whose disk is full."""

    def save(self, result: TrialResult) -> None:
        raise StoreError("no space left on device")


def run(keeper: InstantKeeper, store: Store, trial: Trial, alive: Sequence[NodeCapacity] = NODES) -> dict[str, Any]:
    """Run one trial and return its final report."""
    reports: list[dict[str, Any]] = []
    driver = TrialDriver.of([trial], NODES, keeper, store, RunOptions(), lambda: alive)
    driver.run(Point(trial, "block-0"), reports.append)
    [report] = reports
    assert keeper.statuses == [report["status"]]
    return report


def test_a_measured_trial_is_stored_and_reported_with_its_measures(tmp_path: Path) -> None:
    store, trial = new_store(tmp_path), quick_trial(world_size=2)
    report = run(InstantKeeper(), store, trial)
    assert (report["study_trial_id"], report["status"], report["log"]) == (trial.trial_id, "done", "")
    assert report["throughput_samples_per_s"] > 0
    [record] = store.records()
    assert (record["worker_group"], record["started_at"], record["duration_s"]) == ("block-0", 1.0, 2.0)
    assert len(record["environment"]["ranks"]) == 2


def test_a_killed_keeper_fails_its_trial_with_the_cause(tmp_path: Path) -> None:
    store, trial = new_store(tmp_path), quick_trial()
    report = run(InstantKeeper(killed_by="the actor is unavailable"), store, trial)
    assert report["status"] == "failed"
    assert report["reason"].endswith("ConnectionError: the actor is unavailable")
    assert Path(report["log"]).read_text() == "the actor is unavailable"
    assert run(InstantKeeper(), store, trial)["status"] == "done", "the next run measures it again"


def test_a_trial_moves_to_alive_nodes(tmp_path: Path) -> None:
    keeper = InstantKeeper()
    assert run(keeper, new_store(tmp_path), quick_trial(world_size=2), alive=NODES[1:])["status"] == "done"
    [(_, layout)] = keeper.jobs
    assert set(layout.node_ids) == {"node-b"}


def test_a_trial_without_enough_nodes_fails_and_reports_the_lost_node(tmp_path: Path) -> None:
    keeper = InstantKeeper()
    report = run(keeper, new_store(tmp_path), quick_trial(world_size=2, nodes=2), alive=NODES[:1])
    assert report["status"] == "failed"
    assert report["reason"].startswith("lost node 10.0.0.1 (node-b): ")
    assert keeper.jobs == []


def test_a_result_that_cannot_be_stored_is_a_failure(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    report = run(InstantKeeper(), FullStore(store.out, store.filesystem, store.root), quick_trial())
    assert (report["status"], report["log"]) == ("failed", "")
    assert "measured as done" in report["reason"] and "no space left on device" in report["reason"]
    assert "step_s" not in report


@pytest.mark.parametrize(("max_concurrent", "slots"), [(1, [0]), (2, [0, 2]), (9, [0, 4])])
def test_one_rank_trainings_follow_the_timed_trials(max_concurrent: int, slots: list[int]) -> None:
    timed, training = quick_trial(), Trial(model="mlp", epochs=2)
    grids = list(grids_of([[training, timed]], NODES, isolate=False, max_concurrent=max_concurrent))
    assert [len(grid.slots) for grid in grids] == slots
    trials = [trial for grid in grids for trial in grid.trials]
    assert trials == ([training, timed] if max_concurrent == 1 else [timed, training])


def test_isolated_trials_share_no_block() -> None:
    trials = [quick_trial(repeat=repeat) for repeat in range(3)]
    [grid] = grids_of([trials[:2], trials[2:]], NODES, isolate=True, max_concurrent=1)
    assert len({point.block for point in grid.points}) == 3
