"""Reading a results folder: real files, whole and damaged."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis.load import parquet
from analysis.load.results import OUTCOME_COLUMNS, ResultsError, device_name, host_names, load, load_reduced
from analysis.load.schema import SCHEMA_VERSION
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
    """A study with one done trial and one that was infeasible."""
    directory = write_study(tmp_path / "results", question="How far?")
    write_trial(directory, record(ONE), steps(ONE, 0.1))
    write_trial(directory, record(ONE | {"repeat": 1}, "infeasible", "needs 2 GPUs; the cluster has 1"))
    return directory


def error(directory: Path) -> str:
    with pytest.raises(ResultsError) as caught:
        load(directory)
    return str(caught.value)


def test_trials_and_steps_come_back_as_written(folder: Path) -> None:
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


def test_an_address_reads_like_a_path(folder: Path) -> None:
    pd.testing.assert_frame_equal(load(folder.as_uri()).trials, load(folder).trials)


def test_a_half_written_trial_is_not_there(folder: Path) -> None:
    half = folder / "trials" / "half"
    half.mkdir()
    steps(ONE, 0.1).to_parquet(half / "steps.parquet")
    assert "half" not in set(load(folder).trials["trial_id"])
    assert "half" not in set(load(folder).steps["trial_id"])


def test_a_study_without_trials_is_empty_and_has_its_columns(tmp_path: Path) -> None:
    results = load(write_study(tmp_path / "results"))
    assert list(results.trials.columns) == list(OUTCOME_COLUMNS)
    assert results.trials.empty
    assert results.steps.empty
    assert "backward_s" in results.steps


def test_a_folder_without_study_json_is_no_results_folder(tmp_path: Path) -> None:
    expected = f"{tmp_path}: no study.json, so this is not a results folder; give the folder that a study was run into"
    assert error(tmp_path) == expected


def test_a_folder_that_is_not_there_says_the_same(tmp_path: Path) -> None:
    assert error(tmp_path / "nothing").startswith(
        f"{tmp_path / 'nothing'}: no study.json, so this is not a results folder"
    )


def test_a_corrupt_study_json_is_named(folder: Path) -> None:
    (folder / "study.json").write_text('{"name": ')
    assert error(folder) == (
        f"{folder}/study.json: not valid JSON (Expecting value: line 1 column 10 (char 9)); "
        "restore it from a copy, or run the study into another folder"
    )


def test_a_corrupt_trial_json_is_named(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "trial.json"
    path.write_text("[1, 2]")
    assert (
        error(folder)
        == f"{path}: holds list where a mapping belongs; remove that trial's folder and run the study again"
    )


def test_a_trial_json_that_lacks_its_status_is_named(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "trial.json"
    content = json.loads(path.read_text())
    del content["status"]
    path.write_text(json.dumps(content))
    assert error(folder) == f"{path}: status: Field required; remove that trial's folder and run the study again"


def test_a_trial_in_the_folder_of_another_is_refused(folder: Path) -> None:
    (folder / "trials" / trial_id(ONE)).rename(folder / "trials" / "copy")
    assert error(folder) == (
        f"{folder}/trials/copy/trial.json: says trial_id {trial_id(ONE)!r}, but its folder is 'copy'; rename or remove the folder"
    )


@pytest.mark.parametrize(
    ("version", "age", "fix"),
    [(SCHEMA_VERSION + 1, "newer", "update it"), (SCHEMA_VERSION - 1, "older", "run the study again")],
)
def test_results_of_another_version_are_refused(folder: Path, version: int, age: str, fix: str) -> None:
    for path in (folder / "trials" / trial_id(ONE) / "trial.json", folder / "study.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": version}))
        assert error(folder) == (
            f"{path}: schema version {version} is {age} than {SCHEMA_VERSION}, the one that this program reads; {fix}"
        )


def test_a_done_trial_without_steps_is_refused(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    path.unlink()
    assert error(folder) == (
        f"{path}: missing, though trial.json beside it says done; remove that trial's folder and run the study again"
    )


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_a_truncated_parquet_file_is_named(folder: Path, keep: float) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    message = error(folder)
    assert message.startswith(f"{path}: not readable as Parquet (")
    assert message.endswith("; remove that trial's folder and run the study again")
    assert "\n" not in message


def test_damaged_pages_behind_a_whole_footer_are_named(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    whole = bytearray(path.read_bytes())
    whole[4:400] = bytes(396)
    path.write_bytes(bytes(whole))
    assert error(folder).startswith(f"{path}: not readable as Parquet (")


def test_parquet_of_something_else_names_the_missing_columns(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    pd.DataFrame({"rank": [0], "step": [0]}).to_parquet(path)
    assert (
        error(folder) == f"{path}: lacks window, samples, window_s; remove that trial's folder and run the study again"
    )


def test_columns_that_an_older_file_lacks_are_null(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    steps(ONE, 0.1).drop(columns="host_load_s").to_parquet(path)
    assert load(folder).steps["host_load_s"].isna().all()


def test_a_trial_on_one_of_eight_unlike_gpus_has_the_name_of_its_own() -> None:
    place = environment(ONE | {"device": "cuda"})
    place["nodes"][0]["gpus"][7]["name"] = "Another GPU"
    assert device_name(place) == H200
    place["ranks"][0]["gpu_uuid"] = "GPU-0-7"
    assert device_name(place) == "Another GPU"


def test_unlike_devices_and_all_hosts_are_listed() -> None:
    place = environment(ONE | {"device": "cuda", "world_size": 2, "nodes": 2})
    place["nodes"][1]["gpus"][0]["name"] = "Another GPU"
    assert device_name(place) == f"Another GPU + {H200}"
    assert host_names(place) == "node-a0, node-a1"


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
        try:
            load(directory)
        except ResultsError as problem:
            assert "\n" not in str(problem)
            assert str(trial) in str(problem)


def test_steps_that_are_read_in_portions_give_the_same_windows_and_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = grid(
        {"device": "cuda", "steps": 12, "cpus_per_rank": 8, "loader_workers": 4}, world_size=[1, 2, 4], repeat=range(2)
    )
    directory = write_results(tmp_path / "results", trials, gpu_law, noise=0.02)
    whole = load(directory)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 150)  # two or three files at once
    reduced = load_reduced(directory)
    for name in ("windows", "shapes"):
        pd.testing.assert_frame_equal(getattr(reduced, name), getattr(whole, name))
    pd.testing.assert_frame_equal(reduced.buckets, whole.buckets)
    assert 0 < len(reduced.steps) < len(whole.steps)
    assert reduced.steps["last_gradient_s"].notna().all()


def test_a_damaged_table_among_portions_is_named(folder: Path) -> None:
    path = folder / "trials" / trial_id(ONE) / "steps.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"x" * 400 + content[600:])
    with pytest.raises(ResultsError) as caught:
        load_reduced(folder)
    assert str(caught.value).startswith(f"{path}: not readable as Parquet (")
    assert str(caught.value).endswith("; remove that trial's folder and run the study again")
