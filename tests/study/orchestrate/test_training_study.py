"""Trainings on CPU ranks under real Ray: concurrent, killed, and resumed from checkpoints."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray

from study.orchestrate.cluster import Cluster
from study.orchestrate.protocol import Event
from study.orchestrate.tune import run_trials
from study.store import checkpoints
from study.store.store import Store
from tests.support.orchestration import new_store, workload_trial
from trainables.trial import Trial

EPOCHS = 8
LONG = 40
"""Number of epochs that takes longer than ending all processes of a killed driver."""


def training(name: str, folder: Path, epochs: int = EPOCHS) -> Trial:
    fields: dict[str, Any] = {"epochs": epochs, "world_size": 1, "batch_per_gpu": 32, "deterministic": True}
    return workload_trial(name, data_dir=str(folder), **fields)


def trainings(folder: Path) -> list[Trial]:
    """Return a training, one with a rank that dies once, and one that takes longer than ending a killed driver."""
    return [training("trains", folder), training("dies_once", folder), training("trains", folder, LONG)]


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


DRIVER = """
import json
import sys
from pathlib import Path
from study.orchestrate.cluster import connect
from study.orchestrate.tune import run_trials
from tests.support.orchestration import new_store
from tests.study.orchestrate.test_training_study import trainings

class Log:
    def __init__(self, path):
        self.path = path

    def __call__(self, event):
        line = [event.kind, event.trial.trial_id if event.trial else None, event.summary]
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)

with connect(sys.argv[2]) as cluster:
    folder = Path(sys.argv[1])
    options = {"max_concurrent": 2, "checkpoint_every_s": 0.0, "on_event": Log(str(folder / "events"))}
    run_trials("test", [trainings(folder)], new_store(folder / "results"), cluster, **options)
"""


def test_a_killed_rank_ends_only_its_training_and_the_next_driver_resumes_it_and_those_of_a_killed_driver(
    cluster: Cluster, local_ray: str, tmp_path: Path
) -> None:
    sound, dying, long = trainings(tmp_path)
    with (tmp_path / "driver.log").open("w") as log:
        environment = os.environ | {"PYTHONPATH": os.getcwd()}
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), local_ray], stdout=log, stderr=log, env=environment
        )
    store = new_store(tmp_path / "results")
    checkpoint = tmp_path / "results" / "checkpoints" / long.trial_id / "latest.pt"
    deadline_s = time.monotonic() + 300
    while not checkpoint.exists() or store.statuses() != {sound.trial_id: "done", dying.trial_id: "failed"}:
        assert driver.poll() is None and time.monotonic() < deadline_s, (tmp_path / "driver.log").read_text()
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert store.statuses().keys() == {sound.trial_id, dying.trial_id}, "the driver was killed too late"
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:  # until its ranks have ended
        assert time.monotonic() < deadline_s
        time.sleep(0.1)

    records = {record["trial_id"]: record for record in store.records()}
    assert re.match(r"rank 0 on node .* died: ", records[dying.trial_id]["reason"])
    assert records[sound.trial_id]["environment"]["ranks"][0]["concurrent"] == 2
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    kinds = [(kind, trial_id) for kind, trial_id, _ in events if trial_id]
    assert kinds.index(("trial_started", dying.trial_id)) < kinds.index(("trial_ended", sound.trial_id))
    epochs = [row["epoch"] for kind, trial_id, row in events if (kind, trial_id) == ("epoch_ended", sound.trial_id)]
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) >= EPOCHS - 3, "polled once per second"
    [end] = [row for kind, trial_id, row in events if (kind, trial_id) == ("trial_ended", sound.trial_id)]
    assert end["epoch"] == EPOCHS
    assert end["validation_top1"] == curve(store, sound)[-1]["validation_top1"]
    assert end["throughput_samples_per_s"] > 0
    assert checkpoints.load(store, sound.trial_id) is None
    assert checkpoints.load(store, dying.trial_id) is not None

    resumed = ObservedRun([dying, long], store, cluster)
    assert {trial.trial_id: resumed.records[trial.trial_id]["status"] for trial in (dying, long)} == {
        dying.trial_id: "done", long.trial_id: "done",
    }  # fmt: skip
    assert min(resumed.epochs_of(dying)) == 3
    assert min(resumed.epochs_of(long)) > 1
    assert curve(store, dying) == curve(store, sound), "equal to the uninterrupted training with the same seed"
    assert [row["epoch"] for row in curve(store, long)] == list(range(1, LONG + 1))
    assert not Path(store.root, "checkpoints").exists()
