"""Scripts and train functions in a run: the check before the grid, failures as rows, the end of hopeless studies."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.read.results import load
from analysis.study import analyse
from study.capacity import NodeCapacity
from study.errors import DONE, SOME_FAILED
from study.orchestrate.driver import UserCodeError
from study.orchestrate.measure import place_of, probe_job
from study.orchestrate.protocol import Failure, Job, KeeperProxy, KnownTrials, Payload
from study.orchestrate.twin.in_process import local_cluster, run_trials
from study.orchestrate.twin.local_ranks import LocalProcesses
from study.orchestrate.twin.simulated_ranks import Play, SimulatedRanks, simulated_payloads
from study.plan.placement import ProcessKind
from study.scaling import main
from study.store.store import Store
from tests.support.orchestration import new_store
from tests.support.twin import replace_ray
from trainables.trial import Trial

EXAMPLES = Path(__file__).parent.parent.parent.parent / "examples"
NODES = [NodeCapacity("node-a", "localhost", cpus=2, gpus=0)]
QUICK: dict[str, Any] = {"steps": 3, "warmup_steps": 6, "communication_steps": 2, "sweep_bytes": 2**12}


def script_trial(path: str, flags: str = "", **fields: Any) -> Trial:
    return Trial(**{**QUICK, "script": path, "script_digest": "0", "script_flags": flags, **fields})


# ------------------------------------------------------------------------------- policy, on simulated ranks


def failing(line: str, of: Callable[[Job], bool], **facts: Any) -> Play:
    """Return ranks of which the last fails with `line` in the jobs that `of` selects; the others follow."""

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        payloads = list(simulated_payloads(job.trial))
        if of(job):
            ranks = range(len(payloads))
            failures = [Failure(rank, "node-a", False, "rank failed", "", is_consequence=True) for rank in ranks[:-1]]
            failures.append(
                Failure(ranks[-1], "node-a", line=line, traceback="log", **{"out_of_memory": False} | facts)
            )
            return [replace_failure(payload, failure) for payload, failure in zip(payloads, failures, strict=True)]
        return payloads

    return play


def replace_failure(payload: Payload, failure: Failure) -> Payload:
    return Payload(payload.tables, payload.evidence, 0.0, 1.0, failure=failure)


def run(folder: Path, trials: Sequence[Trial], play: Play, known: KnownTrials | None = None) -> dict[str, Any]:
    """Run trials on simulated ranks and return their records by trial id."""
    store = new_store(folder)
    run_trials("test", [trials], store, local_cluster(NODES), ranks=SimulatedRanks(play), known=known)
    return {record["trial_id"]: record for record in store.records()}


SIZES = [script_trial("/x/train.py", f"--batch-size {batch}", world_size=size) for size in (1, 2) for batch in (8, 16)]


def is_check(job: Job) -> bool:
    return job.id.startswith("check-")


def test_a_script_is_checked_once_on_the_fewest_ranks_before_the_grid(tmp_path: Path) -> None:
    jobs: list[Job] = []

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        jobs.append(job)
        return simulated_payloads(job.trial)

    records = run(tmp_path, SIZES, play)
    assert [is_check(job) for job in jobs] == [True, False, False, False, False]
    assert (jobs[0].trial.world_size, jobs[0].trial.steps) == (1, 2)
    assert set(records) == {trial.trial_id for trial in SIZES}
    assert {job.directory for job in jobs} == {os.getcwd()}


def test_a_script_that_fails_its_check_starts_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError) as error:
        run(tmp_path, SIZES, failing("the script exited with code 3", is_check))
    assert "train.py does not run: rank 0" in str(error.value)
    assert "the script exited with code 3" in str(error.value)
    assert error.value.exit_code == SOME_FAILED
    assert not list(tmp_path.glob("trials/*"))


def test_a_check_that_runs_out_of_memory_refuses_nothing(tmp_path: Path) -> None:
    records = run(tmp_path, SIZES, failing("no memory", is_check, out_of_memory=True))
    assert {record["status"] for record in records.values()} == {"done"}


def test_the_reason_is_that_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    bad = SIZES[2]
    records = run(tmp_path, SIZES, failing("ValueError: broken", lambda job: job.trial == bad))
    assert records[bad.trial_id]["status"] == "failed"
    assert records[bad.trial_id]["reason"].startswith("rank 1 on node")
    assert records[bad.trial_id]["reason"].endswith("ValueError: broken")
    assert [record["status"] for record in records.values()].count("done") == 3
    assert len({record["worker_group"] for record in records.values()}) == 1  # a script's failure ends no group


@pytest.mark.parametrize(
    ("facts", "status"), [({"out_of_memory": True}, "out_of_memory"), ({"timed_out": True}, "timeout")]
)
def test_memory_and_time_limits_of_scripts_are_statuses(tmp_path: Path, facts: dict[str, bool], status: str) -> None:
    bad = SIZES[1]
    records = run(tmp_path, SIZES, failing("too much", lambda job: job.trial == bad, **facts))
    assert records[bad.trial_id]["status"] == status


def test_two_identical_failures_end_a_study_in_which_nothing_succeeded(tmp_path: Path) -> None:
    known = KnownTrials()
    records = run(tmp_path, SIZES, failing("ValueError: broken", lambda job: not is_check(job)), known)
    assert [record["status"] for record in records.values()] == ["failed", "failed"]
    assert known.unusable == "ValueError: broken"


def test_identical_failures_after_a_success_are_rows(tmp_path: Path) -> None:
    known = KnownTrials()
    records = run(tmp_path, SIZES, failing("ValueError: broken", lambda job: job.trial.world_size == 2), known)
    assert [record["status"] for record in records.values()].count("failed") == 2
    assert known.unusable == ""


def test_a_run_with_results_is_not_checked_again(tmp_path: Path) -> None:
    known = KnownTrials(statuses={"earlier": "done"})
    records = run(tmp_path, SIZES, failing("broken", is_check), known)
    assert {record["status"] for record in records.values()} == {"done"}


def test_a_profiled_script_is_checked_without_its_profiler(tmp_path: Path) -> None:
    checked: list[Job] = []

    def play(job: Job, keeper: KeeperProxy) -> Sequence[Payload]:
        checked.extend([job] if is_check(job) else [])
        return simulated_payloads(job.trial)

    records = run(tmp_path, [script_trial("/x/train.py", profile_ranks="all", world_size=2)], play)
    assert {record["status"] for record in records.values()} == {"done"}
    assert [probe_job(job.trial, 0).trace_steps for job in checked] == [0]


# ------------------------------------------------------------------------------- places and windows of a rank


def test_local_ranks_are_numbered_per_node() -> None:
    places = [place_of(rank, ["a", "b", "a", "b"], "10.0.0.1") for rank in range(4)]
    assert [(place.group_rank, place.local_rank) for place in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert {(place.world_size, place.local_world_size, place.group_world_size) for place in places} == {(4, 2, 2)}


def test_processes_that_start_scripts_are_of_another_kind() -> None:
    kinds = {ProcessKind.of(trial).door for trial in (Trial(), SIZES[0], Trial(train_function="/x/f.py:train"))}
    assert kinds == {"factory", "script", "function"}


def test_one_rank_has_a_trace_only_if_profiled_and_gpus_warm_up_for_longer_and_have_an_issue_window() -> None:
    alone, pair = (probe_job(script_trial("/x/train.py", world_size=size), 0) for size in (1, 2))
    profiled = probe_job(script_trial("/x/train.py", profile_ranks="0"), 0)
    assert (alone.trace_steps, pair.trace_steps, profiled.trace_steps) == (0, 2, 2)
    assert (alone.plain_steps, alone.warmup_steps) == (3, 6)
    on_gpu = probe_job(script_trial("/x/train.py", device="cuda"), 0)
    assert (alone.issue_steps, on_gpu.issue_steps, on_gpu.warmup_steps) == (0, 2, 12)


# ------------------------------------------------------------------------------- real scripts, real ranks

BROKEN = """
import sys, torch
from torch import nn
if "--exit" in sys.argv:
    sys.exit(3)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--large" in sys.argv:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")
for step in range(8 if "--short" in sys.argv else 10_000):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
"""


def test_failures_of_a_real_script_are_rows_with_its_output(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BROKEN)
    trials = [script_trial(str(path), flags, communication_steps=0) for flags in ("", "--large", "--short", "--exit")]
    store = new_store(tmp_path / "results")
    run_trials("test", [trials], store, local_cluster(NODES), ranks=LocalProcesses(), trial_timeout_s=120)
    records = {record["trial"]["script_flags"]: record for record in store.records()}
    statuses = {flags: record["status"] for flags, record in records.items()}
    assert statuses == {"": "done", "--large": "out_of_memory", "--short": "failed", "--exit": "failed"}
    assert "ended after 8 optimizer steps" in records["--short"]["reason"]
    assert "exited with code 3" in records["--exit"]["reason"]
    log = Path(store.trial_folder(records["--large"]["trial_id"]), "error.log").read_text()
    assert "Tried to allocate 8 GiB" in log


def test_the_example_script_is_studied_on_two_ranks(
    results_folder: str, no_figures: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_ray(monkeypatch)
    arguments = (
        f"run --script {EXAMPLES}/train_script.py --gpus 1,2 --vary=--batch-size=16,32 --env OMP_NUM_THREADS=1 "
        f"--steps 4 --repeats 1 --set sweep_bytes=4096 --address local --out {results_folder} -- --hidden 32"
    )
    assert main(shlex.split(arguments)) == DONE
    assert capsys.readouterr().out.strip().endswith("index.html")
    configurations = analyse(load(results_folder)).configurations
    assert sorted(configurations["batch_per_gpu"]) == [16, 16, 32, 32]
    records = Store.at(results_folder).records()
    assert [record["status"] for record in records] == ["done"] * 4
    for record in records:
        check_ranks_of_the_script(record)
    assert main(["status", results_folder]) == DONE
    assert "4 done; 0 left" in capsys.readouterr().out


def check_ranks_of_the_script(record: dict[str, Any]) -> None:
    batch = int(record["trial"]["script_flags"].split()[-1])
    ranks = record["environment"]["ranks"]
    assert [rank["probe"]["samples_per_step"] for rank in ranks] == [batch] * record["trial"]["world_size"]
    assert len({rank["probe"]["steps_run"] for rank in ranks}) == 1  # ended at the same step on all ranks


def test_ranks_of_ray_run_a_script_too(local_ray: str, results_folder: str, no_figures: None) -> None:
    arguments = (
        f"run --script {EXAMPLES}/train_script.py --gpus 2 --vary=--batch-size=16 --env OMP_NUM_THREADS=1 "
        f"--steps 4 --repeats 1 --set sweep_bytes=4096 --address {local_ray} --out {results_folder} -- --hidden 32"
    )
    assert main(shlex.split(arguments)) == DONE
    [record] = Store.at(results_folder).records()
    assert record["status"] == "done"
    check_ranks_of_the_script(record)


SHARING = """
import tempfile
from pathlib import Path

import torch.distributed as dist
from train_function import train_func as example


def train_func(config):
    shared = Path(tempfile.gettempdir(), "prepared")
    if dist.get_rank() == 0:
        shared.touch(exist_ok=False)
    dist.barrier()
    assert shared.exists(), "the ranks of a host have several temporary folders"
    example(config)
"""


def test_the_example_train_function_is_studied_on_two_ranks_that_share_temporary_files(
    local_ray: str, results_folder: str, tmp_path: Path, no_figures: None
) -> None:
    (tmp_path / "train_function.py").write_text((EXAMPLES / "train_function.py").read_text())
    (tmp_path / "sharing.py").write_text(SHARING)
    arguments = (
        f"run --train-func {tmp_path}/sharing.py:train_func --gpus 2 --vary batch_size=16 --steps 4 "
        f"--repeats 1 --set sweep_bytes=4096 --address {local_ray} --out {results_folder}"
    )
    assert main(shlex.split(arguments)) == DONE
    [record] = Store.at(results_folder).records()
    assert record["status"] == "done"
    assert [rank["probe"]["samples_per_step"] for rank in record["environment"]["ranks"]] == [16, 16]


def test_a_script_that_does_not_run_ends_the_command_with_one_line(
    results_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_ray(monkeypatch)
    path = tmp_path / "train.py"
    path.write_text("import a_module_that_is_not_installed\n")
    arguments = f"run --script {path} --gpus 1,2 --address local --out {results_folder}"
    assert main(shlex.split(arguments)) == SOME_FAILED
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "No module named 'a_module_that_is_not_installed' (train.py:1)" in errors[0]
    assert Store.at(results_folder).records() == []


@pytest.mark.parametrize("name", ["train_script.py", "train_function.py"])
def test_an_example_is_short_and_names_its_command(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 40
    assert f"python -m study.scaling run --{'script' if 'script' in name else 'train-func'} examples/{name}" in text
