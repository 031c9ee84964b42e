"""Trainings on CPU ranks under real Ray: concurrent, killed, and resumed from checkpoints."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from study.orchestrate.cluster import Cluster
from study.orchestrate.protocol import Event
from study.orchestrate.tune import run_trials
from study.store import checkpoints
from study.store.store import Store
from tests.support.orchestration import new_store, workload_trial
from tests.support.trials import quick_trial
from trainables.trial import Trial

pytestmark = pytest.mark.timeout(600)

EPOCHS = 8
LONG = 40
"""Number of epochs that takes longer than ending all processes of a killed driver."""


def training(name: str, folder: Path, epochs: int = EPOCHS) -> Trial:
    fields: dict[str, Any] = {"epochs": epochs, "world_size": 1, "batch_per_gpu": 32, "deterministic": True}
    return workload_trial(name, data_dir=str(folder), **fields)


class ObservedRun:
    """A run of trials, up to two of them concurrent, with its events and records."""

    def __init__(self, trials: list[Trial], store: Store, cluster: Cluster):
        self.events: list[Event] = []
        assert run_trials(
            "test", [trials], store, cluster, max_concurrent=2, checkpoint_every_s=0.0, on_event=self.events.append
        ) is False  # fmt: skip
        self.records = {record["trial_id"]: record for record in store.records()}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks

    def epochs_of(self, trial: Trial) -> list[int]:
        """Return the epochs that this trial reported while it ran."""
        return [event.summary["epoch"] for event in self.events if event.kind == "epoch_ended" and event.trial == trial]


def curve(store: Store, trial: Trial) -> list[dict[str, Any]]:
    """Return a training's stored epochs without times."""
    rows = pq.read_table(f"{store.trial_folder(trial.trial_id)}/epochs.parquet").to_pylist()
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]


def test_a_killed_rank_ends_only_its_own_training_which_resumes_in_the_next_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    store = new_store(tmp_path / "results")
    timed, sound, dying = quick_trial(), training("trains", tmp_path), training("dies_once", tmp_path)
    first = ObservedRun([sound, timed, dying], store, cluster)
    statuses = {trial_id: record["status"] for trial_id, record in first.records.items()}
    assert statuses == {timed.trial_id: "done", sound.trial_id: "done", dying.trial_id: "failed"}
    assert re.match(r"rank 0 on node .* died: ", first.records[dying.trial_id]["reason"])

    kinds = [(event.kind, event.trial) for event in first.events if event.trial]
    assert kinds.index(("trial_ended", timed)) < kinds.index(("trial_started", sound)), "timed trials run alone"
    assert kinds.index(("trial_started", dying)) < kinds.index(("trial_ended", sound))
    ranks = {trial.trial_id: first.records[trial.trial_id]["environment"]["ranks"] for trial in (timed, sound)}
    assert [ranks[trial.trial_id][0]["concurrent"] for trial in (timed, sound)] == [1, 2]

    epochs = first.epochs_of(sound)
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) >= EPOCHS - 3, "polled once per second"
    [end] = [event for event in first.events if event.kind == "trial_ended" and event.trial == sound]
    assert end.summary["epoch"] == EPOCHS
    assert end.summary["validation_top1"] == curve(store, sound)[-1]["validation_top1"]
    assert end.summary["throughput_samples_per_s"] > 0

    assert checkpoints.load(store, sound.trial_id) is None
    assert checkpoints.load(store, dying.trial_id) is not None
    second = ObservedRun([dying], store, cluster)
    assert second.records[dying.trial_id]["status"] == "done"
    assert min(second.epochs_of(dying)) == 3
    assert curve(store, dying) == curve(store, sound), "equal to the uninterrupted training with the same seed"
    assert not Path(store.root, "checkpoints").exists()


DRIVER = """
import sys
from pathlib import Path
from study.orchestrate.cluster import connect
from study.orchestrate.tune import run_trials
from tests.support.orchestration import new_store
from tests.study.orchestrate.test_training_study import LONG, training

with connect(sys.argv[2]) as cluster:
    folder = Path(sys.argv[1])
    trials = [[training("trains", folder, LONG)]]
    run_trials("test", trials, new_store(folder / "results"), cluster, checkpoint_every_s=0.0)
"""


def test_the_next_driver_resumes_from_the_checkpoint_of_a_killed_one(
    cluster: Cluster, local_ray: str, tmp_path: Path
) -> None:
    trial = training("trains", tmp_path, LONG)
    with (tmp_path / "driver.log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), local_ray], stdout=log, stderr=log, env=environment
        )
    checkpoint = tmp_path / "results" / "checkpoints" / trial.trial_id / "latest.pt"
    deadline_s = time.monotonic() + 300
    while not checkpoint.exists():
        assert driver.poll() is None and time.monotonic() < deadline_s, (tmp_path / "driver.log").read_text()
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:  # until its ranks have ended
        assert time.monotonic() < deadline_s
        time.sleep(0.1)

    store = new_store(tmp_path / "results")
    assert store.statuses() == {}
    second = ObservedRun([trial], store, cluster)
    assert second.records[trial.trial_id]["status"] == "done"
    assert min(second.epochs_of(trial)) > 1
    assert [row["epoch"] for row in curve(store, trial)] == list(range(1, LONG + 1))
    assert not Path(store.root, "checkpoints").exists()
