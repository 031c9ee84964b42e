"""Options of a user's own training code: which trials they mean, and one line for each mistake."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from analysis.read.own_code import flags_of
from study.capacity import NodeCapacity
from study.cli.commands import prepare
from study.cli.configuration import Configuration, resolve
from study.errors import ConfigurationError
from trainables.trial import Trial

NODES = [NodeCapacity("", "here", cpus=2, gpus=0)]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('training')\n\n\ndef train_func(config):\n    pass\n")
    return str(path)


def trials(configuration: Configuration) -> list[Trial]:
    return [row.trial for row in prepare(configuration, NODES).rows if row.trial is not None]


def message(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as error:
        resolve(options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_combination_of_flags_and_variables_is_a_trial(script: str, results_folder: str) -> None:
    options = {
        "script": script, "gpus": "1,2", "vary": ["--batch-size=16,32", "--amp"], "env": ["OMP_NUM_THREADS=1,2"],
        "script-arguments": "--data '/a b'", "repeats": 1, "out": results_folder,
    }  # fmt: skip
    planned = trials(resolve(options))
    assert len(planned) == len({trial.trial_id for trial in planned}) == 16
    assert {trial.script_flags for trial in planned} == {
        "--batch-size 16", "--batch-size 16 --amp", "--batch-size 32", "--batch-size 32 --amp",
    }  # fmt: skip
    assert {trial.script_env for trial in planned} == {"OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"}
    assert {trial.command_line[:2] for trial in planned} == {("--data", "/a b")}
    assert all(trial.door == "script" and trial.script == script for trial in planned)


def test_the_outline_names_each_flag_variable_and_config_entry_that_varies_once(
    script: str, results_folder: str
) -> None:
    common = {"gpus": "1,2", "repeats": 1, "out": results_folder}
    options = common | {
        "script": script, "vary": ["--batch-size=16,32", "--amp", "--lr=1"], "env": ["NCCL_ALGO=Ring,Tree"],
    }  # fmt: skip
    axes = "--gpus 1,2 x --vary=--batch-size=16,32 x --vary=--amp x --env NCCL_ALGO=Ring,Tree"
    assert prepare(resolve(options), NODES).outline.startswith(f"16 trials: {axes}, 1 repeat")
    options = common | {"train-func": f"{script}:train_func", "vary": ["batch_size=16,32", "lr=0.1"]}
    prepared = prepare(resolve(options), NODES)
    assert prepared.outline.startswith("4 trials: --gpus 1,2 x --vary=batch_size=16,32, 1 repeat")
    assert prepared.label(prepared.rows[0]) == "--gpus 1, batch_size=16, lr=0.1"


def test_a_bound_field_is_an_axis_that_reaches_the_script(script: str, results_folder: str) -> None:
    options = {
        "script": script, "gpus": "1", "bind": ["batch_per_gpu=--bs", "loader_workers=data.workers"],
        "batch-per-gpu": "4,8", "loader-workers": "2", "repeats": 1, "out": results_folder,
    }  # fmt: skip
    lines = [trial.command_line for trial in trials(resolve(options))]
    assert lines == [("--bs", "4", "data.workers=2"), ("--bs", "8", "data.workers=2")]


def test_values_of_a_config_are_typed(script: str, results_folder: str) -> None:
    options = {
        "train-func": f"{script}:train_func", "gpus": "1", "vary": ["lr=0.1", "name=a", "amp=true,false"], "repeats": 1,
        "out": results_folder,
    }  # fmt: skip
    configs = [json.loads(trial.function_config) for trial in trials(resolve(options))]
    assert configs == [{"lr": 0.1, "name": "a", "amp": True}, {"lr": 0.1, "name": "a", "amp": False}]


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package/train.py").write_text("print('training')\n")
    axes = resolve({"script": "package.train", "gpus": "1", "out": str(tmp_path / "results")}).axes
    assert axes["script"] == ("package.train",)
    Path("package/train.py").write_text("print('edited')\n")
    edited = resolve({"script": "package.train", "gpus": "1", "out": str(tmp_path / "results")}).axes
    assert edited["script_digest"] != axes["script_digest"]
    assert "no module of that name" in message({"script": "package.missing", "gpus": "1"})


def test_an_edited_script_is_another_trial(script: str, results_folder: str) -> None:
    options = {"script": script, "gpus": "1", "repeats": 1, "out": results_folder}
    [before] = trials(resolve(options))
    Path(script).write_text("print('edited')\n")
    [after] = trials(resolve(options))
    assert before.trial_id != after.trial_id


def test_added_ddp_belongs_to_every_trial_of_a_script(script: str, results_folder: str, tmp_path: Path) -> None:
    options = {"script": script, "gpus": "1,2", "add-ddp": True, "repeats": 1, "out": results_folder}
    prepared = prepare(resolve(options), NODES)
    assert [(row.trial.world_size, row.trial.add_ddp) for row in prepared.rows if row.trial] == [(1, True), (2, True)]
    path = tmp_path / "study.yaml"
    path.write_text(prepared.yaml)
    assert yaml.safe_load(prepared.yaml)["add-ddp"] is True
    assert trials(resolve({}, str(path))) == [row.trial for row in prepared.rows]
    plain = trials(resolve(options | {"add-ddp": False}))
    assert not {trial.trial_id for trial in plain} & {row.trial.trial_id for row in prepared.rows if row.trial}


def test_added_ddp_is_for_scripts_only(script: str) -> None:
    assert message({"add-ddp": True, "gpus": "1"}).startswith("--add-ddp: requires --script FILE.py")
    function = {"train-func": f"{script}:train_func", "add-ddp": True}
    assert message(function).startswith("--add-ddp: only for --script; ")
    assert message({"set": ["add_ddp=true"], "gpus": "1"}) == "--set: add_ddp cannot be set here; use --add-ddp"


def test_the_printed_yaml_plans_the_same_trials(script: str, results_folder: str, tmp_path: Path) -> None:
    options = {
        "script": script, "gpus": "1,2", "vary": ['--betas="0.9,0.99",none'], "bind": ["loader_workers=--workers"],
        "loader-workers": "0,2", "env": ["A=1,2"], "script-arguments": "--name 'x y'", "out": results_folder,
    }  # fmt: skip
    prepared = prepare(resolve(options), NODES)
    path = tmp_path / "study.yaml"
    path.write_text(prepared.yaml)
    assert "study" not in yaml.safe_load(prepared.yaml)
    assert trials(resolve({}, str(path))) == [row.trial for row in prepared.rows]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("train.ipynb", "is a notebook; fix: convert it with jupyter nbconvert --to script"),
        ("train.sh", "is a shell script; fix: give the Python script that it starts, and its arguments after --"),
    ],
)
def test_files_that_start_a_training_but_are_no_scripts_are_refused(tmp_path: Path, name: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text("{}\n")
    assert message({"script": str(path)}) == f"--script: {path} {problem}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"script": "missing.py"}, "missing.py does not exist"),
        ({"vary": ["--a=1"]}, "--vary: requires --script"),
        ({"script-arguments": "--a 1"}, "arguments after --: requires --script"),
        ({"script": "{script}", "study": "weak"}, "study 'weak' has its own code"),
        ({"script": "{script}", "train-func": "{script}:train_func"}, "cannot be combined"),
        ({"script": "{script}", "workload": "{script}:train_func"}, "cannot be combined"),
        ({"script": "{script}", "precision": "fp32,bf16"}, "precision: a script does not read this field"),
        ({"script": "{script}", "global-batch": "64"}, "global_batch: a script does not read this field"),
        ({"script": "{script}", "epochs": "2"}, "epochs: a script does not read this field"),
        ({"script": "{script}", "vary": ["--a=1", "--a=2"]}, "--a is given twice"),
        ({"script": "{script}", "vary": ["0\n0=1", "0\n0=2"]}, "0 0 is given twice"),
        ({"script": "{script}", "vary": ["--a=1,,2"]}, "--a has an empty value"),
        ({"script": "{script}", "vary": ["=1"]}, "expected a name"),
        ({"script": "{script}", "vary": ["--a=1"], "script-arguments": "--a=3"}, "--a is among the script's arguments"),
        ({"script": "{script}", "bind": ["batch=--a"]}, "'batch' is not a field of a trial"),
        ({"script": "{script}", "bind": ["steps"]}, "expected FIELD=FLAG"),
        ({"script": "{script}", "bind": ["steps=--a"], "vary": ["--a=1"]}, "--a is both varied and bound"),
        ({"script": "{script}", "env": ["A"]}, "expected NAME=value"),
        ({"script": "{script}", "script-arguments": "'open"}, "No closing quotation"),
        ({"train-func": "{script}:other"}, "does not define 'other'"),
        ({"train-func": "{script}:train_func", "env": ["A=1"]}, "only for --script"),
        ({"script": "{script}", "set": ["script_flags=--a"]}, "use --vary FLAG=LIST"),
    ],
)
def test_a_mistake_is_one_line(script: str, options: dict[str, Any], problem: str) -> None:
    def filled(value: Any) -> Any:
        return [filled(part) for part in value] if isinstance(value, list) else value.replace("{script}", script)

    assert problem in message({name: filled(value) for name, value in options.items()})


def test_a_script_with_a_syntax_error_is_named_with_its_line(script: str) -> None:
    Path(script).write_text("x = 1\nif x\n")
    assert "train.py line 2" in message({"script": script})


NAMES = st.from_regex(r"--[a-z][a-z.-]{0,8}|[a-z][a-z._]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), min_size=1).filter(
    lambda text: text.strip() == text
)


def quoted(value: str) -> str:
    """Return a value as one entry of a comma list."""
    return '"' + value.replace('"', '""') + '"'


@given(st.dictionaries(NAMES, st.lists(VALUES, min_size=1, max_size=3, unique=True), min_size=1, max_size=3))
def test_varied_values_reach_the_script_unchanged(values: dict[str, list[str]]) -> None:
    options = {
        "script": __file__,
        "vary": [f"{name}={','.join(map(quoted, chosen))}" for name, chosen in values.items()],
        "env": [f"{name.strip('-.')}_X={','.join(map(quoted, chosen))}" for name, chosen in list(values.items())[:1]],
    }
    axes = resolve(options).axes
    seen: dict[str, set[str]] = {name: set() for name in values}
    for text in axes["script_flags"]:
        arguments = Trial(script=__file__, script_flags=text).command_line
        while arguments:
            name, equals, value = arguments[0].partition("=")
            taken = 1 if equals and name in values else 2
            seen[name].add(value if taken == 1 else arguments[1])
            arguments = arguments[taken:]
    assert seen == {name: set(chosen) for name, chosen in values.items()}
    assert [shlex.split(text)[0].partition("=")[2] for text in axes["script_env"]] == list(next(iter(values.values())))


@given(st.dictionaries(NAMES, st.from_regex(r"[a-z0-9.]{1,6}", fullmatch=True) | st.just(True), min_size=1, max_size=4))
def test_flags_are_read_back_as_they_were_written(flags: dict[str, Any]) -> None:
    flags = {name: value for name, value in flags.items() if value is not True or name.startswith("-")}
    vary = [name if value is True else f"{name}={value}" for name, value in flags.items()]
    text = resolve({"script": __file__, "vary": vary}).axes.get("script_flags", ("",))[-1]
    assert flags_of(text) == flags


@given(
    st.fixed_dictionaries(
        {"script": st.just(__file__)},
        optional={
            "vary": st.lists(st.text(max_size=12), max_size=2),
            "bind": st.lists(st.text(max_size=12) | st.just("steps=--n"), max_size=2),
            "env": st.lists(st.text(max_size=12), max_size=2),
            "script-arguments": st.text(max_size=12),
        },
    )
)
def test_any_text_is_accepted_or_refused_in_one_line(options: dict[str, Any]) -> None:
    try:
        configuration = resolve(options)
    except ConfigurationError as error:
        assert "\n" not in str(error)
        return
    assert configuration.axes["script"] == (__file__,)
