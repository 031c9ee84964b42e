"""Runs of trials without Ray: stored results, events, metrics and failures."""

import gzip
import io
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from analysis.read.results import load_reduced
from analysis.read.schema import PHASES
from analysis.read.validate.records import Environment
from analysis.study import analyse
from analysis.verdict.trust import HostCaveats, trust
from study.capacity import NodeCapacity
from study.cli.progress import Progress
from study.orchestrate.activity import BUILDING, GROUP_STARTING
from study.orchestrate.driver import UserCodeError
from study.orchestrate.failures import RankDeathError
from study.orchestrate.protocol import Event, Job, KeeperProxy, KnownTrials, Payload
from study.orchestrate.twin.in_process import LocalGauge, RankDied, local_cluster, run_trials
from study.orchestrate.twin.local_ranks import LocalProcesses
from study.orchestrate.twin.simulated_ranks import Play, SimulatedRanks, payload_of, simulated_payloads
from study.plan.placement import Layout
from study.store import checkpoints
from tests.support.faulty_workloads import FORKED, FORKS, TOO_LARGE_BATCH
from tests.support.orchestration import assert_ended, new_store, workload_trial
from tests.support.trials import quick_trial
from trainables.measure.run import LOADER_ROUNDS
from trainables.trial import Trial

NODES = [NodeCapacity("node-a", "10.0.0.1", cpus=4, gpus=0), NodeCapacity("node-b", "10.0.0.2", cpus=4, gpus=0)]
SIZES = [quick_trial(world_size=size, repeat=repeat) for repeat in (0, 1) for size in (1, 2)]


def measured(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
    return simulated_payloads(job.trial)


def with_failure(failure: Callable[[], Any], on: Trial) -> Play:
    """Return ranks that call `failure` instead of measuring the trial `on`."""

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        if job.trial == on:
            failure()
        return simulated_payloads(job.trial)

    return play


def fail() -> None:
    raise ValueError("these targets are wrong")


def run_out_of_memory() -> None:
    raise MemoryError("no room for 8 GiB")


def die() -> None:
    raise RankDied(1, ConnectionError("killed by the kernel"))


class Run:
    """A run of trials with its events and records."""

    def __init__(self, folder: Path, blocks: Sequence[Sequence[Trial]], play: Play = measured, **options: Any) -> None:
        self.store = new_store(folder) if "store" not in options else options.pop("store")
        self.events: list[Event] = []
        options = {"on_event": self.events.append} | options
        ranks = options.pop("ranks", SimulatedRanks(play))
        self.interrupted = run_trials("test", blocks, self.store, local_cluster(NODES), ranks=ranks, **options)
        self.records = {record["trial_id"]: record for record in self.store.records()}

    def of(self, trial: Trial, name: str) -> Any:
        return self.records[trial.trial_id][name]

    def statuses(self, trials: Sequence[Trial]) -> list[str]:
        return [self.of(trial, "status") for trial in trials]


def kinds(events: Sequence[Event]) -> list[str]:
    return [event.kind for event in events]


def test_each_block_has_one_warm_group_and_every_trial_has_its_tables(tmp_path: Path) -> None:
    ran = Run(tmp_path, [SIZES[:2], SIZES[2:]])
    assert ran.statuses(SIZES) == ["done"] * 4
    groups = [ran.of(trial, "worker_group") for trial in SIZES]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    for trial in SIZES:
        folder = Path(ran.store.trial_folder(trial.trial_id))
        steps = pq.read_table(folder / "steps.parquet").to_pandas()
        assert set(steps["rank"]) == set(range(trial.world_size))
        assert steps.groupby("window")["step"].count()["phases"] == trial.steps * trial.world_size
        for name in ("buckets", "sweep"):
            assert (folder / f"{name}.parquet").exists() is (trial.world_size > 1)
        ranks = ran.of(trial, "environment")["ranks"]
        assert [(rank["rank"], rank["concurrent"]) for rank in ranks] == [(n, 1) for n in range(trial.world_size)]
        assert all(rank["before"]["load_average_1min"] == 1.0 for rank in ranks)


def test_each_isolated_trial_has_its_own_group(tmp_path: Path) -> None:
    ran = Run(tmp_path, [SIZES], isolate=True)
    assert len({ran.of(trial, "worker_group") for trial in SIZES}) == len(SIZES)
    assert kinds(ran.events) == ["group_starting", "trial_started", "trial_ended"] * len(SIZES)


def test_events_report_groups_and_the_start_and_end_of_every_trial(tmp_path: Path) -> None:
    ran = Run(tmp_path, [SIZES[:2], SIZES[2:]])
    assert kinds(ran.events) == (["group_starting"] + ["trial_started", "trial_ended"] * 2) * 2
    ended = [event for event in ran.events if event.kind == "trial_ended"]
    assert [event.trial for event in ended] == SIZES
    assert all(event.status == "done" and event.summary["throughput_samples_per_s"] > 0 for event in ended)


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (fail, "failed", "rank 0 on node node-a (node-a): ValueError: these targets are wrong"),
        (run_out_of_memory, "out_of_memory", "rank 0 on node node-a (node-a): MemoryError: no room for 8 GiB"),
        (die, "failed", "rank 1 on node node-a (node-a) died: ConnectionError: killed by the kernel"),
    ],
)
def test_a_failure_is_recorded_with_its_reason_and_the_next_trial_gets_a_new_group(
    tmp_path: Path, failure: Callable[[], None], status: str, reason: str
) -> None:
    before, failing, after = (quick_trial(world_size=2, batch_per_gpu=batch) for batch in (4, 16, 8))
    ran = Run(tmp_path, [[before, failing, after]], with_failure(failure, failing))
    assert ran.statuses([before, failing, after]) == ["done", status, "done"]
    assert ran.of(failing, "reason") == reason
    log = Path(ran.store.trial_folder(failing.trial_id), "error.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert ran.of(before, "worker_group") == ran.of(failing, "worker_group") != ran.of(after, "worker_group")
    assert kinds(ran.events)[-3:] == ["group_starting", "trial_started", "trial_ended"]


def test_a_clock_that_is_set_back_during_a_trial_does_not_shorten_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_clock_back() -> None:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        fail()

    run = Run(tmp_path / "results", [SIZES], with_failure(set_clock_back, on=SIZES[1]))
    assert run.of(SIZES[1], "status") == "failed"
    assert 0 <= run.of(SIZES[1], "duration_s") < 60


def test_another_study_on_the_host_is_recorded_and_stated_with_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([[], ["pid 4711"], [], []])
    monkeypatch.setattr("study.orchestrate.driver.other_studies", lambda pid: next(seen))
    run = Run(tmp_path / "results", [SIZES[:2]])
    assert run.of(SIZES[0], "environment")["other_studies"] == ["pid 4711"]
    assert "other_studies" not in run.of(SIZES[1], "environment")
    assert run.of(SIZES[1], "environment")["cluster"]["nodes"] == 2
    hosts = HostCaveats()
    for trial_id, record in run.records.items():
        hosts.add(trial_id, Environment.model_validate(record["environment"]).model_dump(exclude_unset=True))
    assert (hosts.accompanied, hosts.accompanied_trials) == ({"pid 4711": 1}, 1)
    assert hosts.labels() == ["another study on the host"]
    assert "pid 4711" in hosts.sentences(2)[0]


def test_larger_batches_and_repeats_are_pruned_after_running_out_of_memory(tmp_path: Path) -> None:
    small, large, larger = (quick_trial(batch_per_gpu=batch) for batch in (8, 16, 32))
    large_repeat = large.but(repeat=1)
    ran = Run(tmp_path, [[large, larger, large_repeat, small]], with_failure(run_out_of_memory, large))
    assert ran.statuses([large, larger, large_repeat, small]) == ["out_of_memory", "pruned", "pruned", "done"]
    assert "batch_per_gpu 16" in ran.of(larger, "reason")


def test_trials_that_ran_out_of_memory_prune_trials_of_a_later_run(tmp_path: Path) -> None:
    large, larger = (quick_trial(batch_per_gpu=batch) for batch in (16, 32))
    first = Run(tmp_path, [[large]], with_failure(run_out_of_memory, large))
    known = KnownTrials.of(first.records.values())
    second = Run(tmp_path, [[larger]], store=first.store, known=known)
    assert second.statuses([larger]) == ["pruned"]
    assert known.statuses == {large.trial_id: "out_of_memory", larger.trial_id: "pruned"}


def test_a_trial_that_does_not_end_is_a_timeout_and_its_log_has_the_call_stack(tmp_path: Path) -> None:
    hanging, after = quick_trial(), quick_trial(repeat=1)
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    ran = Run(tmp_path, [[hanging, after]], with_failure(hang, hanging), trial_timeout_s=0.5)
    release.set()
    assert ran.statuses([hanging, after]) == ["timeout", "done"]
    assert ran.of(hanging, "reason").startswith("no result within 0.5 s (--trial-timeout)")
    assert "hang" in Path(ran.store.trial_folder(hanging.trial_id), "error.log").read_text()


def test_an_interrupt_ends_the_run_and_keeps_finished_trials(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "trial_ended":
            raise KeyboardInterrupt

    ran = Run(tmp_path, [SIZES], on_event=interrupt)
    assert ran.interrupted
    assert SIZES[0].trial_id in ran.records
    assert set(ran.statuses([SIZES[0]])) == {"done"}


def test_progress_and_metrics_count_the_trials(tmp_path: Path) -> None:
    gauges: dict[str, LocalGauge] = {}

    def make_gauge(name: str, **options: Any) -> LocalGauge:
        return gauges.setdefault(name, LocalGauge(name, **options))

    text = io.StringIO()
    with Progress("test", SIZES, quiet=False, console=Console(file=text, width=200)) as progress:
        Run(tmp_path, [SIZES], with_failure(fail, SIZES[1]), on_event=progress.on_event, make_gauge=make_gauge)
    assert (len(progress.ended), len(progress.remaining.trials), progress.failed) == (4, 0, 1)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("[")]
    assert [line.partition("] ")[2].partition(":")[0] for line in lines] == ["done", "failed", "done", "done"]
    trials = gauges["scaling_study_trials"].values
    assert [trials["test", status] for status in ("done", "failed", "left")] == [3, 1, 0]
    assert gauges["scaling_study_current"].values["test", SIZES[-1].trial_id] == 1
    assert gauges["scaling_study_step_s"].values["test", SIZES[-1].trial_id] == pytest.approx(0.1)
    efficiencies = gauges["scaling_study_efficiency"].values
    assert efficiencies["test", SIZES[0].trial_id] == 1
    assert efficiencies["test", SIZES[-1].trial_id] == pytest.approx(1), "the simulated step does not grow"
    windows = gauges["scaling_study_window"].values
    assert {window for _, window in windows} >= {"starting a worker group", "building model and data"}
    assert set(windows.values()) == {0}, "no trial is left"


# ---------------------------------------------------------------------------------------------------------- trainings


def training(**fields: Any) -> Trial:
    return Trial(model="mlp", epochs=4, batch_per_gpu=256, **fields)


def epoch(number: int) -> dict[str, Any]:
    return {
        "epoch": number,
        "step": number,
        "samples": 100 * number,
        "train_s": float(number),
        "validation_s": 0.1,
        "validation_top1": number / 10,
    }


def trained(stops_after: Callable[[Job], int] = lambda job: 4, epoch_s: float = 0.1) -> Play:
    """Return ranks that train with a checkpoint per epoch, and fail after the epoch `stops_after`."""

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        first = int((keeper.load() or b"0").decode()) + 1
        for number in range(first, job.trial.epochs + 1):
            if number > stops_after(job):
                raise ValueError("the rank is gone")
            time.sleep(epoch_s)
            keeper.epoch_ended(epoch(number))
            keeper.save(str(number).encode())
        steps = [{"rank": 0, "window": "train", "step": 0, "samples": 256, "epoch": 1, "loss": 1.0}]
        epochs = [epoch(number) for number in range(1, job.trial.epochs + 1)]
        return [payload_of(job.trial, {"steps": steps, "epochs": epochs})]

    return play


def epochs_of(ran: Run, trial: Trial) -> list[int]:
    return [event.summary["epoch"] for event in ran.events if event.kind == "epoch_ended" and event.trial == trial]


def test_concurrent_trainings_follow_the_timed_trials_and_report_their_epochs(tmp_path: Path) -> None:
    timed, trainings = quick_trial(), [training(seed=seed) for seed in range(2)]

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        # long epochs, so that a busy host polls for them at least twice
        return (trained(epoch_s=0.5) if job.trial.epochs else measured)(job, keeper)

    ran = Run(tmp_path, [[trainings[0], timed, trainings[1]]], play, max_concurrent=2)
    assert ran.statuses([timed, *trainings]) == ["done"] * 3
    order = [(event.kind, event.trial) for event in ran.events if event.trial]
    assert order.index(("trial_ended", timed)) < order.index(("trial_started", trainings[0]))
    assert order.index(("trial_started", trainings[1])) < order.index(("trial_ended", trainings[0]))
    ranks = [ran.of(trial, "environment")["ranks"][0] for trial in (timed, *trainings)]
    assert [rank["concurrent"] for rank in ranks] == [1, 2, 2]
    epochs = epochs_of(ran, trainings[0])
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) >= 2
    [end] = [event for event in ran.events if event.kind == "trial_ended" and event.trial == trainings[1]]
    assert end.summary["epoch"] == 4
    assert end.summary["throughput_samples_per_s"] == 100.0


def test_a_failed_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    trial = training()
    first = Run(tmp_path, [[trial]], trained(stops_after=lambda job: 2))
    assert first.statuses([trial]) == ["failed"]
    assert checkpoints.load(first.store, trial.trial_id) == b"2"
    second = Run(tmp_path, [[trial]], trained(), store=first.store)
    assert second.statuses([trial]) == ["done"]
    assert min(epochs_of(second, trial)) == 3
    assert checkpoints.load(second.store, trial.trial_id) is None


# ----------------------------------------------------------------------------------------------------- real processes


def test_local_processes_measure_like_real_ranks(tmp_path: Path) -> None:
    trials = [quick_trial(world_size=size, batch_per_gpu=8, loader_workers=size - 1) for size in (1, 2)]
    ran = Run(tmp_path / "results", [trials], ranks=LocalProcesses())
    assert [ran.of(trial, "reason") or "done" for trial in trials] == ["done", "done"]
    ranks = [[rank["pid"] for rank in ran.of(trial, "environment")["ranks"]] for trial in trials]
    assert [len(pids) for pids in ranks] == [1, 2]
    assert ranks[0] == ranks[1][:1], "trials share a warm group"
    for trial in trials:
        folder = Path(ran.store.trial_folder(trial.trial_id))
        _check_steps(pq.read_table(folder / "steps.parquet").to_pandas(), trial)
        for name in ("buckets", "sweep"):
            assert (folder / f"{name}.parquet").exists() is (trial.world_size > 1)
            if trial.world_size > 1:
                assert set(pq.read_table(folder / f"{name}.parquet")["rank"].to_pylist()) == {0, 1}
        assert not (folder / "traces").exists()


def test_warm_and_cold_trials_have_equal_losses_and_a_profiled_trial_has_its_own_group_and_trace(
    tmp_path: Path,
) -> None:
    subject = quick_trial(world_size=2, batch_per_gpu=4, deterministic=True, steps=6)
    profiled = subject.but(profile_ranks="1")
    other_trials = [
        subject.but(precision="bf16", loader_workers=1, batch_per_gpu=16),
        subject.but(world_size=1, learning_rate=0.5, seed=7),
    ]
    warm = Run(tmp_path / "warm", [[*other_trials, subject, profiled]], ranks=LocalProcesses())
    cold = Run(tmp_path / "cold", [[subject]], ranks=LocalProcesses(), isolate=True)
    losses = []
    for ran in (warm, cold):
        assert set(ran.store.statuses().values()) == {"done"}
        steps = pq.read_table(f"{ran.store.trial_folder(subject.trial_id)}/steps.parquet").to_pandas()
        losses.append(steps.sort_values(["rank", "step"])["loss"].dropna().tolist())
    assert len(losses[0]) >= 2 * (subject.warmup_steps + subject.window_steps + subject.steps)
    assert losses[0] == losses[1]

    groups = {trial_id: record["worker_group"] for trial_id, record in warm.records.items()}
    assert len(set(groups.values())) == 2
    assert [trial_id for trial_id in groups if groups[trial_id] == groups[profiled.trial_id]] == [profiled.trial_id]
    assert len({record["environment"]["launch"] for record in warm.records.values()}) == 1
    traces = {trial: sorted(Path(warm.store.trial_folder(trial)).glob("traces/*")) for trial in groups}
    [trace] = traces.pop(profiled.trial_id)
    assert trace.name == "rank1.json.gz"
    assert not any(traces.values())
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "backward" in {event.get("name") for event in events}


@dataclass(frozen=True)
class CountedLaunches(LocalProcesses):
    """Real ranks that record the names of their launches."""

    launches: list[str] = field(default_factory=list)

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        self.launches.append(name)
        return super().launcher(keeper, name, layout)


def test_a_repeat_runs_in_fresh_processes_of_the_same_launch_until_a_rank_ends_unasked(tmp_path: Path) -> None:
    repeats = [quick_trial(world_size=2, loader_workers=1, repeat=repeat) for repeat in range(4)]
    leaving = workload_trial("leaves", world_size=2, repeat=1)
    ranks = CountedLaunches()
    ran = Run(tmp_path, [[repeats[0]], [repeats[1], leaving], [repeats[2]], [repeats[3]]], ranks=ranks)
    assert ran.statuses([*repeats, leaving]) == ["done"] * 4 + ["failed"]
    assert "its process ended with status 0" in ran.of(leaving, "reason")
    pids = [rank["pid"] for trial in repeats for rank in ran.of(trial, "environment")["ranks"]]
    assert len(set(pids)) == 2 * len(repeats)
    groups = [ran.of(trial, "worker_group") for trial in repeats]
    assert len(set(groups)) == len(repeats)
    launches = [ran.of(trial, "environment")["launch"] for trial in repeats]
    assert launches == [ranks.launches[-2]] * 2 + [ranks.launches[-1]] * 2
    assert launches[-1] == groups[2]
    starts = [rank["process_began_at"] for trial in repeats for rank in ran.of(trial, "environment")["startup"]]
    asked = [ran.of(trial, "environment")["group"]["asked_at"] for trial in repeats]
    assert starts[2] > ran.of(repeats[0], "environment")["group"]["opened_at"]
    assert asked == sorted(asked)


def test_a_real_rank_without_memory_prunes_the_same_and_larger_batches_only(tmp_path: Path) -> None:
    small, large, larger = (
        workload_trial("needs_too_much_memory", world_size=1, batch_per_gpu=batch)
        for batch in (TOO_LARGE_BATCH // 2, TOO_LARGE_BATCH, 2 * TOO_LARGE_BATCH)
    )
    trials = [large, larger, large.but(repeat=1), small]
    ran = Run(tmp_path / "results", [trials], ranks=LocalProcesses())
    assert ran.statuses(trials) == ["out_of_memory", "pruned", "pruned", "done"]
    assert "DefaultCPUAllocator: can't allocate memory" in ran.of(large, "reason")
    assert f"batch_per_gpu {TOO_LARGE_BATCH}" in ran.of(larger, "reason")


def test_a_device_that_cannot_run_a_trial_makes_it_infeasible_and_the_group_goes_on(tmp_path: Path) -> None:
    trials = [quick_trial(world_size=2, precision="fp8"), quick_trial(world_size=2)]
    ran = Run(tmp_path / "results", [trials], ranks=LocalProcesses())
    assert sorted(ran.statuses(trials)) == ["done", "infeasible"]
    assert "a CPU" in ran.of(trials[0], "reason")
    assert len({record["worker_group"] for record in ran.records.values()}) == 1


def _check_steps(steps: pd.DataFrame, trial: Trial) -> None:
    """Check every rank's rows of every window."""
    counts = steps.groupby("window")["step"].count()
    assert counts["warmup"] == trial.warmup_steps * trial.world_size
    assert trial.steps * trial.world_size <= counts["plain"] <= trial.window_steps * trial.world_size
    phase_steps = max(trial.steps, LOADER_ROUNDS * trial.loader_workers) * trial.world_size
    assert counts["phases"] == min(counts["plain"], phase_steps)  # both windows are longer if loaders fall behind
    assert set(steps["rank"]) == set(range(trial.world_size))
    phases = steps[steps["window"] == "phases"]
    parts = phases.reindex(columns=list(PHASES)).sum(axis=1)  # null counts as 0
    assert parts.to_numpy() == pytest.approx(phases["step_s"].to_numpy())


def test_a_workload_that_cannot_work_ends_the_study_before_its_first_trial(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\nfrom trainables.workload import Workload\n"
        "def build(trial):\n    samples = [{'ids': torch.zeros(3), 'labels': torch.zeros(1)}] * 64\n"
        "    return Workload(model=torch.nn.Linear(3, 1), dataset=samples, loss=torch.nn.functional.mse_loss,\n"
        "                    optimizer=torch.optim.AdamW)\n"
    )
    trials = [quick_trial(workload=f"{file}:build", world_size=2, repeat=repeat) for repeat in (0, 1)]
    with pytest.raises(UserCodeError) as error:
        Run(tmp_path / "results", [trials], ranks=LocalProcesses())
    assert "build does not run" in str(error.value) and "dict with keys ids, labels: give Workload.step" in str(
        error.value
    )
    assert list(new_store(tmp_path / "results").records()) == []


class DyingRanks(LocalProcesses):
    """Ranks that die while their group starts."""

    def launcher(self, keeper: Any, name: str, layout: Layout) -> Callable[[], None]:
        def die() -> None:
            raise RankDeathError("process 7 on node host2 (0123abcd) died")

        return die


def test_a_rank_that_dies_at_the_start_is_reported_and_not_blamed_on_the_workload(tmp_path: Path) -> None:
    trial = workload_trial("sound")
    ran = Run(tmp_path, [[trial]], ranks=DyingRanks())
    assert ran.of(trial, "status") == "failed"
    reason = "worker group of 2 ranks did not start: process 7 on node host2 (0123abcd) died"
    assert ran.of(trial, "reason") == reason


def test_a_process_that_dies_or_starts_others_without_end_fails_only_its_trial(tmp_path: Path) -> None:
    dying, forking, after = workload_trial("dies"), workload_trial("forks", data_dir=str(tmp_path)), quick_trial()
    ran = Run(tmp_path / "results", [[dying, forking, after]], ranks=LocalProcesses())
    assert ran.statuses([dying, forking, after]) == ["failed", "failed", "done"]
    assert ran.of(dying, "reason").startswith("rank ")
    assert "rank 1 on node " in ran.of(forking, "reason") and "BlockingIOError" in ran.of(forking, "reason")
    assert len((tmp_path / FORKS).read_text().split()) == 2 * FORKED
    assert_ended(tmp_path / FORKS)


def test_the_report_states_a_rank_that_stopped_and_losses_that_are_not_finite(tmp_path: Path) -> None:
    """A rank that exits with code 0 is a failure too, and the group's next trials run."""
    from tests.support.faulty_workloads import STOPPED_S

    exits, stops, learns_nothing = trials = [
        workload_trial(name, steps=12) for name in ("exits", "stops", "learns_nothing")
    ]
    ran = Run(tmp_path / "results", [trials], ranks=LocalProcesses())
    assert ran.statuses(trials) == ["failed", "done", "done"]
    assert ran.of(exits, "reason").startswith("rank ")
    analysis = analyse(load_reduced(tmp_path / "results"))
    assert analysis.results.damaged == ()
    [paused] = [line for line in trust(analysis) if "seems to have stopped" in line]
    assert stops.trial_id in paused and learns_nothing.trial_id not in paused
    assert "on rank 1" in paused
    shapes = analysis.results.shapes.set_index("trial_id")
    assert STOPPED_S <= shapes["longest_s"].loc[stops.trial_id] < 20 * STOPPED_S
    [diverged] = [line for line in trust(analysis) if "not a finite number" in line]
    assert learns_nothing.trial_id in diverged and stops.trial_id not in diverged


def test_what_the_running_trials_do_is_reported_when_it_changes(tmp_path: Path) -> None:
    seen: list[Mapping[str, str]] = []

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        keeper.window_starting("plain steps")
        while {job.id: "plain steps"} not in seen:
            time.sleep(0.01)
        return measured(job, keeper)

    ran = Run(tmp_path, [SIZES[:1]], play, on_activity=seen.append)
    assert ran.statuses(SIZES[:1]) == ["done"]
    expected = [{SIZES[0].trial_id: doing} for doing in (GROUP_STARTING, BUILDING, "plain steps")]
    reported = [expected.index(dict(activity)) for activity in seen if activity]  # quick changes may be skipped
    assert reported == sorted(set(reported)) and reported[-1] == 2
