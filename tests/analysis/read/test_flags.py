"""Trials of a user's own script as rows: a column per flag, and the batch that the probe saw."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from analysis.predict.inputs import with_models
from analysis.read.results import Results, load
from analysis.report.methods import methods
from analysis.study import analyse
from analysis.tables.phases import unmeasured
from analysis.tables.trials import again
from analysis.verdict.facts import facts_line
from study.store.result import TrialResult
from study.store.store import Store
from trainables.trial import Trial

STEP_S = 0.01


def save(store: Store, flags: str, world_size: int, samples: int | None, passes: int = 1, **fields: Any) -> Trial:
    """Save a trial of a script that processed `samples` per rank and step, in `passes` backward passes."""
    trial = Trial(
        script="/home/me/train.py", script_arguments="--data /d", script_flags=flags, world_size=world_size, **fields
    )
    rows = [
        {"rank": rank, "window": "plain", "step": step, "samples": samples, "window_s": 3 * STEP_S, "step_s": STEP_S}
        for rank in range(world_size)
        for step in range(3)
    ]
    nulls = {"host_to_device_s": "no copy from host to device was seen"}
    probe = {"samples_per_step": samples, "micro_batches": passes, "nulls": nulls}
    ranks = [{"rank": rank, "node_id": "a", "device": "cpu", "probe": probe} for rank in range(world_size)]
    environment = {"nodes": [{"node_id": "a", "host": "h", "cpu_model": "cpu"}], "ranks": ranks}
    store.save(
        TrialResult(
            trial=trial, status="done", steps=pa.Table.from_pylist(rows), environment=environment, worker_group="g",
            started_at=0.0, duration_s=1.0,
        )
    )  # fmt: skip
    return trial


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path), name="train", question="?", configuration={}, versions={}, command="run")


def results(store: Store) -> Results:
    return load(store.out)


def test_a_flag_that_sets_the_batch_gives_way_to_the_batch_that_was_seen(store: Store) -> None:
    """The flag is the batch of all ranks, as in PyTorch's ImageNet example, so one value is a strong series."""
    for size in (1, 2):
        for batch in (16, 32):
            save(store, f"--batch-size {batch}", size, batch // size)
    analysis = analyse(results(store))
    assert analysis.axes == ("world_size", "batch_per_gpu")
    strong = analysis.scaling[analysis.scaling["scaling"] == "strong"]
    weak = analysis.scaling[analysis.scaling["scaling"] == "weak"]
    assert sorted(strong["world_size"]) == [1, 1, 2, 2]
    assert strong.set_index("world_size")["efficiency"].to_dict() == pytest.approx({1: 1.0, 2: 0.5})
    assert list(weak["world_size"]) == [1, 2]
    assert list(weak["efficiency"]) == pytest.approx([1.0, 1.0])


def test_a_flag_that_does_not_set_the_batch_stays_an_axis(store: Store) -> None:
    for size in (1, 2):
        for flags in ("--lr 0.1", "--lr 0.1 --amp", "--lr 10", "--lr 10 --amp"):
            save(store, flags, size, 16)
    trials = results(store).trials
    assert set(trials["--lr"]) == {0.1, 10}
    assert set(trials["--amp"]) == {True, False}
    assert set(analyse(results(store)).axes) == {"world_size", "--lr", "--amp"}


def test_accumulated_batches_are_one_batch_per_backward_pass(store: Store) -> None:
    save(store, "", 2, 64, passes=4)
    [configuration] = analyse(results(store)).configurations.to_dict("records")
    assert configuration["batch_per_gpu"] == 16
    assert configuration["accumulation_steps"] == 4
    assert configuration["global_batch"] == 128
    assert configuration["throughput_samples_per_s"] == pytest.approx(2 * 64 / STEP_S)


def test_an_unknown_batch_is_missing_and_never_the_default(store: Store) -> None:
    save(store, "--lr 1", 1, 16)
    save(store, "--lr 2", 1, None)
    trials = results(store).trials.set_index("--lr")
    assert trials.loc[1, "batch_per_gpu"] == 16
    assert trials["batch_per_gpu"].isna().to_dict() == {1: False, 2: True}
    assert list(analyse(results(store)).configurations["batch_per_gpu"]) == [16]


def test_fields_that_a_script_does_not_read_are_no_columns(store: Store) -> None:
    save(store, "", 1, 16, bindings="loader_workers=--workers", loader_workers=3)
    [row] = results(store).trials.to_dict("records")
    assert row["loader_workers"] == 3
    assert not {"model", "precision", "learning_rate", "parallel"} & set(row)


def test_the_command_of_a_trial_runs_its_script_with_its_flags(store: Store) -> None:
    save(store, "--lr 0.5 --amp", 2, 16, script_env="A='b c'")
    frame = results(store)
    [row] = frame.trials.to_dict("records")
    command = again(row, [], frame.fields)
    assert command.startswith("python -m study.scaling run --script /home/me/train.py")
    assert "--gpus 2 " in command
    assert "'--env=A=b c'" in command
    assert command.endswith("-- --data /d --lr 0.5 --amp")
    assert "--add-ddp" not in command


def test_the_command_of_a_trial_adds_ddp_if_the_trial_did(store: Store) -> None:
    save(store, "", 2, 16, add_ddp=True)
    frame = results(store)
    [row] = frame.trials.to_dict("records")
    assert " --add-ddp " in again(row, [], frame.fields)
    analysis = analyse(frame)
    assert facts_line(analysis)[0] == "train.py with added DDP"
    assert methods(with_models(analysis)).split("\n")[2].startswith("We trained train.py with added DDP, with ")


def test_what_was_not_measured_is_listed_with_what_would_measure_it(store: Store) -> None:
    for size in (1, 2):
        save(store, "", size, 16)
    frame = unmeasured(analyse(results(store))).frame.set_index("quantity")
    assert frame.loc["host to device", "trials"] == 2
    assert frame.loc["host to device", "reason"] == "no copy from host to device was seen"
    assert (frame["measured_by"] == "--workload").all()
