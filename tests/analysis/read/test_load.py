"""Reading a results folder from real files, intact and damaged."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.read import parquet
from analysis.read.errors import RUN_AGAIN
from analysis.read.results import OUTCOME_COLUMNS, ResultsError, device_name, host_names, load, load_reduced
from analysis.read.schema import SCHEMA_VERSION
from tests.support.frames import (  # fmt: skip
    CPU,
    FIELDS,
    H200,
    environment,
    gpu_law,
    grid,
    record,
    steps,
    trial_id,
    write_results,
    write_study,
    write_trial,
)

ONE = FIELDS | {"steps": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study with one done and one infeasible trial."""
    directory = write_study(tmp_path / "results", question="How far?")
    write_trial(directory, record(ONE), steps(ONE, 0.1))
    write_trial(directory, record(ONE | {"repeat": 1}, "infeasible", "needs 2 GPUs; the cluster has 1"))
    return directory


def error(directory: Path) -> str:
    """Return the message of the error with which reading fails."""
    with pytest.raises(ResultsError) as caught:
        load(directory)
    return str(caught.value)


def damaged(directory: Path) -> str:
    """Return the line about the only damaged trial. The other trial is read."""
    results = load(directory)
    assert len(results.trials) == 1
    [line] = results.damaged
    assert set(results.trials["trial_id"]) == {trial_id(ONE | {"repeat": 1})}
    assert results.steps.empty
    return line


def test_trials_and_steps_are_read_as_written(folder: Path) -> None:
    results = load(folder)
    assert results.study["question"] == "How far?"
    trials = results.trials.set_index("trial_id")
    done, infeasible = trials.loc[trial_id(ONE)], trials.loc[trial_id(ONE | {"repeat": 1})]
    assert {name: done[name] for name in ONE} == ONE
    assert (done["status"], done["worker_group"], done["device_name"], done["hosts"]) == (
        "done",
        "group-0",
        CPU,
        "node-a0",
    )
    assert (infeasible["status"], infeasible["reason"]) == ("infeasible", "needs 2 GPUs; the cluster has 1")
    assert infeasible["device_name"] is None or pd.isna(infeasible["device_name"])
    written = steps(ONE, 0.1)
    assert set(results.steps["trial_id"]) == {trial_id(ONE)}
    numbers = [name for name in written if name != "window"]
    pd.testing.assert_frame_equal(results.steps[numbers].astype(float), written[numbers].astype(float))
    assert results.steps["window"].tolist() == written["window"].tolist()


def test_a_uri_reads_like_a_path(folder: Path) -> None:
    pd.testing.assert_frame_equal(load(folder.as_uri()).trials, load(folder).trials)


def test_an_incomplete_trial_is_skipped(folder: Path) -> None:
    half = folder / "trials" / "half"
    half.mkdir()
    steps(ONE, 0.1).to_parquet(half / "steps.parquet")
    assert "half" not in set(load(folder).trials["trial_id"])
    assert "half" not in set(load(folder).steps["trial_id"])


def test_a_study_without_trials_has_empty_frames_with_columns(tmp_path: Path) -> None:
    results = load(write_study(tmp_path / "results"))
    assert list(results.trials.columns) == list(OUTCOME_COLUMNS)
    assert results.trials.empty
    assert results.steps.empty
    assert "backward_s" in results.steps


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_folder_without_study_json_is_refused(tmp_path: Path, name: str) -> None:
    assert error(tmp_path / name).startswith(f"{tmp_path / name}: no study.json")


def test_a_corrupt_study_json_is_reported(folder: Path) -> None:
    (folder / "study.json").write_text('{"name": ')
    message = error(folder)
    assert message.startswith(f"{folder}/study.json: not valid JSON (Expecting value: line 1 column 10 (char 9)); ")
    assert "restore" in message


def test_a_corrupt_trial_json_is_reported(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "trial.json"
    path.write_text("[1, 2]")
    message = damaged(folder)
    assert message.startswith(f"{path}: ")
    assert "mapping" in message
    assert message.endswith(RUN_AGAIN)


def test_a_missing_status_in_trial_json_is_reported(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "trial.json"
    content = json.loads(path.read_text())
    del content["status"]
    path.write_text(json.dumps(content))
    assert damaged(folder) == f"{path}: status: Field required; {RUN_AGAIN}"


def test_a_trial_in_the_folder_of_another_is_refused(folder: Path) -> None:
    (folder / "trials" / trial_id(ONE)).rename(folder / "trials" / "copy")
    message = damaged(folder)
    assert message.startswith(f"{folder}/trials/copy/trial.json: ")
    assert repr(trial_id(ONE)) in message
    assert "'copy'" in message


@pytest.mark.parametrize(
    ("version", "age", "fix"),
    [(SCHEMA_VERSION + 1, "newer", "update"), (SCHEMA_VERSION - 1, "older", "run the study again")],
)
def test_results_of_another_version_are_refused(folder: Path, version: int, age: str, fix: str) -> None:
    for path, line in ((folder / "trials" / trial_id(ONE) / "trial.json", damaged), (folder / "study.json", error)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": version}))
        message = line(folder)
        assert message.startswith(f"{path}: schema version {version} is {age} than {SCHEMA_VERSION}")
        assert fix in message


def test_a_done_trial_without_steps_is_refused(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    path.unlink()
    message = damaged(folder)
    assert message.startswith(f"{path}: missing")
    assert message.endswith(RUN_AGAIN)


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_a_truncated_parquet_file_is_reported(folder: Path, keep: float) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    message = damaged(folder)
    assert message.startswith(f"{path}: not readable as Parquet (")
    assert message.endswith(f"; {RUN_AGAIN}")
    assert "\n" not in message


def test_damaged_pages_with_an_intact_footer_are_reported(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(bytes(content))
    assert damaged(folder).startswith(f"{path}: not readable as Parquet (")


def test_missing_required_columns_are_reported(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    pd.DataFrame({"rank": [0], "step": [0]}).to_parquet(path)
    message = damaged(folder)
    assert message.startswith(f"{path}: ")
    assert message.endswith(f"window, samples, window_s; {RUN_AGAIN}")


def test_missing_optional_columns_are_null(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    steps(ONE, 0.1).drop(columns="host_load_s").to_parquet(path)
    assert load(folder).steps["host_load_s"].isna().all()


def test_the_device_is_the_gpu_that_the_rank_used() -> None:
    mixed = environment(ONE | {"device": "cuda"})
    mixed["nodes"][0]["gpus"][7]["name"] = "Another GPU"
    assert device_name(mixed) == H200
    mixed["ranks"][0]["gpu_uuid"] = "GPU-0-7"
    assert device_name(mixed) == "Another GPU"


def test_all_devices_and_hosts_are_listed() -> None:
    mixed = environment(ONE | {"device": "cuda", "world_size": 2, "nodes": 2})
    mixed["nodes"][1]["gpus"][0]["name"] = "Another GPU"
    assert device_name(mixed) == f"Another GPU + {H200}"
    assert host_names(mixed) == "node-a0, node-a1"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["nodes", "ranks", "gpus", "git", "a"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*record(ONE), "unknown"]), JSON))
def test_any_json_in_trial_json_is_read_or_refused_in_one_line(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = write_study(Path(name))
        trial = write_trial(directory, record(ONE), steps(ONE, 0.1))
        (trial / "trial.json").write_text(json.dumps(record(ONE) | changes))
        for line in load(directory).damaged:
            assert "\n" not in line
            assert str(trial) in line


def test_reading_in_portions_gives_the_same_windows_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = grid(
        {"device": "cuda", "steps": 12, "cpus_per_rank": 8, "loader_workers": 4}, world_size=[1, 2, 4], repeat=range(2)
    )
    directory = write_results(tmp_path / "results", trials, gpu_law, noise=0.02)
    complete = load(directory)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 150)  # two or three files per portion
    reduced = load_reduced(directory)
    for name in ("windows", "shapes"):
        pd.testing.assert_frame_equal(getattr(reduced, name), getattr(complete, name))
    pd.testing.assert_frame_equal(reduced.buckets, complete.buckets)
    assert 0 < len(reduced.steps) < len(complete.steps)
    assert reduced.steps["last_gradient_s"].notna().all()


def test_a_damaged_table_is_reported_when_reading_in_portions(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"x" * 400 + content[600:])
    results = load_reduced(folder)
    [line] = results.damaged
    assert line.startswith(f"{path}: not readable as Parquet (")
    assert line.endswith(f"; {RUN_AGAIN}")
    assert len(results.trials) == 1
