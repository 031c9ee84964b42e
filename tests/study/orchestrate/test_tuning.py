"""A grid on CPU ranks under real Ray Tune and Ray Train."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import ray
from ray.util.state import list_actors

from study.cli.host import HostBusy, watched_host
from study.orchestrate.cluster import Cluster, held_resources
from study.orchestrate.discovery.address import Target
from study.orchestrate.discovery.neighbours import other_rays
from study.orchestrate.driver import Grid, RunOptions, grid_of
from study.orchestrate.processes.watch import ClusterLost, servers_of
from study.orchestrate.protocol import Event, KnownTrials
from study.orchestrate.tune import OutOfHostMemory, memory_line, run_trials, tune_grid
from study.plan.trials import varying_fields
from tests.support.faulty_workloads import HANGS
from tests.support.orchestration import assert_ended, new_store, workload_trial
from tests.support.trials import quick_trial
from trainables.trial import Trial

LOW_ON_MEMORY = """Caught unexpected exception: 2 worker(s) were killed due to the node running low on memory. Memory on
the node (IP: 10.0.0.1, ID: 7f) was 14.90GB used / 15.60GB limit (0.955); threshold 0.95.
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
4711\t12.34\tpython other.py
12\t0.50\tray::Keeper
"""


def test_a_full_memory_is_retried_once_and_then_reported_with_the_largest_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = [quick_trial(repeat=repeat) for repeat in range(3)]
    runs: list[list[Trial]] = []

    def grid_on_a_full_host(name: str, grid: Grid, *arguments: Any, **options: Any) -> None:
        runs.append(grid.trials)
        arguments[3](Event("trial_ended", grid.trials[0], "done"))
        if line := memory_line(RuntimeError(LOW_ON_MEMORY)):
            raise OutOfHostMemory(line)

    monkeypatch.setattr("study.orchestrate.tune.tune_grid", grid_on_a_full_host)
    with pytest.raises(ClusterLost, match=r"pid 4711 with 12\.34 GB: python other\.py; fix: "):
        run_trials("test", [trials], new_store(tmp_path / "results"), Cluster([], "", None, {}, ""))
    assert runs == [trials, trials[1:]]
    assert memory_line(RuntimeError("a bolt is loose")) == ""


TRIAL_TIMEOUT_S = 15.0


class ObservedGrid:
    """A grid that ran once, with its events, metrics and results.

    Two blocks of sound trials end with a trial that fails. In the third block, processes of some trials hang or are
    killed.
    """

    def __init__(self, cluster: Cluster, folder: Path):
        self.folder = folder
        self.keepers_folder = folder / "keeper"
        self.keepers_folder.mkdir()
        self.raylet = next(process for process in servers_of(cluster.log_dir) if process.name() == "raylet")
        self.address = ray.get_runtime_context().gcs_address  # other tests may have their own Ray on this host
        self.store = new_store(folder / "results")
        self.events: list[Event] = []
        self.metrics_pages: list[str] = []
        self.trials = [
            quick_trial(world_size=size, batch_per_gpu=8, learning_rate=rate, repeat=repeat, deterministic=True)
            for repeat in (0, 1)
            for rate in (0.1, 0.2)
            for size in (1, 2)
        ]
        self.of_another_kind = quick_trial(world_size=2, batch_per_gpu=8)
        self.raising, self.dying = (workload_trial(name, deterministic=True) for name in ("raises", "dies"))
        self.without_tune_process = workload_trial("slow")
        self.hanging = workload_trial("hangs", data_dir=str(folder))
        self.without_keeper = workload_trial("hangs", data_dir=str(self.keepers_folder))
        self.without_rank = workload_trial("sound", repeat=1)
        self.last = workload_trial("sound")
        self.tune_processes: list[int] = []
        self.starting_ranks: list[int] = []
        over = threading.Event()
        watchers = [
            threading.Thread(target=self._watch_metrics_port, args=(over,)),
            threading.Thread(target=self._kill_keeper, daemon=True),
        ]
        for watcher in watchers:
            watcher.start()
        killed = [self.without_tune_process, self.hanging, self.without_keeper, self.without_rank, self.last]
        self.blocks = [[self.of_another_kind, *self.trials[:4], self.raising], [*self.trials[4:], self.dying], killed]
        options = RunOptions(timeout_s=TRIAL_TIMEOUT_S)
        known = KnownTrials(statuses={"earlier": "done"})  # so that the workloads are not checked first
        grid = grid_of(self.blocks, isolate=False)
        results = tune_grid("test", grid, self.store, cluster, options, self.record, known)
        frame: pd.DataFrame = results.get_dataframe()
        of_sound = frame["study_trial_id"].isin([trial.trial_id for trial in self.trials])
        self.frame = frame[of_sound].sort_values("config/number", ignore_index=True)
        self.directories = [result.path for result in results]
        over.set()
        for watcher in watchers:
            watcher.join(timeout=2)
        self.records = {record["trial_id"]: record for record in self.store.records()}

    def record(self, event: Event) -> None:
        self.events.append(event)
        if event.kind == "trial_started" and event.trial == self.without_tune_process:
            self._kill_tune_process()
        if event.kind == "trial_ended" and len([e for e in self.events if e.kind == "trial_ended"]) == 3:
            time.sleep(4)  # longer than the intervals of exporting and of reading metrics

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks

    def status(self, trial: Trial) -> str:
        return str(self.records[trial.trial_id]["status"])

    def reason(self, trial: Trial) -> str:
        return str(self.records[trial.trial_id]["reason"])

    def records_of_sound(self) -> list[dict[str, Any]]:
        return [self.records[trial.trial_id] for trial in self.trials]

    def events_of(self, blocks: Sequence[Sequence[Trial]]) -> list[Event]:
        """Return the events before the first of a later block."""
        trials = [trial for block in blocks for trial in block]
        last = max(number for number, event in enumerate(self.events) if event.trial in trials)
        return self.events[: last + 1]

    def _watch_metrics_port(self, over: threading.Event) -> None:
        node = ray.nodes()[0]
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        while not over.wait(1.0):
            with urllib.request.urlopen(url, timeout=5) as page:
                text = page.read().decode()
            if "scaling_study_step_s{" in text:
                self.metrics_pages.append(text)

    def _kill_tune_process(self) -> None:
        """Kill Tune's process, which runs one trial after another."""
        deadline_s = time.monotonic() + 30
        while not self.tune_processes and time.monotonic() < deadline_s:
            for child in self.raylet.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "ray::ImplicitFunc" in " ".join(child.cmdline()):
                        child.kill()
                        self.tune_processes.append(child.pid)

    def _ranks(self) -> dict[str, int]:
        """Return the process ids of ranks that start or run, by actor."""
        actors = list_actors(self.address, filters=[("class_name", "=", "RayTrainWorker")], limit=10_000)
        return {
            actor.actor_id: actor.pid for actor in actors if actor.state in ("PENDING_CREATION", "ALIVE") and actor.pid
        }

    def _kill_keeper(self) -> None:
        """Kill the keeper while its trial hangs, and then a rank of the next worker group while it starts."""
        while not (self.keepers_folder / HANGS).exists():
            time.sleep(0.2)
        earlier = self._ranks()
        [keeper] = list_actors(self.address, filters=[("class_name", "=", "Keeper"), ("state", "=", "ALIVE")])
        os.kill(keeper.pid, signal.SIGKILL)
        while not self.starting_ranks:
            self.starting_ranks += [pid for actor, pid in self._ranks().items() if actor not in earlier]
            time.sleep(0.02)
        os.kill(self.starting_ranks[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def grid(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> ObservedGrid:
    return ObservedGrid(cluster, tmp_path_factory.mktemp("grid"))


def test_controllers_and_workers_take_processes_that_ray_has_ready(grid: ObservedGrid) -> None:
    """An actor with variables of its own would get a new process."""
    job = ("job_id", "=", ray.get_runtime_context().get_job_id())
    actors = list_actors(grid.address, filters=[job], limit=10_000, detail=True)
    classes = ("TrainController", "RayTrainWorker")
    own = {(actor.class_name, actor.serialized_runtime_env) for actor in actors if actor.class_name in classes}
    assert own == {(name, "{}") for name in classes}


def test_tunes_result_grid_has_one_row_per_trial_with_throughput_and_every_phase(grid: ObservedGrid) -> None:
    frame = grid.frame
    assert sorted(frame["study_trial_id"]) == sorted(trial.trial_id for trial in grid.trials)
    assert set(frame["status"]) == {"done"}
    measured = ["throughput_samples_per_s", "step_s", "load_wait_s", "forward_s", "backward_s", "optimizer_s"]
    assert (frame[measured] > 0).all().all()


def test_tune_names_its_trials_like_the_study_and_has_a_key_per_axis(grid: ObservedGrid) -> None:
    frame = grid.frame
    trials = [trial for block in grid.blocks for trial in block]
    assert {name for name in frame if str(name).startswith("config/")} == {
        f"config/{name}" for name in {"number", "world_size", "batch_per_gpu", *varying_fields(trials)}
    }
    by_id = {trial.trial_id: trial for trial in grid.trials}
    assert {Path(path).name for path in grid.directories} == {trial.trial_id for trial in trials}
    for name in ("world_size", "batch_per_gpu", "learning_rate"):
        expected = [getattr(by_id[trial_id], name) for trial_id in frame["study_trial_id"]]
        assert list(frame[f"config/{name}"]) == expected


def test_every_rank_records_its_state_before_and_after(grid: ObservedGrid) -> None:
    for record in grid.records_of_sound():
        for rank in record["environment"]["ranks"]:
            assert rank["affinity"]
            assert rank["niceness"] == 0  # as under torchrun; Ray's own default is 15
            assert rank["before"].keys() == rank["after"].keys() >= {"load_average_1min", "throttle_reasons"}
            assert rank["memory"] == {"before_bytes": None, "after_bytes": None}


def test_ranks_start_with_the_variables_that_their_trials_need(grid: ObservedGrid) -> None:
    for record in grid.records_of_sound():
        assert record["environment"]["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert "CUBLAS_WORKSPACE_CONFIG" in record["environment"]["set_by_study"]


def test_groups_with_other_variables_follow_on_the_same_ranks(grid: ObservedGrid) -> None:
    before, after = (grid.records[trial.trial_id] for trial in (grid.of_another_kind, grid.trials[0]))
    assert before["status"] == "done"
    assert "CUBLAS_WORKSPACE_CONFIG" not in before["environment"]["variables"]
    assert before["environment"]["launch"] == after["environment"]["launch"] == before["worker_group"]
    assert before["worker_group"] != after["worker_group"]


def test_each_block_has_its_own_warm_group_and_smaller_trials_use_its_first_ranks(grid: ObservedGrid) -> None:
    records = grid.records
    groups = [
        [records[trial.trial_id]["worker_group"] for trial in block] for block in (grid.trials[:4], grid.trials[4:])
    ]
    assert len(set(groups[0])) == len(set(groups[1])) == 1
    assert groups[0][0] != groups[1][0]
    processes = [[rank["pid"] for rank in records[trial.trial_id]["environment"]["ranks"]] for trial in grid.trials[:4]]
    assert [len(pids) for pids in processes] == [1, 2, 1, 2]
    assert processes[0] == processes[2] == processes[1][:1]


def test_events_report_groups_and_the_start_and_end_of_every_trial(grid: ObservedGrid) -> None:
    events = grid.events_of(grid.blocks[:2])
    of_trial = ["trial_started", "trial_ended"]
    groups = [["group_starting", *of_trial * trials] for trials in (1, 5, 5)]  # the first one is of another kind
    assert [event.kind for event in events] == sum(groups, [])
    ended = [event for event in events if event.kind == "trial_ended" and event.trial in grid.trials]
    assert all(event.status == "done" and event.summary["throughput_samples_per_s"] > 0 for event in ended)


def test_the_metrics_port_exports_throughput_and_phases_of_the_current_trial(grid: ObservedGrid) -> None:
    assert grid.metrics_pages, "no page of the metrics port has a gauge of the study"
    page = grid.metrics_pages[-1]
    ids = {trial.trial_id for block in grid.blocks for trial in block}
    for name in ("throughput_samples_per_s", "step_s", "forward_s", "backward_s", "optimizer_s", "load_wait_s"):
        lines = [line for line in page.splitlines() if line.startswith(f"ray_scaling_study_{name}{{")]
        assert lines, f"no gauge {name}"
        assert all('study="test"' in line for line in lines)
        assert any(f'trial="{trial_id}"' in line for line in lines for trial_id in ids)


def test_rays_dashboard_answers_at_the_printed_address(cluster: Cluster) -> None:
    assert cluster.dashboard_url is not None
    with urllib.request.urlopen(cluster.dashboard_url, timeout=20) as page:
        assert page.status == 200


def test_the_grid_continues_after_every_failure(grid: ObservedGrid) -> None:
    assert [grid.status(trial) for trial in (*grid.trials, grid.last)] == ["done"] * 9


def test_failures_are_recorded_with_a_reason(grid: ObservedGrid) -> None:
    assert grid.status(grid.raising) == "failed"
    assert grid.reason(grid.raising).startswith("rank 1 on node ")
    assert grid.reason(grid.raising).endswith("ValueError: these <b>targets</b> are wrong")
    log = Path(grid.store.trial_folder(grid.raising.trial_id), "error.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in fail" in log
    assert grid.status(grid.dying) == "failed"
    assert re.search("rank 1 on node .* died|rank 0 on node .*Connection", grid.reason(grid.dying))


def test_a_hanging_rank_is_a_timeout_with_its_call_and_its_processes_end(grid: ObservedGrid) -> None:
    assert grid.status(grid.hanging) == "timeout"
    pattern = r"no result within 15 s \(--trial-timeout\); rank 1 on node .* is in hang \(faulty_workloads.py:\d+\)"
    assert re.fullmatch(pattern, grid.reason(grid.hanging))
    assert_ended(grid.folder / HANGS)  # a process that a rank started ends with it


def test_a_killed_keeper_fails_only_the_running_trial(grid: ObservedGrid) -> None:
    assert grid.status(grid.without_keeper) == "failed"
    assert "was killed" in grid.reason(grid.without_keeper)


def test_a_trial_is_measured_although_tunes_process_for_it_was_killed(grid: ObservedGrid) -> None:
    assert grid.tune_processes
    assert grid.reason(grid.without_tune_process) == "" and grid.status(grid.without_tune_process) == "done"


def test_a_rank_killed_while_its_group_starts_is_reported_with_its_node(grid: ObservedGrid) -> None:
    assert grid.status(grid.without_rank) == "failed"
    pids = grid.starting_ranks
    assert f"process {pids[0]} on node {socket.gethostname()} (" in grid.reason(grid.without_rank)


def test_a_ray_with_a_temporary_folder_of_its_own_is_found_and_named(cluster: Cluster) -> None:
    address = ray.get_runtime_context().gcs_address
    assert [line for line in other_rays(0) if f"cluster {address}, " in line]
    assert not [line for line in other_rays(0, address) if f"cluster {address}, " in line]


def test_a_trial_fails_if_others_hold_its_resources(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ray.remote(num_cpus=2)
    class Neighbour:
        def is_ready(self) -> bool:
            return True

    neighbour = Neighbour.remote()  # type: ignore[attr-defined]
    assert ray.get(neighbour.is_ready.remote(), timeout=60)
    deadline_s = time.monotonic() + 30
    while not (held := held_resources()) and time.monotonic() < deadline_s:  # Ray's view of the cluster lags behind
        time.sleep(0.2)
    assert held.startswith("2 of ") and held.endswith(" CPUs")
    started_s = time.monotonic()
    trial = quick_trial()
    warning = f"other jobs hold {held} of the cluster; trials wait for them; fix: see ray status"
    with watched_host([trial], Target(), cluster, quiet=False, strict=False):
        assert f"warning: {warning}\n" in capsys.readouterr().err
    with pytest.raises(HostBusy, match=warning), watched_host([trial], Target(), cluster, quiet=True, strict=True):
        pass
    store = new_store(tmp_path / "results")
    assert run_trials("test", [[trial]], store, cluster) is False
    ray.kill(neighbour)
    [record] = store.records()
    assert record["status"] == "failed"
    reason = record["reason"]
    assert reason.startswith("worker group of 1 ranks did not start: ") and "\n" not in reason
    assert time.monotonic() - started_s < 240


def test_all_cpus_are_free_after_a_grid(cluster: Cluster) -> None:
    deadline_s = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"]
