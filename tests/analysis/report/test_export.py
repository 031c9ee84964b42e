"""Export to experiment trackers, written by their clients into local files and read back; also the package's `load`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import analysis
from analysis.export import CLIENTS, ExportError, main, runs, to_mlflow, to_tensorboard, to_wandb
from analysis.read.results import Results, load
from tests.support.frames import FIELDS, grid, record, steps, trial_id, write_study, write_trial

TRIALS = grid({"device": "cuda", "steps": 4}, world_size=[1, 2])
FAILED = FIELDS | {"device": "cuda", "world_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two done trials of 0.1 s per step, and a failed one."""
    directory = write_study(tmp_path_factory.mktemp("export") / "results", name="tiny")
    for fields in TRIALS:
        write_trial(directory, record(fields), steps(fields, 0.1))
    write_trial(directory, record(FAILED, "failed", "rank 2: RuntimeError: no"))
    return directory


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load(folder)


ONE, TWO = (trial_id(fields) for fields in TRIALS)


def test_load_returns_tidy_frames(folder: Path) -> None:
    trials, of_steps, buckets = analysis.load(folder)
    by_id = trials.set_index("trial_id")
    assert by_id.loc[TWO, "throughput_samples_per_s"] == pytest.approx(2 * 32 / 0.1)
    assert by_id.loc[TWO, "world_size"] == 2
    assert by_id["throughput_samples_per_s"].isna().tolist() == (by_id["status"] == "failed").tolist()
    assert by_id.loc[trial_id(FAILED), "reason"] == "rank 2: RuntimeError: no"
    assert set(of_steps["trial_id"]) == {ONE, TWO}
    assert buckets.empty


def test_importing_the_package_does_not_import_pandas() -> None:
    code = "import analysis, sys; sys.exit('pandas' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_run_contains_known_values_only(results: Results) -> None:
    found = {run.trial_id: run for run in runs(results)}
    done, failed = found[TWO], found[trial_id(FAILED)]
    assert done.params["world_size"] == 2
    assert "workload" not in done.params
    assert done.metrics["throughput_samples_per_s"] == pytest.approx(640)
    assert "communication_ratio" not in done.metrics
    assert [step for step, _ in done.series["step_s"]] == [7, 8, 9, 10]
    assert (failed.status, failed.metrics, failed.series) == ("failed", {}, {})
    assert failed.tags["reason"] == "rank 2: RuntimeError: no"


def test_tensorboard_files_contain_fields_measures_and_steps(results: Results, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    assert to_tensorboard(results, tmp_path) == 3
    scalars: dict[str, list[float]] = {}
    for path in sorted((tmp_path / TWO).glob("events.*")):
        content, position = path.read_bytes(), 0
        while position < len(content):  # a record: length, checksum, event, checksum
            size = int.from_bytes(content[position : position + 8], "little")
            event = Event.FromString(content[position + 12 : position + 12 + size])
            position += 16 + size
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append(value.simple_value)
    assert scalars["throughput_samples_per_s"] == pytest.approx([640])
    assert scalars["steps/step_s"] == pytest.approx([0.1 * 1.004] * 4)
    assert "_hparams_/session_start_info" in scalars


def test_mlflow_has_one_run_per_trial(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = (tmp_path / "mlflow").as_uri()
    assert to_mlflow(results, uri) == 3
    assert to_mlflow(results, uri) == 0
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    found: dict[str, Any] = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    run = found[TWO]
    assert run.data.metrics["throughput_samples_per_s"] == pytest.approx(640)
    assert run.data.params["world_size"] == "2"
    assert (run.info.status, found[trial_id(FAILED)].info.status) == ("FINISHED", "FAILED")
    assert run.info.end_time - run.info.start_time == 4200
    assert len(client.get_metric_history(run.info.run_id, "steps.step_s")) == 4


def test_wandb_offline_runs_contain_measures(results: Results, tmp_path: Path) -> None:
    assert to_wandb(results, "scaling", offline=True, directory=tmp_path) == 3
    found = {
        path.stem.removeprefix("run-"): path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    }
    assert set(found) == {ONE, TWO, trial_id(FAILED)}
    throughput = re.search(rb"throughput_samples_per_s[^0-9]{1,8}([0-9.]+)", found[TWO])
    assert throughput is not None
    assert float(throughput[1]) == pytest.approx(640)
    assert b"world_size" in found[TWO]
    assert b"throughput_samples_per_s" not in found[trial_id(FAILED)]


def test_command_prints_the_number_of_exported_trials(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "--tensorboard", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "3 trials exported\n"


def test_wrong_folder_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--tensorboard", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: no study.json") and error.count("\n") == 1


def test_impossible_target_folder_is_a_one_line_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([str(folder), "--tensorboard", f"{tmp_path}/file"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: [Errno 20] Not a directory: '{tmp_path}/file/") and error.count("\n") == 1


@pytest.mark.parametrize("option", ["--tensorboard", "--mlflow", "--wandb"])
def test_empty_target_is_rejected(option: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(folder), option, ""])
    assert ended.value.code == 2
    assert f"error: {option} must not be empty" in capsys.readouterr().err


def test_unusable_mlflow_address_is_a_one_line_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--mlflow", "ftp://nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: MLflow at ftp://nowhere: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("module", CLIENTS)
def test_missing_client_error_contains_the_install_command(
    module: str, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # importing it now raises ImportError
    export = {"tensorboardX": to_tensorboard, "mlflow": to_mlflow, "wandb": to_wandb}[module]
    with pytest.raises(ExportError) as caught:
        export(results, str(tmp_path))
    assert str(caught.value).endswith(f'fix: pip install "{CLIENTS[module]}"')
