"""The command line as users see it: its output and its exit codes. No test here starts Ray."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer
import yaml
from rich.text import Text

from analysis.report.card import as_json, card_at
from study.capacity import NodeCapacity, count_gpus
from study.cli import commands as session
from study.cli.configuration import Configuration
from study.cli.terminal import print_card
from study.errors import fitted
from study.help import completion_script
from study.plan.trials import plan_trials
from study.scaling import app, main
from study.store.environment import git_state
from study.store.result import TrialResult
from study.store.store import Store
from study.studies.basic import STUDIES
from study.studies.study import Study
from tests.support.cards import RESULTS
from tests.support.hosts import ROOT
from trainables.trial import Trial

CPU_HOST = [NodeCapacity("", "localhost", cpus=2, gpus=0)]


@pytest.fixture(autouse=True)
def small_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend to be a host with two cores, no GPU and no cluster."""
    monkeypatch.setattr(session, "local_capacity", lambda: CPU_HOST)
    monkeypatch.setattr("study.orchestrate.discovery.address.BOOTSTRAP_FILE", tmp_path / "no-cluster")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def trials_of(name: str, **axes: tuple[Any, ...]) -> list[Trial]:
    return [row.trial for row in plan_trials(STUDIES[name](CPU_HOST).with_overrides(axes), CPU_HOST) if row.trial]


def open_store(out: Path, name: str = "smoke", **configuration: Any) -> Store:
    study: Study = STUDIES[name](CPU_HOST)
    return Store.open(
        str(out), name=name, question=study.question, configuration=configuration, versions={}, command="the command"
    )


def result(trial: Trial, status: str = "done", **changes: Any) -> TrialResult:
    """Return a result as from a worker group: two warm-up steps, and four steps in each other window."""
    rows = []
    for rank in range(trial.world_size):
        for step in range(10):
            window = "warmup" if step < 2 else "plain" if step < 6 else "phases"
            row: dict[str, Any] = {"rank": rank, "window": window, "step": step, "samples": trial.batch_per_gpu}
            row["window_s"] = None if window == "warmup" else 0.4
            if window != "plain":
                row |= {"load_wait_s": 0.01, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.01, "step_s": 0.1}
            rows.append(row)
    values: dict[str, Any] = {
        "environment": {"ranks": [{"rank": rank} for rank in range(trial.world_size)]},
        "worker_group": f"g{trial.repeat}",
        "started_at": time.time(),
        "duration_s": 2.0,
    } | changes
    return TrialResult(
        trial=trial, status=status, steps=pa.Table.from_pylist(rows) if status == "done" else None, **values
    )


# --------------------------------------------------------------------------------------------------- start-up


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["plan", "--address", "local"], ["run", "--help"]])
def test_commands_that_run_nothing_import_no_torch_ray_pandas_or_pyarrow(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from study.scaling import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'ray', 'pandas', 'pyarrow'} & set(sys.modules)), code, file=sys.stderr)"
    )
    # not in the project folder, where `plan` may find and read results of the study
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False, capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "[] 0"
    assert done.stdout


def test_list_shows_every_study_with_its_question_and_needs_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [study["name"] for study in listed] == list(STUDIES)
    needs = {study["name"]: study["needs"] for study in listed}
    assert (needs["smoke"]["trials"], needs["smoke"]["ranks"], needs["smoke"]["device"]) == (8, 2, "cpu")
    assert needs["hpml-lab4"]["made_for_gpus"] and needs["hpml-lab4"]["infeasible"] == 12
    assert all(10 < of_study["duration_s"] < 3600 for of_study in needs.values())
    for columns in ("80", None):  # a terminal, and a pipe without COLUMNS
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS")
        assert main(["list"]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 80
        text = " ".join(printed.split())
        assert all(f"{study['name']} {study['question']} Here: " in text for study in listed)


def test_list_counts_gpus_and_files_that_a_study_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("study.capacity.local_capacity", lambda: [NodeCapacity("", "localhost", cpus=64, gpus=8)])
    assert main(["list", "--json"]) == 0
    needs = {study["name"]: study["needs"] for study in json.loads(capsys.readouterr().out)}
    ladder = needs["acceleration-ladder"]
    assert (ladder["device"], ladder["ranks"], ladder["nodes"], ladder["data_dir"]) == ("cuda", 8, 2, True)
    assert (needs["weak"]["ranks"], needs["weak"]["data_dir"], needs["weak"]["made_for_gpus"]) == (8, False, False)


def test_version_shows_the_version_and_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    name, version, _, commit, *_ = line.replace(",", "").split()
    assert name == "scaling-study"
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert commit == ((git_state()["commit"] or "unknown")[:12])


COMMANDS = [info.name or "" for info in app.registered_commands]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_a_help_with_examples_that_name_its_own_options(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*([command] if command else []), "--help"]) == 0
    lines = [Text.from_ansi(line).plain.strip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "<bool>" in line and "--help" not in line] == []
    examples = [line for line in lines[lines.index("Examples:") + 1 :] if line.startswith("python -m study.scaling")]
    assert examples and all(command in line for line in examples)
    help_text = " ".join(lines)
    options = {word for line in examples for word in line.partition(" -- ")[0].split() if word.startswith("--")}
    assert not command or all(option in help_text for option in options)


def test_the_help_of_run_shows_five_axes_before_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    first = text[text.index("What to measure") : text.index("What else to vary")]
    names = {word for word in first.split() if word.startswith("--")}
    assert names == {"--gpus", "--batch-per-gpu", "--model", "--precision", "--repeats"}


def test_bash_completes_commands_options_studies_and_the_last_value_of_a_list() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "study.scaling", "--completion", "bash"],
        check=True, capture_output=True, text=True, timeout=60, cwd=ROOT,
    ).stdout  # fmt: skip
    calls = [["pl"], ["run", "--gp"], ["plan", "wea"], ["run", "--model", "mlp,resnet2"]]
    code = script + "".join(
        f"COMP_WORDS=(scaling-study {' '.join(words)}); COMP_CWORD={len(words)}\n"
        f'_scaling_study_completion scaling-study {words[-1]} x; echo "${{COMPREPLY[*]}}"\n'
        for words in calls
    )
    done = subprocess.run(
        ["bash", "-c", code + "scaling-study --version\n"],
        check=False, capture_output=True, text=True, timeout=120, cwd="/",
    )  # fmt: skip
    *completed, version = done.stdout.splitlines()
    assert completed == ["plan", "--gpus", "weak", "mlp,resnet20"]
    assert version.startswith("scaling-study ")
    assert "function" in completion_script("fish") and "compdef" in completion_script("zsh")


def test_commands_that_read_results_default_to_the_most_recent_folder_and_name_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no results folder below results/")
    for age, name in enumerate(("newest", "older")):
        open_store(tmp_path / "results" / name)
        for path in (tmp_path / "results" / name, tmp_path / "results" / name / "study.json"):
            os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert main(["status"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("study smoke: ")
    assert output.err.splitlines() == ["results folder: results/newest (the most recent below results/)"]
    assert main(["status", "results/older"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["--precision", "fp32"], ["run", "--precision", "fp32"]])
def test_without_a_command_the_default_study_runs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Configuration] = []

    def run(configuration: Configuration, **options: Any) -> int:
        requested.append(configuration)
        return 0

    monkeypatch.setattr(session, "run", run)
    assert main(arguments) == 0
    assert [(c.study, c.axes) for c in requested] == [("default", {"precision": ("fp32",)} if arguments else {})]


# --------------------------------------------------------------------------------------------------- plan


def test_plan_lists_every_trial_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plan", "--set", "parallel=none,ddp", "--out", str(tmp_path / "out")]) == 0
    lines = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    assert max(len(line) for line in lines if not line.startswith("results folder: ")) <= 80
    assert sum("pending" in line and "ddp" in line for line in lines) == 12
    assert "24 trials: 18 pending, 6 skipped" in " ".join(lines)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_infeasible_trials_are_one_row_per_reason_and_ids_are_never_split(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    options = ["hpml-lab4", "--interconnect", "auto,socket", "--repeats", "1", "--out", str(tmp_path / "out")]
    assert main(["plan", *options, "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert main(["plan", *options]) == 0
    lines = [Text.from_ansi(line).plain for line in capsys.readouterr().out.splitlines()]
    pending = [trial for trial in trials if trial["status"] == "pending"]
    assert all([trial["trial_id"], "pending"] in [line.split() for line in lines] for trial in pending)
    counts = Counter(trial["reason"] for trial in trials if trial["status"] == "infeasible")
    assert len(counts) == 2 and sum(counts.values()) > 4
    text = " ".join(" ".join(lines).split())
    assert all(text.count(f"{count} trials infeasible: {reason}") == 1 for reason, count in counts.items())
    assert not any(trial["trial_id"] in text for trial in trials if trial["status"] == "infeasible")
    assert max(len(line) for line in lines if not line.startswith("results folder: ")) <= 80
    assert all(line == line.rstrip() for line in lines) or is_terminal
    assert "no GPU found: measuring CPU ranks" in lines


def test_plan_as_json_contains_ids_fields_and_an_estimated_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "smoke", "--gpus", "1,2", "--out", str(tmp_path), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["counts"] == {"pending": 8}
    assert 20 < planned["estimate"]["duration_s"] < 200
    assert {trial["trial_id"] for trial in planned["trials"]} == {t.trial_id for t in trials_of("smoke")}
    assert planned["trials"][0]["fields"]["model"] == "mlp"


def test_plan_accounts_for_recorded_trials_and_their_durations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    trials = trials_of("smoke")
    for trial in trials:
        if trial.repeat == 0:
            store.save(result(trial))
    store.save(result(trials[1], "failed", reason="it broke"))
    assert main(["plan", "smoke", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8 trials: 4 done, 4 pending" in out
    assert "ended as failed before; runs again" in out
    assert "estimated time: about 34 s (4 recorded trials)" in out


def test_print_config_writes_yaml_that_reproduces_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "smoke", "--seed", "3", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["seed"] == [3]
    config = tmp_path / "printed.yaml"
    config.write_text(printed)
    assert main(["plan", "--config", str(config), "--json"]) == 0
    ids = {trial["trial_id"] for trial in json.loads(capsys.readouterr().out)["trials"]}
    assert ids == {t.trial_id for t in trials_of("smoke", seed=(3,))}


def test_profile_selects_rank_0_and_survives_print_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "smoke", "--profile", "--print-config"]) == 0
    config = tmp_path / "printed.yaml"
    config.write_text(capsys.readouterr().out)
    for arguments in (["smoke", "--profile"], ["--config", str(config)], ["smoke", "--set", "profile_ranks=0"]):
        assert main(["plan", *arguments, "--json"]) == 0
        fields = [trial["fields"] for trial in json.loads(capsys.readouterr().out)["trials"]]
        assert {field["profile_ranks"] for field in fields} == {"0"}
        assert len(fields) == 8


def test_emulated_interconnects_are_infeasible_without_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["smoke", "--interconnect", "auto,no_p2p,socket", "--out", str(tmp_path / "out")]
    assert main(["plan", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"pending": 8, "infeasible": 16}
    assert main(["plan", "smoke", "--interconnect", "socket", "--gpus", "2", "--batch-per-gpu", "8"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: does not fit: --gpus 2: interconnect 'socket' ")


# --------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["plan", "defualt"],
            "error: unknown study 'defualt'; did you mean 'default'?",
        ),
        (
            ["--batch-per-gpu", "0"],
            "error: --batch-per-gpu '0': input should be greater than or equal to 1",
        ),
        (["--gups", "1"], "error: No such option: --gups (Possible options: --gpus, --steps); see --help"),
        (
            ["plan", "smoke", "--set", "profile_ranks=0+3"],
            "error: profile_ranks '0+3': no trial of this plan has a rank 3; ranks of the largest: 0 to 1",
        ),
        (["--max-concurrent", "0"], "error: --max-concurrent 0: input should be greater than or equal to 1"),
        (
            ["plan", "large-batch", "--target-accuracy", "93"],
            "error: --target-accuracy '93': input should be less than or equal to 1",
        ),
        (
            ["plan", "--gpus", "1", "--gpus=2"],
            "error: --gpus is given twice; give it once, a list with commas between its values",
        ),
        (
            ["plan", "--script", __file__, "--lr", "0.1"],
            "error: No such option: --lr (Possible options: --goal, --help, --vary); fix: give the script's own "
            "arguments after --",
        ),
        (["show", "/nowhere"], "error: /nowhere does not exist; give the folder that a study was run into"),
        (["frobnicate"], "error: No such command 'frobnicate'; see --help"),
        (["pack"], "error: Missing argument 'DIR'; see --help"),
        (
            ["plan", "--set", "seed=1,2,3,4,5,6,7,8,9,10,11,12", "--batch-per-gpu", ",".join(map(str, range(1, 2000)))],
            "error: study 'default' with these axes has 143928 trials; allowed: 1 to 100000",
        ),
    ],
)
def test_a_usage_error_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # the message would name results below the working directory
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.splitlines() == [line]
    assert output.out == ""


@pytest.mark.parametrize("arguments", [["show"], ["pack"], ["compare", "DIR"], ["predict", "--gpus", "8"]])
def test_a_results_folder_that_does_not_exist_suggests_the_nearest(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(tmp_path / "results" / "weak")
    assert main([*(argument.replace("DIR", "results/weak") for argument in arguments), "results/waek"]) == 2
    assert capsys.readouterr().err == "error: results/waek does not exist; did you mean 'results/weak'?\n"


@pytest.mark.parametrize("command", ["run", "plan"])
def test_too_many_gpus_are_refused_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([command, "--gpus", "2,64", "--batch-per-gpu", "4,8", "--out", str(tmp_path / "out")]) == 3
    error, fix = capsys.readouterr().err.splitlines()
    start, _, _ = error.partition(" needs 64 CPU cores")
    assert start == "error: does not fit: --gpus 64, --batch-per-gpu 4 and 1 other combination:"
    assert fix.startswith("fix: ") and "--address" in fix
    assert not (tmp_path / "out").exists()


def test_a_field_with_the_value_of_a_secret_variable_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_KEY", "resnet20_w16")
    monkeypatch.setenv("OTHER_KEY", "transformer_tiny")
    out = tmp_path / "out"
    assert main(["run", "weak", "--model", "transformer_tiny", "--address", "local", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model: ") and "OTHER_KEY" in error and "transformer_tiny" not in error
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["run", "smoke", "--address", "local", "--out", "x"], ["status", "x"]])
def test_a_working_directory_that_is_not_utf_8_is_refused_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    (folder / "x").mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "bad\\udcff/x is not UTF-8; fix: " in line


def test_a_grid_without_a_feasible_trial_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "strong", "--global-batch", "3", "--gpus", "2", "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.splitlines() == [
        "error: does not fit: --gpus 2: global batch 3 does not divide over world_size 2"
    ]


def test_a_reason_shared_by_the_complete_grid_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--target-accuracy", "0.9", "--gpus", "1", "--out", str(tmp_path / "out")]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: does not fit: all 2 combinations: target_accuracy 0.9 ")


def test_a_results_folder_of_another_study_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    open_store(tmp_path, "weak")
    for command in ("plan", "run"):
        assert main([command, "smoke", "--out", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {tmp_path} has results of study 'weak', not 'smoke'; ")


def test_a_folder_that_contains_something_else_is_refused_before_ray_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    for command in ("plan", "run"):
        assert main([command, "smoke", "--out", str(tmp_path)]) == 2
        assert main([command, "smoke", "--out", str(tmp_path / "thesis.tex")]) == 2
        not_empty, is_file = capsys.readouterr().err.splitlines()
        assert not_empty.startswith(f"error: {tmp_path} is not empty and has no study.json")
        assert is_file.startswith(f"error: {tmp_path}/thesis.tex is a file")


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_uri_of_an_unknown_file_system_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "smoke", "--out", "nope://x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: nope://x is not a folder or a known URI: ")


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_results_folder_that_cannot_be_created_is_refused_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main([command, "smoke", "--out", f"{tmp_path}/file/a/b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/file/a/b cannot be created: {tmp_path}/file is not a folder")


@pytest.mark.parametrize(
    "arguments", [["report"], ["report", "DIR", "--out"], ["predict", "--gpus", "4"], ["compare", "DIR"]]
)
def test_an_empty_path_does_not_mean_the_current_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    store.save(result(trials_of("smoke")[0]))
    assert main([argument.replace("DIR", str(tmp_path)) for argument in arguments] + [""]) == 2
    assert capsys.readouterr().err == "error: '' is not a path; give a folder or a URI\n"


def test_a_file_in_place_of_the_trials_folder_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "trials").rmdir()
    (tmp_path / "trials").touch()
    for arguments in (["report", store.out], ["predict", store.out, "--gpus", "4"], ["compare", store.out, store.out]):
        assert main(arguments) == 2
        [output] = capsys.readouterr().err.splitlines()
        assert output.startswith(f"error: {tmp_path}: cannot be read ([Errno 20] Not a directory: '{tmp_path}/trials'")


@pytest.mark.parametrize("planned", [5, "all", {"a": 1}, [[1], {}, None]])
def test_status_ignores_planned_trials_that_are_not_names(
    planned: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    open_store(tmp_path, planned_trials=planned)
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == []


def test_plan_reports_a_corrupt_results_folder_under_a_uri(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{")
    assert main(["plan", "smoke", "--out", f"file://{tmp_path}"]) == 2
    [output] = capsys.readouterr().err.splitlines()
    assert output.startswith(f"error: file://{tmp_path}/study.json is corrupt (")


def test_every_command_reports_a_corrupt_results_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{")
    for arguments in (["plan", "smoke", "--out", str(tmp_path)], ["status", str(tmp_path)], ["report", str(tmp_path)]):
        assert main(arguments) == 2
        output = capsys.readouterr().err.splitlines()
        assert len(output) == 1
        assert output[0].startswith(f"error: {tmp_path}/study.json")


def test_incomplete_trials_run_again_and_damaged_ones_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    incomplete, damaged, complete = trials_of("smoke")[:3]
    for trial in (incomplete, damaged, complete):
        store.save(result(trial))
    (tmp_path / "trials" / incomplete.trial_id / "trial.json").unlink()
    (tmp_path / "trials" / damaged.trial_id / "trial.json").write_text("{")
    assert main(["plan", "smoke", "--out", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["counts"] == {"pending": 7, "done": 1}
    assert output.err.splitlines() == [f"warning: {tmp_path}: damaged trials will run again: {damaged.trial_id}"]


def test_a_done_trial_with_truncated_steps_runs_again_and_is_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trials = trials_of("smoke")
    store = open_store(tmp_path, planned_trials=[trial.trial_id for trial in trials])
    for trial in trials:
        store.save(result(trial))
    truncated = trials[0].trial_id
    steps = tmp_path / "trials" / truncated / "steps.parquet"
    steps.write_bytes(steps.read_bytes()[:-20])
    assert main(["plan", "smoke", "--out", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["counts"] == {"pending": 1, "done": 7}
    assert output.err.splitlines() == [f"warning: {tmp_path}: damaged trials will run again: {truncated}"]
    assert main(["status", str(tmp_path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["counts"], status["left"], status["damaged"]) == ({"done": 7}, [truncated], [truncated])


def test_a_damaged_trial_outside_the_plan_is_an_error_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    stray = trials_of("smoke")[0].but(steps=77)
    store.save(result(stray))
    folder = tmp_path / "trials" / stray.trial_id
    (folder / "trial.json").write_text("{")
    assert main(["run", "smoke", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: damaged trials that are not part of this plan: ") and str(folder) in line


def test_models_and_datasets_that_a_workload_replaces_are_warned_about(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def warnings(*options: str) -> list[str]:
        workload = ["--workload", f"{ROOT}/examples/own_workload.py:tiny"]
        assert main(["plan", "smoke", *workload, *options, "--out", str(tmp_path / "out")]) == 0
        return capsys.readouterr().err.splitlines()

    assert warnings() == []
    [one_model] = warnings("--model", "vgg19")
    assert one_model.startswith("warning: the workload defines its own model; model vgg19 ")
    assert "identical" not in one_model
    [two_models] = warnings("--model", "mlp,resnet18")
    assert two_models.startswith("warning: the workload defines its own model; model mlp, resnet18 ")
    assert "identical" in two_models
    [dataset] = warnings("--set", "dataset=synthetic")
    assert dataset.startswith("warning: the workload defines its own dataset; dataset synthetic ")


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_workload_runs_what_was_asked_and_no_more_and_names_its_study(
    gpus: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "local_capacity", lambda: [NodeCapacity("", "localhost", cpus=64, gpus=gpus)])
    monkeypatch.chdir(tmp_path)
    workload = ["--workload", f"{ROOT}/examples/own_workload.py:tiny"]

    def planned(*arguments: str) -> dict[str, Any]:
        assert main(["plan", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    one = planned(*workload, "--gpus", "1", "--batch-per-gpu", "4", "--repeats", "1")
    assert (one["study"], one["out"], len(one["trials"])) == ("tiny", "results/tiny", 1)
    free = planned(*workload)
    sizes = {trial["fields"]["world_size"] for trial in free["trials"]}
    assert len(free["trials"]) == len(sizes) * (5 if gpus else 3)
    assert main(["plan", *workload, "--gpus", "1,2", "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    again = planned("--config", "printed.yaml")
    ids = [trial["trial_id"] for trial in planned(*workload, "--gpus", "1,2")["trials"]]
    assert (again["study"], [trial["trial_id"] for trial in again["trials"]]) == ("tiny", ids)
    assert planned("smoke", *workload)["study"] == "smoke"


def test_a_workload_with_the_name_of_a_study_gets_another_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def weak(trial): ...\n")
    configuration = session.configure({"workload": f"{tmp_path}/mine.py:weak", "config": None})
    assert configuration.study == "own-weak"


def test_a_workload_that_cannot_be_imported_is_refused_before_ray_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "broken_workload.py"
    file.write_text("import no_such_module\n\ndef mine(trial):\n    ...\n")
    assert main(["run", "smoke", "--workload", f"{file}:mine", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: file {file} does not import: ModuleNotFoundError: No module named 'no_such_module'"
    ]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_no_cluster_at_the_address_is_exit_code_4(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([command, "smoke", "--address", "127.0.0.1:1", "--out", str(tmp_path / "out")]) == 4
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 1
    assert output[0].startswith("error: no Ray cluster answers at 127.0.0.1:1 (Connection refused)")


def test_an_internal_error_is_one_line_with_the_path_of_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bolt is loose\nsecond line")

    monkeypatch.setattr(session, "plan_trials", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plan", "smoke"]) == 70
    [line] = capsys.readouterr().err.splitlines()
    start, _, log = line.partition("; traceback in ")
    assert start == "error: internal error: RuntimeError: a bolt is loose"
    assert "second line" in Path(log).read_text()
    assert main(["plan", "smoke", "--debug"]) == 70
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


# ------------------------------------------------------------------------------------------ run, status, report


@pytest.mark.usefixtures("no_figures")
def test_a_finished_study_is_reported_without_a_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("study.cli.commands.connect", lambda *_, **options: pytest.fail("no trial is left to run"))
    store = open_store(tmp_path)
    for trial in trials_of("smoke"):
        store.save(result(trial))
    assert main(["run", "smoke", "--table", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == f"{tmp_path}/report/index.html"
    assert Path(output.out.splitlines()[-1]).is_file()
    table, card, _ = output.out.split("\n\n")
    assert card.startswith("mlp fp32, batch ") and "\n  trust " in card
    *header, four, three, two, one = table.splitlines()
    assert all("[" in line for line in (four, three, two, one)) and not any("[" in line for line in header)
    assert all(len(line) <= 80 and line == line.rstrip() for line in output.out.splitlines()[:-1])
    assert output.err.splitlines() == ["8 done"]
    study = json.loads((tmp_path / "study.json").read_text())
    assert study["configuration"]["batch-per-gpu"] == [8, 16]
    assert set(study["configuration"]["planned_trials"]) == {t.trial_id for t in trials_of("smoke")}


@pytest.mark.usefixtures("no_figures")
def test_a_run_reads_the_stored_trials_once_before_and_once_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    for trial in trials_of("smoke"):
        store.save(result(trial))
    scans: list[Store] = []
    scan = Store.scan

    def counted(store: Store) -> Any:
        scans.append(store)
        return scan(store)

    monkeypatch.setattr(Store, "scan", counted)
    assert main(["run", "smoke", "--out", str(tmp_path)]) == 0
    assert len(scans) == 2


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("damage", ["report is a file", "no study.json", "damaged study.json"])
def test_a_report_that_cannot_be_written_is_exit_code_74_and_the_same_command_completes_the_study(
    damage: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    store = open_store(out)
    for trial in trials_of("smoke"):
        store.save(result(trial))
    opened = session._open

    def open_and_damage(*arguments: Any) -> Store:
        store = opened(*arguments)
        if damage == "report is a file":
            (out / "report").write_text("")
        elif damage == "no study.json":
            (out / "study.json").unlink()
        else:
            (out / "study.json").write_text("{")
        return store

    with monkeypatch.context() as during_the_run:
        during_the_run.setattr(session, "_open", open_and_damage)
        assert main(["run", "smoke", "--out", str(out)]) == 74
    error, advice = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith("error: no report: ") and str(out) in error and "DIR" not in error
    assert advice.startswith(f"warning: the trials in {out}/trials are kept; run the same command again: ")
    damaged = {"report is a file": out / "report", "damaged study.json": out / "study.json"}
    if damage in damaged:
        damaged[damage].unlink()
    before = {path: path.stat().st_mtime_ns for path in (out / "trials").rglob("*")}
    assert main(["run", "smoke", "--out", str(out)]) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "trials").rglob("*")} == before
    assert (out / "report" / "index.html").is_file()


@pytest.mark.usefixtures("no_figures")
def test_quiet_prints_only_the_reports_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for trial in trials_of("smoke"):
        store.save(result(trial))
    assert main(["run", "smoke", "-q", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (f"{tmp_path}/report/index.html\n", "")


@pytest.mark.usefixtures("no_figures")
def test_batches_above_one_that_ran_out_of_memory_are_recorded_as_pruned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path)
    trials = trials_of("smoke")
    exhausted = [trial for trial in trials if trial.world_size == 2 and trial.batch_per_gpu == 8]
    for trial in trials:
        if trial.world_size == 1:
            store.save(result(trial))
        elif trial in exhausted:
            store.save(result(trial, "out_of_memory", reason="rank 0"))
    assert main(["run", "smoke", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "4 done, 2 out of memory, 2 pruned"
    pruned = [record for record in store.records() if record["status"] == "pruned"]
    assert [record["reason"] for record in pruned] == ["ran out of memory at batch_per_gpu 8"] * 2


@pytest.mark.usefixtures("no_figures")
def test_infeasible_rows_of_a_named_study_are_recorded_and_do_not_stop_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uneven = [NodeCapacity("", "a", cpus=8, gpus=3), NodeCapacity("", "b", cpus=8, gpus=1)]
    monkeypatch.setattr(session, "local_capacity", lambda: uneven)
    store = open_store(tmp_path, "weak")
    rows = plan_trials(STUDIES["weak"](uneven), uneven)
    assert {row.fields["world_size"]: row.status for row in rows} == {1: "pending", 2: "pending", 4: "infeasible"}
    for row in rows:
        if row.trial and row.status == "pending":
            store.save(result(row.trial))
    assert main(["run", "weak", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "10 done, 5 infeasible"


@pytest.mark.usefixtures("no_figures")
def test_a_failed_trial_is_listed_with_its_log_and_sets_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = trials_of("smoke")
    store = open_store(tmp_path)
    for trial in trials[1:]:
        store.save(result(trial))

    def measure(*_: Any) -> bool:
        store.save(result(trials[0], "failed", reason="rank 1 on node a died", log="Traceback"))
        return False

    cluster = SimpleNamespace(log_dir="")
    monkeypatch.setattr("study.cli.commands.connect", lambda *_, **options: contextlib.nullcontext(cluster))
    monkeypatch.setattr(session, "_measure", measure)
    assert main(["run", "smoke", "--out", str(tmp_path)]) == 1
    log = tmp_path / "trials" / trials[0].trial_id / "error.log"
    failed = f"failed: {trials[0].trial_id}: rank 1 on node a died; log: {log}"
    assert capsys.readouterr().err.splitlines()[-2:] == ["7 done, 1 failed", f"error: {failed}"]
    assert main(["run", "smoke", "--out", str(tmp_path), "-q"]) == 1
    assert capsys.readouterr().err.splitlines() == [f"error: {failed}"], "--quiet still lists failures"


@pytest.mark.parametrize("study", ["acceleration-ladder", "default", "large-batch"])
def test_a_printed_configuration_fits_exactly_if_the_study_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, study: str
) -> None:
    code = main(["plan", study])
    capsys.readouterr()
    assert main(["plan", study, "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert main(["plan", "--config", str(tmp_path / "printed.yaml")]) == code


def test_output_of_a_workload_file_goes_to_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text("print('hello')\n\n\ndef own(trial):\n    raise AssertionError\n")
    arguments = [
        "run",
        "smoke",
        "--gpus",
        "64",
        "--workload",
        f"{tmp_path / 'chatty.py'}:own",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main([*arguments, "--address", "127.0.0.1:1"]) == 4
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("hello\n")


def test_a_gpu_in_cuda_visible_devices_that_does_not_exist_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert count_gpus() == 0
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    assert count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert count_gpus() == 4


@pytest.mark.usefixtures("no_figures")
def test_an_interrupt_writes_a_partial_report_and_prints_the_command_that_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("study.cli.host.busy_lines", lambda *_: [])  # other tests load this host
    monkeypatch.setattr("study.cli.commands.connect", interrupted)
    store = open_store(tmp_path)
    for trial in trials_of("smoke")[:6]:
        store.save(result(trial))
    arguments = ["run", "smoke", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    assert main(arguments) == 130
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "6 done, 2 missing",
        f"warning: interrupted; resume with: python -m study.scaling run smoke --out {tmp_path}",
    ]
    assert "partial" in Path(output.out.splitlines()[-1]).read_text().lower()
    shown = " ".join(output.out.split())  # the terminal's width breaks sentences into lines
    assert "(partial: 2 of 8 planned trials missing)" in shown
    assert "finish the study: python -m study.scaling run smoke" in shown


def test_an_interrupt_during_the_report_prints_the_command_that_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("study.cli.host.busy_lines", lambda *_: [])  # other tests load this host
    monkeypatch.setattr("study.cli.commands.connect", interrupted)
    monkeypatch.setattr("analysis.report.report.write_report", interrupted)
    arguments = ["run", "smoke", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *arguments])
    assert main(arguments) == 130
    resume = f"resume with: python -m study.scaling run smoke --out {tmp_path}"
    assert capsys.readouterr().err.splitlines() == [f"warning: interrupted before the report was written; {resume}"]


def test_status_counts_trials_and_lists_failures_with_their_logs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trials = trials_of("smoke")
    store = open_store(tmp_path, planned_trials=[trial.trial_id for trial in trials])
    store.save(result(trials[0]))
    store.save(result(trials[1], "failed", reason="rank 1: [Errno 5]", log="Traceback"))
    store.save(result(trials[2], "timeout", reason="no result within 600 s"))
    assert main(["status", str(tmp_path)]) == 0
    log = f"{tmp_path}/trials/{trials[1].trial_id}/error.log"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "study smoke: 1 done, 1 failed, 1 timeout; 5 left, 2 to run again"
    assert f"failed: {trials[1].trial_id}: rank 1: [Errno 5]; log: {log}" in lines
    assert f"timeout: {trials[2].trial_id}: no result within 600 s; log: none" in lines
    assert [line for line in lines if line.startswith("left: ")] == [f"left: {trial.trial_id}" for trial in trials[3:]]
    assert lines[-1] == "run the remaining trials with: the command"
    assert Path(log).read_text() == "Traceback"
    assert main(["status", str(tmp_path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["counts"] == {"done": 1, "failed": 1, "timeout": 1}
    assert status["left"] == [trial.trial_id for trial in trials[3:]]


def test_failures_of_one_cause_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trials = trials_of("smoke")
    store = open_store(tmp_path, planned_trials=[trial.trial_id for trial in trials])
    for rank, trial in enumerate(trials):
        reason = f"rank {rank} on node host (0a1b2c3d): ValueError: {'wrong path' if rank else 'no memory'}"
        store.save(result(trial, "failed", reason=reason))
    assert main(["status", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert len(lines) == 2
    [no_memory] = [line for line in lines if "no memory" in line]
    assert no_memory.startswith(f"failed: {trials[0].trial_id}: ")
    [wrong_path] = [line for line in lines if "wrong path" in line]
    assert " and 6 other trials: " in wrong_path


def test_status_shows_the_answer_and_where_the_report_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(result(trials_of("smoke")[0]))
    assert main(["status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "\n  trust " in output and "report: " not in output
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("")
    assert main(["status", str(tmp_path)]) == 0
    assert f"report: {tmp_path}/report/index.html" in capsys.readouterr().out.splitlines()
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == f"{tmp_path}/report/index.html"


@pytest.mark.usefixtures("no_figures")
def test_a_quiet_report_prints_its_path_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(result(trials_of("smoke")[0]))
    assert main(["report", "-q", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == (f"{tmp_path}/report/index.html\n", "")


def test_every_command_knows_quiet_and_its_piped_help_has_no_blanks_at_the_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert main([name, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any("--quiet" in line for line in lines), name
        assert [line for line in lines if line != line.rstrip()] == []


def test_a_message_for_a_terminal_is_wrapped_but_not_its_command() -> None:
    command = "python -m study.scaling run weak --gpus 1,2,4 --out results/a-long-name"
    lines = fitted(f"error: {'word ' * 20}; resume with: {command}", 40).splitlines()
    assert max(map(len, lines[:-1])) <= 40
    assert lines[-1] == f"  {command}"


def test_a_lost_connection_is_one_cause_whatever_its_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for port, trial in enumerate(trials_of("smoke"), 7552):
        lost = f"RuntimeError: [/gloo/transport/tcp/pair.cc:{port}] Connection closed by peer [127.0.0.1]:{port}"
        store.save(result(trial, "failed", reason=f"rank {port} on node host (0a1b2c3d) died: {lost}"))
    assert main(["status", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert len([line for line in output.splitlines() if line.startswith("failed: ")]) == 1
    assert main(["show", str(tmp_path)]) == 0
    assert "RuntimeError: Connection closed by peer HOST:PORT" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("no_figures")
def test_report_writes_to_another_folder_from_the_results_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = open_store(tmp_path / "results")
    for trial in trials_of("smoke"):
        store.save(result(trial))
    assert main(["report", str(tmp_path / "results"), "--out", str(tmp_path / "elsewhere")]) == 0
    card, _, path = capsys.readouterr().out.rpartition("\n\n")
    assert path == f"{tmp_path}/elsewhere/index.html\n"
    assert not (tmp_path / "results" / "report").exists()
    assert main(["show", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out == f"{card}\n"


def test_show_prints_the_card_of_a_packed_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(RESULTS / "default-4gpu")]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0] == "resnet18_small bf16, batch 512 per GPU, 4 x H200"
    labels = [line.split("  ")[1] for line in lines[1:] if not line.startswith("   ")]
    assert labels == ["scales", "lost", "bound by", "do next", "more GPUs", "trust"]
    assert max(map(len, lines)) <= 80 and "\x1b" not in output.out
    assert output.err == ""


def test_show_prints_the_card_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(RESULTS / "default-4gpu"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == as_json(card_at(RESULTS / "default-4gpu"))
    assert (found["form"], found["trust"]["level"]) == ("scaling", "poor")
    scales = {entry["name"]: entry for entry in found["lines"][0]["quantities"]}
    assert scales["ranks"]["value"] == 4
    assert scales["equivalent_ranks"]["low"] < scales["equivalent_ranks"]["value"] < scales["equivalent_ranks"]["high"]


@pytest.mark.parametrize("state", ["missing", "empty", "a file", "damaged study", "damaged trials"])
def test_show_of_an_unreadable_folder_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, state: str
) -> None:
    folder = tmp_path / "results"
    if state == "a file":
        folder.write_text("")
    elif state == "empty":
        folder.mkdir()
    elif state != "missing":
        shutil.copytree(RESULTS / "default-1gpu", folder)
        damaged = folder / ("study.json" if state == "damaged study" else "trials.parquet")
        damaged.write_bytes(damaged.read_bytes()[:100])
    assert main(["show", str(folder)]) != 0
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("error: ") and str(folder) in line


def test_trust_is_coloured_on_a_terminal_unless_no_color_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = card_at(RESULTS / "default-4gpu")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    for no_colour in (False, True):
        if no_colour:
            monkeypatch.setenv("NO_COLOR", "1")
        else:
            monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        print_card(card)
        shown = capsys.readouterr().out
        assert ("\x1b[31m" in shown) is not no_colour
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.splitlines()) <= 60
