"""`serve` on two real gloo ranks: it serves trials in any order and reports failures before it ends."""

import gzip
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from analysis.read.schema import SCHEMAS
from study.orchestrate.failures import describe_failure, first_line, is_out_of_memory
from study.orchestrate.processes.ranks import ENDED, _send_end
from study.orchestrate.protocol import Environment, Failure, Job, KeeperProxy, Payload, RankProcess
from study.orchestrate.rank import serve
from study.plan.placement import Layout, ProcessKind
from tests.support.gloo import RankFailed, on_ranks
from tests.support.trials import quick_pair
from trainables.trial import Trial

CPU = torch.device("cpu")
PAIR = quick_pair(sweep_bytes=16, deterministic=True)
ALONE = PAIR.but(world_size=1)
ORDER = {
    "first": ALONE,
    "second": PAIR,
    "third": PAIR.but(precision="bf16"),
    "fourth": ALONE,
    "fifth": PAIR,
    "profiled": PAIR.but(profile_ranks="1"),
}

WORKLOADS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import Workload

def sound(trial, fail=lambda: None):
    def loss(output, target):
        fail()
        return nn.functional.mse_loss(output, target)

    return Workload(
        model=nn.Linear(4, 1), dataset=TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))

def wrong_on_rank_1(trial):
    def fail():
        if dist.get_rank() == 1:
            raise ArithmeticError("these targets are wrong\\nand this is the second line")
    return sound(trial, fail)

def too_large(trial):
    return sound(trial, lambda: torch.empty(10**15))
"""


class RecordingKeeper:
    """A keeper of one rank that records all calls. Calling it calls one of its methods."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.environments: list[Environment] = []
        self.processes: list[RankProcess] = []
        self.results: dict[str, Sequence[Payload]] = {}
        self.failures: list[Failure] = []
        self.windows: dict[str, list[str]] = {}
        self.epochs: dict[str, list[dict[str, Any]]] = {}
        self.checkpoints: dict[str, bytes] = {}
        self.raised: str | None = None

    def __call__(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def rank_starting(self, group: str, process: RankProcess) -> None:
        self.processes.append(process)

    def opened(self, group: str, environment: Environment) -> None:
        self.environments.append(environment)

    def next_job(self, group: str) -> Job | None:
        return self.jobs.pop(0) if self.jobs else None

    def finished(self, group: str, job_id: str, payloads: Sequence[Payload]) -> None:
        self.results[job_id] = payloads

    def window_starting(self, group: str, job_id: str, window: str) -> None:
        self.windows.setdefault(job_id, []).append(window)

    def epoch_ended(self, group: str, job_id: str, row: dict[str, Any]) -> None:
        self.epochs.setdefault(job_id, []).append(row)

    def load_checkpoint(self, group: str, job_id: str) -> bytes | None:
        return self.checkpoints.get(job_id)

    def save_checkpoint(self, group: str, job_id: str, content: bytes) -> None:
        self.checkpoints[job_id] = content

    def rank_failed(self, group: str, failure: Failure) -> None:
        self.failures.append(failure)


def job(job_id: str, trial: Trial, source: str | None = None) -> Job:
    return Job(job_id, trial, source, checkpoint_every_s=0.0)


def serve_jobs(rank: int, jobs: list[Job], node_ids: tuple[str, ...]) -> RecordingKeeper:
    """Serve jobs and return the rank's keeper. The rank is on node "a"; the layout plans `node_ids`."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as Ray does
    reports = RecordingKeeper(jobs if rank == 0 else [])
    layout = Layout(ProcessKind.of(PAIR), node_ids, (1, 2))
    try:
        serve(layout, "a", f"process of rank {rank}", CPU, KeeperProxy(reports, "group"))
    except Exception as error:  # noqa: BLE001 - without a keeper to end the other ranks, they end by themselves
        reports.raised = first_line(error)
        dist.destroy_process_group()
    return reports


# --------------------------------------------------------------------------------------------------------- serving


@pytest.fixture(scope="module")
def served() -> list[RecordingKeeper]:
    return on_ranks(2, serve_jobs, [job(name, trial) for name, trial in ORDER.items()], ("a", "a"))


def table(payload: Payload, name: str = "steps") -> pa.Table:
    return pa.ipc.open_stream(payload.tables[name]).read_all()


def test_trials_of_any_size_are_served_in_any_order(served: list[RecordingKeeper]) -> None:
    assert list(served[0].results) == list(ORDER)
    for name, trial in ORDER.items():
        payloads = served[0].results[name]
        assert len(payloads) == trial.world_size
        for rank, payload in enumerate(payloads):
            for kind, schema in SCHEMAS.items():
                rows = table(payload, kind)
                assert rows.schema.equals(schema)
                if kind in ("epochs", "collectives"):
                    assert rows.num_rows == 0, "timed trials have no epochs, and only scripts have collectives"
                    continue
                assert set(rows["rank"].to_pylist()) == ({rank} if kind == "steps" or trial.world_size > 1 else set())
            windows = table(payload)["window"].to_pylist()
            assert windows[:8] == ["warmup", "warmup", "plain", "phases", "phases", "plain", "phases", "plain"]
            assert payload.started_at < payload.ended_at


def test_each_rank_reports_its_state_before_and_after(served: list[RecordingKeeper]) -> None:
    for payload in served[0].results["second"]:
        evidence = payload.evidence.record()
        assert evidence.keys() == {
            "before", "after", "memory", "threads", "peak_memory_by_device_bytes", "step_flops", "dataset_samples",
            "plain_window",
        }  # fmt: skip
        assert evidence["plain_window"] == {when: [{"energy_j": None, "at": None}] for when in ("before", "after")}
        assert evidence["dataset_samples"] == 10_000
        assert evidence["before"].keys() == evidence["after"].keys()
        assert evidence["before"]["load_average_1min"] >= 0
        assert evidence["before"]["power_w"] is None
        assert evidence["memory"] == {"before_bytes": None, "after_bytes": None}
        assert evidence["threads"] == 1


def test_only_profiled_ranks_return_a_trace(served: list[RecordingKeeper]) -> None:
    for name, payloads in served[0].results.items():
        assert [payload.trace is not None for payload in payloads] == [
            name == "profiled" and rank == 1 for rank in range(len(payloads))
        ]
    trace = json.loads(gzip.decompress(served[0].results["profiled"][1].trace or b""))
    assert {"step", "forward", "backward", "optimizer"} <= {event.get("name") for event in trace["traceEvents"]}


def test_the_same_trial_gives_the_same_losses_at_any_position(served: list[RecordingKeeper]) -> None:
    losses = {
        name: [table(payload)["loss"].to_pylist() for payload in payloads]
        for name, payloads in served[0].results.items()
    }
    assert losses["first"] == losses["fourth"]
    assert losses["second"] == losses["fifth"]
    assert losses["second"] != losses["third"], "bf16 rounds"
    assert None not in losses["second"][0]


def test_rank_0_announces_each_window_before_it_starts(served: list[RecordingKeeper]) -> None:
    windows = ["warm-up", "plain steps", "phases of steps", "communication and other windows"]
    assert served[0].windows == {name: windows for name in ORDER}
    assert served[1].windows == {}


def test_only_rank_0_calls_the_keeper_of_a_started_group_unless_a_rank_fails(served: list[RecordingKeeper]) -> None:
    assert [len(reports.environments) for reports in served] == [1, 0]
    assert served[1].results == {}
    assert [reports.failures for reports in served] == [[], []]
    assert [reports.raised for reports in served] == [None, None]


def test_each_rank_reports_its_process_before_and_after_its_imports(served: list[RecordingKeeper]) -> None:
    for rank, reports in enumerate(served):
        assert [(process.rank, process.node_id) for process in reports.processes] == [(rank, "a")] * 2
        assert {process.handle for process in reports.processes} == {f"process of rank {rank}"}


def test_the_environment_lists_every_rank_and_each_node_once(served: list[RecordingKeeper]) -> None:
    [environment] = served[0].environments
    assert [(facts["rank"], facts["node_id"], facts["device"]) for facts in environment.ranks] == [
        (0, "a", "cpu"),
        (1, "a", "cpu"),
    ]
    assert len({facts["pid"] for facts in environment.ranks}) == 2
    assert [node["node_id"] for node in environment.nodes] == ["a"]
    assert environment.versions["torch"] == str(torch.__version__)
    assert environment.variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment.set_by_study == ["CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS"], (
        "the test sets GLOO_SOCKET_IFNAME, not the study"
    )
    assert all(facts["affinity"] == sorted(os.sched_getaffinity(0)) for facts in environment.ranks)


def test_each_rank_reports_the_phases_of_its_start(served: list[RecordingKeeper]) -> None:
    [environment] = served[0].environments
    assert len(environment.startup) == 2
    for startup in environment.startup:
        names = ("process_began", "loop_began", "imported", "context", "grouped", "rehearsed")
        assert list(startup) == [f"{name}_at" for name in names]
        assert sorted(startup.values()) == list(startup.values())


# -------------------------------------------------------------------------------------------------------- training

TRAINED = Trial(model="mlp", world_size=2, batch_per_gpu=500, epochs=3, deterministic=True, resident_data=True)


def serve_a_training_twice(rank: int) -> tuple[RecordingKeeper, RecordingKeeper]:
    """Serve a training, then again from the checkpoint of its second epoch."""
    first = serve_jobs(rank, [job("training", TRAINED), job("timing", PAIR)], ("a", "a"))
    resumed = RecordingKeeper([job("training", TRAINED)] if rank == 0 else [])
    resumed.checkpoints = dict(first.checkpoints)
    serve(Layout(ProcessKind.of(PAIR), ("a", "a"), (1, 2)), "a", "process", CPU, KeeperProxy(resumed, "group"))
    return first, resumed


@pytest.fixture(scope="module")
def trained() -> list[tuple[RecordingKeeper, RecordingKeeper]]:
    return on_ranks(2, serve_a_training_twice)


def test_rank_0_returns_epochs_and_steps_of_a_training_for_all_ranks(
    trained: list[tuple[RecordingKeeper, RecordingKeeper]],
) -> None:
    first, second = (reports.results for reports, _ in trained)
    assert list(first) == ["training", "timing"]
    assert second == {}
    payloads = first["training"]
    epochs = table(payloads[0], "epochs").to_pylist()
    assert [row["epoch"] for row in epochs] == [1, 2, 3]
    assert epochs[-1]["validation_top1"] > 0.5
    assert table(payloads[1], "epochs").num_rows == table(payloads[1]).num_rows == 0
    steps = table(payloads[0])
    assert set(steps["window"].to_pylist()) == {"train"}
    assert steps["epoch"].to_pylist() == [epoch for epoch in (1, 2, 3) for _ in range(10)]
    assert None not in steps["learning_rate"].to_pylist()
    assert all(payload.evidence.before.keys() == payload.evidence.after.keys() for payload in payloads)


def test_rank_0_reports_epochs_and_saves_checkpoints(trained: list[tuple[RecordingKeeper, RecordingKeeper]]) -> None:
    (first, _), (second, _) = trained
    assert [row["epoch"] for row in first.epochs["training"]] == [1, 2, 3]
    assert list(first.checkpoints) == ["training"]
    assert second.epochs == second.checkpoints == {}


def test_an_interrupted_training_resumes_from_its_checkpoint(
    trained: list[tuple[RecordingKeeper, RecordingKeeper]],
) -> None:
    first, resumed = trained[0]
    assert [row["epoch"] for row in resumed.epochs["training"]] == [3], "epochs 1 and 2 are in the checkpoint"
    clocks = ("train_s", "validation_s")
    curves = [
        [
            {name: value for name, value in row.items() if name not in clocks}
            for row in table(reports.results["training"][0], "epochs").to_pylist()
        ]
        for reports in (first, resumed)
    ]
    assert curves[0] == curves[1]


# --------------------------------------------------------------------------------------------------------- failing


@pytest.fixture
def users_file(tmp_path: Path) -> str:
    path = tmp_path / "users_models.py"
    path.write_text(WORKLOADS)
    return str(path)


def users_job(job_id: str, spec: str, world_size: int, source: str | None = None) -> Job:
    fields = {"world_size": world_size, "batch_per_gpu": 4, "warmup_steps": 2, "steps": 2, "communication_steps": 0}
    return job(job_id, Trial.model_validate({"workload": spec} | fields), source)


def test_ranks_on_other_nodes_than_planned_fail() -> None:
    for reports in on_ranks(2, serve_jobs, [job("never", PAIR)], ("a", "b")):
        assert reports.raised is not None and reports.raised.startswith("RuntimeError: ")
        assert "['a', 'a']" in reports.raised and "['a', 'b']" in reports.raised
        assert reports.environments == []
        assert reports.results == {}


def test_a_failing_rank_reports_its_exception_and_ends(users_file: str) -> None:
    jobs = [
        users_job("sound", f"{users_file}:sound", 2),
        users_job("from text", "/on/another/host/from_text.py:sound", 2, WORKLOADS),
        users_job("wrong", f"{users_file}:wrong_on_rank_1", 2),
        users_job("after", f"{users_file}:sound", 2),
    ]
    first, second = on_ranks(2, serve_jobs, jobs, ("a", "a"))
    assert list(first.results) == ["sound", "from text"], "no job is served after a failure"
    [failure] = second.failures
    assert failure.line == second.raised == "ArithmeticError: these targets are wrong"
    assert (failure.rank, failure.node_id, failure.out_of_memory) == (1, "a", False)
    assert f'File "{users_file}"' in failure.traceback
    assert "and this is the second line" in failure.traceback
    assert first.raised is not None, "the other rank's collective breaks"
    assert len(first.failures) == 1


def test_running_out_of_memory_is_distinguished_from_other_failures(users_file: str) -> None:
    [reports] = on_ranks(1, serve_alone, [users_job("large", f"{users_file}:too_large", 1)])
    [failure] = reports.failures
    assert failure.out_of_memory
    assert failure.rank == 0
    assert failure.line.startswith("RuntimeError: ")
    assert "\n" not in failure.line


def serve_alone(rank: int, jobs: list[Job]) -> RecordingKeeper:
    """Serve jobs in a group of one rank."""
    reports = RecordingKeeper(jobs)
    try:
        serve(Layout(ProcessKind.of(ALONE), ("a",), (1,)), "a", None, CPU, KeeperProxy(reports, "group"))
    except Exception as error:  # noqa: BLE001
        reports.raised = first_line(error)
    return reports


def allocation_error() -> BaseException:
    with pytest.raises(RuntimeError) as error:
        torch.empty(10**15)
    return error.value


def test_all_kinds_of_out_of_memory_errors_are_recognized() -> None:
    assert is_out_of_memory(allocation_error())
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(KeyboardInterrupt())


class Wrapped(Exception):
    """Wraps an error as Ray Train does for health checks, and Ray for tasks."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__("A worker health check failed.")
        setattr(self, name, error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Wrapped("health_check_failure", Wrapped("cause", ValueError("one"))), "ValueError: one"),
        (
            Wrapped("controller_failure", ValueError("\x1b[36mray::work()\x1b[39m ended")),
            "ValueError: ray::work() ended",
        ),
        (ValueError("one\ntwo"), "ValueError: one"),
        (ValueError("\n  one\n"), "ValueError: one"),
        (KeyError(), "KeyError"),
        (ValueError("  "), "ValueError"),
        (None, "no reason given"),
    ],
)
def test_the_first_line_of_an_exception_includes_its_class(error: BaseException | None, expected: str) -> None:
    assert first_line(error) == expected


def test_a_failure_has_the_full_traceback_with_causes() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        failure = describe_failure(3, "b", outer)
    assert failure == Failure(3, "b", out_of_memory=False, line="ValueError: outer", traceback=failure.traceback)
    assert "KeyError: 'inner'" in failure.traceback


# ------------------------------------------------------------------------------------- the test helper `on_ranks`


def raise_on_rank_1(rank: int) -> int:
    if rank == 1:
        raise ArithmeticError("on purpose")
    dist.barrier()
    return rank


def end_at_once(rank: int) -> None:
    os._exit(3)


def test_the_helper_raises_the_exception_of_a_rank_while_others_wait() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*ArithmeticError: on purpose"):
        on_ranks(2, raise_on_rank_1)


def test_the_helper_detects_a_rank_that_dies() -> None:
    with pytest.raises(RankFailed, match="rank 0: its process ended without an answer"):
        on_ranks(1, end_at_once)


def sleep(rank: int) -> None:
    time.sleep(3600)


def test_the_helper_stops_waiting_at_its_timeout() -> None:
    with pytest.raises(RankFailed, match=r"no answer in time from ranks \[0, 1\]"):
        on_ranks(2, sleep, timeout_s=1)


class Unsendable(Exception):
    """Takes other arguments than it stores."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_the_exception_that_ends_a_rank_reaches_its_host_with_its_traceback() -> None:
    for error, expected in ((ValueError("no room"), ValueError), (Unsendable("this", "that"), RuntimeError)):
        ours, theirs = multiprocessing.Pipe()
        _send_end(theirs, error)
        method, received = ours.recv()
        assert (method, type(received)) == (ENDED, expected)
        assert str(error) in str(received) and str(error) in received.__notes__[0]
