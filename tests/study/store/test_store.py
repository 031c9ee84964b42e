"""The results folder: what is stored, what a kill leaves, and which folders are refused."""

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from analysis.read.schema import BUCKETS_SCHEMA, SCHEMA_VERSION, STATUSES, STEPS_SCHEMA, SWEEP_SCHEMA
from study.options import recorded_fields
from study.scaling import main
from study.store.result import TrialResult, files_of
from study.store.store import Store, StoreError
from study.store.tables import packed, unpacked
from trainables.trial import Trial

STUDY: dict[str, Any] = {
    "name": "default",
    "question": "How does it scale?",
    "configuration": {"gpus": [1, 2]},
    "versions": {"python": "3.11"},
    "command": "python -m study.scaling",
}


def steps_table(rows: int = 4, step_s: float = 0.5) -> pa.Table:
    return pa.table(
        {
            "rank": [0] * rows,
            "window": ["phases"] * rows,
            "step": list(range(rows)),
            "samples": [32] * rows,
            "step_s": [step_s] * rows,
            "loss": [None] * rows,
        }
    )


def result_of(trial: Trial, status: str = "done", **changes: Any) -> TrialResult:
    steps = steps_table() if status == "done" else None
    given: dict[str, Any] = {"steps": steps, "worker_group": "group-1", "started_at": 1e9, "duration_s": 2.5} | changes
    return TrialResult(trial=trial, status=status, **given)


def open_store(folder: Path, **changes: Any) -> Store:
    return Store.open(str(folder), **(STUDY | changes))


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_saved_trial_is_read_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "out")
    trial = Trial(batch_per_gpu=64, repeat=2)
    environment = {"nodes": [{"node_id": "a", "gpus": []}], "versions": {"torch": "2.11"}}
    store.save(result_of(trial, environment=environment))
    again = Store.at(str(tmp_path / "out"))
    assert again.statuses() == {trial.trial_id: "done"}
    assert again.records() == [
        {
            "schema_version": SCHEMA_VERSION,
            "trial_id": trial.trial_id,
            "trial": trial.model_dump(),
            "status": "done",
            "reason": "",
            "worker_group": "group-1",
            "started_at": 1e9,
            "duration_s": 2.5,
            "environment": environment,
            "log": None,
        }
    ]
    assert Trial.model_validate(again.records()[0]["trial"]) == trial
    assert again.corrupt() == []
    assert again.study() == {"schema_version": SCHEMA_VERSION, "fields": recorded_fields()} | STUDY
    assert files_below(tmp_path / "out") == [
        "study.json",
        f"trials/{trial.trial_id}/steps.parquet",
        f"trials/{trial.trial_id}/trial.json",
    ]


def test_steps_are_cast_to_the_schema_and_missing_columns_are_null(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial))
    steps = pq.read_table(f"{store.trial_folder(trial.trial_id)}/steps.parquet")
    assert steps.schema.equals(STEPS_SCHEMA)
    assert steps["step"].to_pylist() == [0, 1, 2, 3]
    assert steps["step_s"].to_pylist() == [0.5] * 4
    assert steps["loss"].null_count == steps["host_to_device_bytes"].null_count == 4


def test_steps_with_an_unknown_column_are_refused(tmp_path: Path) -> None:
    steps = steps_table().append_column("forward_ms", pa.array([1.0] * 4))
    with pytest.raises(ValueError, match="table 'steps' has columns that are not in its schema: forward_ms"):
        open_store(tmp_path).save(result_of(Trial(), steps=steps))


def test_steps_without_a_rank_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="'rank' is declared non-nullable but contains nulls"):
        store.save(result_of(Trial(), steps=steps_table().drop_columns(["rank"])))
    assert store.statuses() == {}


BUCKETS: list[dict[str, Any]] = [
    {"rank": 0, "window": "communication", "step": 9, "bucket": number, "bytes": 2**20, "ready_s": 0.1, "end_s": 0.3}
    for number in range(2)
]
SWEEP: list[dict[str, Any]] = [{"rank": 1, "bytes": 4, "repetition": 0, "seconds": 1e-5}]


def explained_result(trial: Trial, **changes: Any) -> TrialResult:
    """Return a result with buckets, a sweep, and traces of two ranks."""
    buckets, sweep = pa.Table.from_pylist(BUCKETS), pa.Table.from_pylist(SWEEP)
    return result_of(trial, **{"buckets": buckets, "sweep": sweep, "traces": {0: b"first", 11: b"last"}} | changes)


EXPLAINED = [
    "buckets.parquet",
    "steps.parquet",
    "sweep.parquet",
    "traces/rank0.json.gz",
    "traces/rank11.json.gz",
    "trial.json",
]


def test_buckets_sweep_and_traces_are_saved_with_the_steps(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial(world_size=2)
    store.save(explained_result(trial))
    folder = Path(store.trial_folder(trial.trial_id))
    assert files_below(folder) == EXPLAINED
    for name, schema, rows in (("buckets", BUCKETS_SCHEMA, BUCKETS), ("sweep", SWEEP_SCHEMA, SWEEP)):
        kept = pq.read_table(folder / f"{name}.parquet")
        assert kept.schema.equals(schema)
        assert kept.to_pylist() == rows
    assert (folder / "traces/rank11.json.gz").read_bytes() == b"last"
    assert store.statuses() == {trial.trial_id: "done"} and store.corrupt() == []
    failed = Trial(world_size=2, repeat=1)
    store.save(explained_result(failed, status="failed", steps=steps_table()))
    assert files_below(Path(store.trial_folder(failed.trial_id))) == EXPLAINED
    store.save(result_of(failed))
    folder = Path(store.trial_folder(failed.trial_id))
    assert files_below(folder) == ["steps.parquet", "trial.json"], "files of the earlier result are removed"


@pytest.mark.parametrize(
    ("table", "wrong", "message"),
    [
        ("buckets", {"ready_ms": 1.0}, "table 'buckets' has columns that are not in its schema: ready_ms"),
        ("sweep", {"seconds": None}, "'seconds' is declared non-nullable but contains nulls"),
    ],
)
def test_a_table_that_does_not_match_its_schema_is_refused(
    tmp_path: Path, table: str, wrong: dict[str, Any], message: str
) -> None:
    store = open_store(tmp_path)
    [row] = {"buckets": BUCKETS[:1], "sweep": SWEEP}[table]
    with pytest.raises(ValueError, match=message):
        store.save(explained_result(Trial(), **{table: pa.Table.from_pylist([row | wrong])}))
    assert store.statuses() == {}


def test_rows_of_all_ranks_become_one_table_of_the_schema() -> None:
    first, second = ([row | {"rank": rank} for row in BUCKETS] for rank in (0, 1))
    table = unpacked([packed("buckets", first), packed("buckets", second)])
    assert table.schema.equals(BUCKETS_SCHEMA)
    assert table.to_pylist() == first + second
    assert unpacked([packed("sweep", []), packed("sweep", [])]).num_rows == 0


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "done"])
def test_a_trial_that_did_not_finish_keeps_its_reason_and_log(tmp_path: Path, status: str) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial, status, reason="it broke", log="rank 0: Traceback \udcff"))
    record = store.records()[0]
    assert (record["status"], record["reason"], record["log"]) == (status, "it broke", "error.log")
    log = Path(store.trial_folder(trial.trial_id), "error.log").read_text()
    assert log.startswith("rank 0: Traceback")


def test_a_done_result_needs_steps() -> None:
    with pytest.raises(ValueError, match="'done' needs steps"):
        result_of(Trial(), "done", steps=None)


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="status 'crashed' is not known; allowed: done, out_of_memory, failed"):
        result_of(Trial(), "crashed")


def test_a_second_result_replaces_the_first_and_its_files(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial, "failed", log="Traceback"))
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done"}
    folder = Path(store.trial_folder(trial.trial_id))
    assert files_below(folder) == ["steps.parquet", "trial.json"]
    assert list((tmp_path / ".partial").iterdir()) == []


def test_an_incomplete_trial_is_not_done(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial))
    Path(store.trial_folder(trial.trial_id), "trial.json").unlink()
    assert store.statuses() == {} and store.corrupt() == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"schema_version": 1}'])
def test_a_corrupt_trial_is_listed_until_it_is_saved_again(tmp_path: Path, content: bytes) -> None:
    store, trial, other = open_store(tmp_path), Trial(), Trial(seed=1)
    store.save(result_of(trial))
    store.save(result_of(other))
    Path(store.trial_folder(trial.trial_id), "trial.json").write_bytes(content)
    assert store.statuses() == {other.trial_id: "done"}
    assert store.corrupt() == [trial.trial_id]
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done", other.trial_id: "done"}
    assert store.corrupt() == []


def test_a_done_trial_without_its_steps_file_is_corrupt(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial))
    Path(store.trial_folder(trial.trial_id), "steps.parquet").unlink()
    assert store.statuses() == {} and store.corrupt() == [trial.trial_id]


def truncate(path: Path, kept_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:kept_bytes])


@pytest.mark.parametrize("name", ["steps", "buckets"])
@pytest.mark.parametrize("kept_bytes", [0, 4, 11, -1, -4, -40])
def test_a_done_trial_with_a_truncated_table_is_corrupt(tmp_path: Path, name: str, kept_bytes: int) -> None:
    store, trial, other = open_store(tmp_path), Trial(), Trial(seed=1)
    buckets = pa.Table.from_pylist(
        [dict.fromkeys(BUCKETS_SCHEMA.names, 1) | {"window": "communication"}], BUCKETS_SCHEMA
    )
    store.save(result_of(trial, buckets=buckets))
    store.save(result_of(other))
    truncate(Path(store.trial_folder(trial.trial_id), f"{name}.parquet"), kept_bytes)
    assert store.statuses() == {other.trial_id: "done"} and store.corrupt() == [trial.trial_id]
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done", other.trial_id: "done"} and store.corrupt() == []


def test_a_table_without_a_parquet_footer_is_corrupt(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial))
    path = Path(store.trial_folder(trial.trial_id), "steps.parquet")
    content = path.read_bytes()
    for tail in (bytes(8), b"\xff\xff\xff\x7fPAR1"):
        path.write_bytes(content[:-8] + tail)
        assert store.corrupt() == [trial.trial_id]
    path.write_bytes(content)
    assert store.corrupt() == []


def test_in_an_object_store_an_empty_table_is_corrupt() -> None:
    filesystem = fs.PyFileSystem(fs.FSSpecHandler(MemoryFileSystem()))
    store, trial = Store.open("truncate", filesystem=filesystem, **STUDY), Trial()
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done"}
    with filesystem.open_output_stream(f"truncate/trials/{trial.trial_id}/steps.parquet") as file:
        file.write(b"")
    assert store.statuses() == {} and store.corrupt() == [trial.trial_id]


def test_a_trial_copied_under_another_name_is_corrupt(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial))
    Path(store.trial_folder(trial.trial_id)).rename(tmp_path / "trials/elsewhere")
    assert store.statuses() == {} and store.corrupt() == ["elsewhere"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trial", {"world_size": 1, "nodes": 1, "batch_per_gpu": 1, "device": "cpu", "model": [1]}),
        ("trial", {"world_size": "many"}),
        ("duration_s", "long"),
        ("reason", {"a": 1}),
        ("environment", {"group": {"asked_at": "early", "opened_at": 1.0}}),
    ],
)
def test_a_trial_with_a_value_of_a_wrong_type_is_corrupt_and_planned_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    store, trial = open_store(tmp_path, name="smoke"), Trial()
    store.save(result_of(trial))
    path = Path(store.trial_folder(trial.trial_id), "trial.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert (store.records(), store.corrupt()) == ([], [trial.trial_id])
    assert main(["plan", "smoke", "--out", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: damaged trials") and trial.trial_id in line


def test_reopening_keeps_trials_and_replaces_the_configuration(tmp_path: Path) -> None:
    trial = Trial()
    open_store(tmp_path).save(result_of(trial))
    again = open_store(tmp_path, configuration={"gpus": [1, 2, 4]}, command="python -m study.scaling --gpus 1,2,4")
    assert again.statuses() == {trial.trial_id: "done"}
    assert again.study()["configuration"] == {"gpus": [1, 2, 4]}
    assert again.study()["command"] == "python -m study.scaling --gpus 1,2,4"


def test_the_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path, name="weak")
    with pytest.raises(StoreError) as error:
        open_store(tmp_path)
    assert one_line(error).startswith(f"{tmp_path} has results of study 'weak', not 'default'")


def test_a_folder_that_has_lost_its_study_json_keeps_its_trials(tmp_path: Path) -> None:
    trial = Trial()
    open_store(tmp_path).save(result_of(trial))
    (tmp_path / "study.json").unlink()
    with pytest.raises(StoreError, match="run the study again with this --out, which keeps its trials"):
        Store.at(str(tmp_path))
    store = Store.existing(str(tmp_path))
    assert store is not None and store.name() is None
    assert store.statuses() == {trial.trial_id: "done"}
    assert open_store(tmp_path).name() == STUDY["name"]
    assert Store.at(str(tmp_path)).statuses() == {trial.trial_id: "done"}


@pytest.mark.parametrize("other", ["trials/notes.txt", "trials/a/trial.json", "thesis.tex"])
def test_a_folder_of_something_else_called_trials_is_refused(tmp_path: Path, other: str) -> None:
    if other == "thesis.tex":
        open_store(tmp_path).save(result_of(Trial()))
        (tmp_path / "study.json").unlink()
    (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / other).write_text("{}")
    with pytest.raises(StoreError, match="is not empty and has no study.json"):
        open_store(tmp_path)
    assert not (tmp_path / "study.json").exists()


def test_a_folder_that_contains_something_else_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError) as error:
        open_store(tmp_path)
    assert one_line(error).startswith(f"{tmp_path} is not empty and has no study.json")
    assert files_below(tmp_path) == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StoreError) as error:
        open_store(tmp_path / "out")
    assert one_line(error).startswith(f"{tmp_path}/out is a file")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"{}", "'name' is missing"),
        (b"[]", "list indices must be integers or slices, not str"),
        (b'{"name": 3, "schema_version": 1}', "its name or schema_version has the wrong type"),
    ],
)
def test_a_corrupt_study_json_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    open_store(tmp_path)
    (tmp_path / "study.json").write_bytes(content)
    for use in (lambda: open_store(tmp_path), lambda: Store.at(str(tmp_path))):
        with pytest.raises(StoreError) as error:
            use()
        assert one_line(error).startswith(f"{tmp_path}/study.json is corrupt ({reason})")


def test_notes_of_a_study_survive_another_run(tmp_path: Path) -> None:
    open_store(tmp_path)
    study = json.loads((tmp_path / "study.json").read_text()) | {"notes": ["Clocks were locked."]}
    (tmp_path / "study.json").write_text(json.dumps(study))
    assert open_store(tmp_path).study() == study


@pytest.mark.parametrize(
    ("version", "age", "fix"),
    [(SCHEMA_VERSION + 1, "a newer", "update the tool, or choose"), (SCHEMA_VERSION - 1, "an older", "choose")],
)
def test_a_folder_of_another_version_is_refused_unchanged(tmp_path: Path, version: int, age: str, fix: str) -> None:
    content = json.dumps({"schema_version": version, "name": "default"})
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(StoreError) as error:
        open_store(tmp_path)
    assert one_line(error) == (
        f"{tmp_path} was written by {age} version of this tool (schema {version}, supported: {SCHEMA_VERSION}); "
        f"{fix} another --out"
    )
    assert (tmp_path / "study.json").read_text() == content


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_without_results_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    with pytest.raises(StoreError) as error:
        Store.at(str(folder))
    assert one_line(error).startswith(f"{folder} is not a results folder")


def test_a_uri_of_an_unknown_file_system_is_refused() -> None:
    with pytest.raises(StoreError, match="^gopher://a/b is not a folder or a known URI: "):
        Store.open("gopher://a/b", **STUDY)


def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"^{tmp_path}/file/out cannot be used: ") as error:
        open_store(tmp_path / "file/out")
    one_line(error)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "a/b", "..", ".hidden"])
def test_no_trial_is_saved_outside_the_folder(tmp_path: Path, name: str) -> None:
    class Elsewhere(Trial):
        @property
        def trial_id(self) -> str:
            return name

    store = open_store(tmp_path / "out")
    before = files_below(tmp_path)
    with pytest.raises(StoreError, match="cannot be a folder name"):
        store.save(result_of(Elsewhere()))
    assert files_below(tmp_path) == before


def test_statuses_of_two_thousand_trials_are_read_in_seconds(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    template = result_of(Trial(), "failed")
    store.save(template)
    record = store.records()[0]
    for number in range(2_000):
        folder = tmp_path / f"trials/trial-{number}"
        folder.mkdir()
        (folder / "trial.json").write_text(json.dumps(record | {"trial_id": folder.name}))
    start = time.perf_counter()
    statuses = store.statuses()
    assert time.perf_counter() - start < 3.0
    assert len(statuses) == 2_001


def test_a_file_uri_is_the_same_folder(tmp_path: Path) -> None:
    trial = Trial()
    store = Store.open(f"file://{tmp_path}/out", **STUDY)
    store.save(result_of(trial))
    assert Store.at(str(tmp_path / "out")).statuses() == {trial.trial_id: "done"}


def as_object_store(folder: Path) -> fs.FileSystem:
    return fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())


def test_an_object_store_keeps_the_same_folder(tmp_path: Path) -> None:
    store = Store.open("bucket/out", **STUDY, filesystem=as_object_store(tmp_path))
    trial = Trial()
    store.save(result_of(trial, "failed", log="Traceback"))
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done"}
    assert files_below(tmp_path / "bucket/out") == [
        "study.json",
        f"trials/{trial.trial_id}/steps.parquet",
        f"trials/{trial.trial_id}/trial.json",
    ]
    assert Store.at(str(tmp_path / "bucket/out")).records() == store.records()
    other = Trial(repeat=1)
    store.save(result_of(other, "failed", log="Traceback"))
    store.save(explained_result(other))
    assert files_below(Path(tmp_path, "bucket/out/trials", other.trial_id)) == EXPLAINED
    assert store.statuses() == {trial.trial_id: "done", other.trial_id: "done"}
    with pytest.raises(StoreError, match="^bucket/out has results of study 'default', not 'weak'"):
        Store.open("bucket/out", **(STUDY | {"name": "weak"}), filesystem=as_object_store(tmp_path))


class BrokenConnection(fs.FSSpecHandler):
    """An object store whose connection breaks when measurements are written."""

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if path.endswith("steps.parquet"):
            raise ConnectionError("connection\nreset")
        return super().open_output_stream(path, metadata)


def test_an_interrupted_save_to_an_object_store_leaves_no_done_trial() -> None:
    memory = MemoryFileSystem()
    trial = Trial()
    store = Store.open("bucket/out", **STUDY, filesystem=fs.PyFileSystem(fs.FSSpecHandler(memory)))
    store.save(result_of(trial, "failed"))
    assert store.statuses() == {trial.trial_id: "failed"}
    broken = Store.at("bucket/out", filesystem=fs.PyFileSystem(BrokenConnection(memory)))
    with pytest.raises(StoreError) as error:
        broken.save(result_of(trial))
    assert one_line(error) == f"trial {trial.trial_id} cannot be saved in bucket/out: connection reset"
    assert store.statuses() == {}
    store.save(result_of(trial))
    assert store.statuses() == {trial.trial_id: "done"}


def write_forever(out: str, ready: Any) -> None:
    """Save three trials again and again. All values of a save are the same number, different from the last save."""
    store = open_store(Path(out))
    number = 0
    while True:
        for seed in range(3):
            steps = steps_table(rows=2_000, step_s=float(number))
            result = explained_result(Trial(seed=seed), steps=steps, traces={0: str(number).encode()})
            store.save_files(result.trial.trial_id, files_of(result))  # `save` would keep what is done
        number += 1
        ready.set()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_writer_killed_at_any_moment_leaves_only_complete_trials(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # starts in milliseconds, which allows many kills
    random.seed(0)
    ids = {Trial(seed=seed).trial_id for seed in range(3)}
    for _ in range(40):
        ready = context.Event()
        writer = context.Process(target=write_forever, args=(str(tmp_path), ready))
        writer.start()
        assert ready.wait(30)
        time.sleep(random.uniform(0, 0.05))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        store = open_store(tmp_path)  # cleans up after the writer
        assert set(store.statuses()) == ids, "a finished trial is lost"
        assert store.corrupt() == []
        assert list((tmp_path / ".partial").iterdir()) == []
        for trial_id in ids:
            steps = pq.read_table(f"{store.trial_folder(trial_id)}/steps.parquet")
            assert steps.num_rows == 2_000 and len(set(steps["step_s"].to_pylist())) == 1
            trace = Path(store.trial_folder(trial_id), "traces/rank0.json.gz").read_text()
            assert float(trace) == steps["step_s"][0].as_py(), "files of two results are mixed"


def partial_folder(root: Path, pid: int, host: str, age_s: float, trial: Trial | None) -> Path:
    folder = root / ".partial" / f"{pid}-{'0' * 32}-{host}"
    folder.mkdir(parents=True)
    if trial is not None:
        source = root / "trials" / trial.trial_id
        for file in source.iterdir():
            file.rename(folder / file.name)
        source.rmdir()
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def pid_of_ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_complete_folder_of_a_killed_writer_is_moved_to_its_place(tmp_path: Path) -> None:
    trial = Trial()
    open_store(tmp_path).save(result_of(trial))
    partial = partial_folder(tmp_path, pid_of_ended_process(), socket.gethostname(), age_s=0, trial=trial)
    assert Store.at(str(tmp_path)).statuses() == {}
    assert open_store(tmp_path).statuses() == {trial.trial_id: "done"}
    assert not partial.exists()


@pytest.mark.parametrize(
    ("alive", "here", "age_s", "cleared"),
    [(True, True, 0, False), (False, True, 0, True), (False, False, 0, False), (False, False, 4_000, True)],
)
def test_partial_folders_are_cleared_if_their_writer_is_gone(
    tmp_path: Path, alive: bool, here: bool, age_s: float, cleared: bool
) -> None:
    open_store(tmp_path)
    pid = os.getpid() if alive else pid_of_ended_process()
    host = socket.gethostname() if here else "another-host.example"
    partial = partial_folder(tmp_path, pid, host, age_s, trial=None)
    open_store(tmp_path)
    assert partial.exists() is not cleared


def test_a_folder_whose_first_writer_was_killed_can_be_used(tmp_path: Path) -> None:
    partial = tmp_path / ".partial" / f"{pid_of_ended_process()}-{'0' * 32}-{socket.gethostname()}"
    partial.parent.mkdir()
    partial.write_text("{")
    assert open_store(tmp_path).statuses() == {}
    assert not partial.exists()


def test_a_stray_file_among_partial_folders_is_ignored(tmp_path: Path) -> None:
    open_store(tmp_path)
    (tmp_path / ".partial/notes").write_text("")
    assert open_store(tmp_path).statuses() == {}
