"""Options and YAML become one valid configuration, or a one-line error."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from study.capacity import NodeCapacity
from study.cli.configuration import AXIS_OPTIONS, OTHER_OPTION_OF_FIELD, ConfigurationError, resolve, to_yaml
from study.options import FILE_KEYS
from study.plan.trials import PlanError, plan_trials
from study.studies.basic import STUDIES
from tests.support.hosts import ROOT
from tests.trainables.test_trial import CHANGED
from trainables.registry import DATASETS, MODELS, PRECISIONS, names_with
from trainables.trial import Trial

HOST = [NodeCapacity("", "localhost", cpus=2, gpus=0)]


def message(options: dict[str, Any], config: str | None = None) -> str:
    with pytest.raises(ConfigurationError) as error:
        resolve(options, config)
    return str(error.value)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --------------------------------------------------------------------------------------------------- valid options


def test_no_options_mean_the_default_study_with_its_axes() -> None:
    configuration = resolve({})
    assert (configuration.study, configuration.out, configuration.axes) == ("default", "results/default", {})
    assert configuration.trial_timeout_s == 600


def test_comma_lists_become_typed_axes_without_duplicates() -> None:
    configuration = resolve(
        {
            "gpus": "1,2, 4,2",
            "precision": "fp32,bf16",
            "set": ["pin_memory=true,no", "learning_rate=0.1,1e-3", "image_size=32"],
        }
    )
    assert configuration.axes == {
        "world_size": (1, 2, 4),
        "precision": ("fp32", "bf16"),
        "pin_memory": (True, False),
        "learning_rate": (0.1, 0.001),
        "image_size": (32,),
    }


@pytest.mark.parametrize(
    "field", sorted(CHANGED.keys() - OTHER_OPTION_OF_FIELD.keys() - {"dataset"})
)  # dataset needs files
def test_every_field_of_a_trial_can_be_set(field: str) -> None:
    assert resolve({"set": [f"{field}={CHANGED[field]}"]}).axes[field] == (CHANGED[field],)


def test_a_file_uses_the_names_of_the_command_line(tmp_path: Path) -> None:
    text = """
        study: weak
        gpus: [1, 2]
        batch_per_gpu: 8,16
        precision: bf16
        repeats: 4
        isolate: true
        set: {pin_memory: [true, false], image_size: 32}
    """
    configuration = resolve({}, write(tmp_path / "study.yaml", text))
    assert configuration.study == "weak"
    assert configuration.repeats == 4
    assert configuration.isolate is True
    assert configuration.axes == {
        "world_size": (1, 2),
        "batch_per_gpu": (8, 16),
        "precision": ("bf16",),
        "pin_memory": (True, False),
        "image_size": (32,),
    }


def test_the_command_line_takes_precedence_over_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "study.yaml", "gpus: 1\nbatch-per-gpu: 8\nrepeats: 2\nset: {precision: fp32}\n")
    configuration = resolve({"gpus": "2", "global-batch": "64", "precision": "bf16"}, config)
    assert configuration.axes == {"world_size": (2,), "global_batch": (64,), "precision": ("bf16",)}
    assert configuration.repeats == 2


@pytest.mark.parametrize(
    ("file", "options", "ranks"),
    [
        ("", {"profile": True}, ("0",)),
        ("profile: true", {}, ("0",)),
        ("profile: false", {}, None),
        ("", {"set": ["profile_ranks=0+3,all"]}, ("0+3", "all")),
        ("", {"profile": True, "set": ["profile_ranks=0+3"]}, ("0+3",)),
        ("profile: true\nset: {profile_ranks: all}", {}, ("all",)),
        ("profile: true", {"set": ["profile_ranks=1"]}, ("1",)),
        ("set: {profile_ranks: all}", {"profile": True}, ("0",)),
    ],
)
def test_profile_means_rank_0_unless_ranks_are_selected(
    file: str, options: dict[str, Any], ranks: tuple[str, ...] | None, tmp_path: Path
) -> None:
    assert resolve(options, write(tmp_path / "study.yaml", file)).axes.get("profile_ranks") == ranks


def test_values_that_some_machine_supports_are_left_for_the_plan_to_validate() -> None:
    axes = resolve({"interconnect": "auto,no_p2p,socket", "model": "vgg19"}).axes
    assert axes == {"interconnect": ("auto", "no_p2p", "socket"), "model": ("vgg19",)}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert resolve({}, write(tmp_path / "study.yaml", "# nothing\n")) == resolve({})


def test_the_first_seed_determines_the_order_of_trials() -> None:
    assert resolve({}).order_seed == 0
    assert resolve({"seed": "5,6"}).order_seed == 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"study": "strong", "seed": "3,4", "set": ["pin_memory=yes,no"], "price-per-gpu-hour": 2.5, "goal": "cost"},
        {"study": "smoke", "profile": True},
        {"study": "smoke", "interconnect": "auto,socket", "set": ["profile_ranks=0+1,all", "communication_steps=0"]},
        {"study": "smoke", "repeats": 1, "isolate": True, "address": "local", "model": "mlp,resnet18"},
        {"study": "gpt2-scaling", "case": ["weak, 8", "strong"]},
    ],
)
def test_the_printed_yaml_reproduces_the_trials(options: dict[str, Any], tmp_path: Path) -> None:
    def trial_ids(configuration: Any) -> set[str]:
        chosen = STUDIES[configuration.study](HOST).only(configuration.case)
        study = chosen.with_overrides(configuration.axes, configuration.repeats)
        return {row.trial.trial_id for row in plan_trials(study, HOST) if row.trial}

    first = resolve(options)
    study = STUDIES[first.study](HOST).only(first.case).with_overrides(first.axes, first.repeats)
    again = resolve({}, write(tmp_path / "printed.yaml", to_yaml(first, study)))
    assert trial_ids(again) == trial_ids(first)
    assert again.model_copy(update={"axes": {}, "repeats": first.repeats}) == first.model_copy(update={"axes": {}})


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"study": "defualt"},
            "unknown study 'defualt'; did you mean 'default'?",
        ),
        ({"study": "x"}, f"unknown study 'x'; studies: {', '.join(STUDIES)}"),
        (
            {"gpus": "1", "study": "2"},
            f"unknown study '2'; studies: {', '.join(STUDIES)}; "
            "separate the values of a list by commas, without spaces",
        ),
        ({"out": " "}, "--out ' ' is not a path"),
        (
            {"model": "resnet81"},
            f"--model 'resnet81' is not known; allowed: {', '.join(MODELS)}; did you mean 'resnet18'?",
        ),
        (
            {"precision": "fp32,bf61"},
            f"--precision 'bf61' is not known; allowed: {', '.join(PRECISIONS)}; did you mean 'bf16'?",
        ),
        (
            {"batch-per-gpu": "0"},
            "--batch-per-gpu '0': input should be greater than or equal to 1",
        ),
        (
            {"global-batch": "0"},
            "--global-batch '0': input should be greater than or equal to 1",
        ),
        ({"gpus": "1,,2"}, "--gpus has an empty value"),
        (
            {"gpus": "two"},
            "--gpus 'two': input should be a valid integer, unable to parse string as an integer",
        ),
        ({"steps": "9" * 20}, "--steps is larger than any 64-bit number"),
        ({"set": ["learning_rate=inf"]}, "--set: learning_rate 'inf': input should be a finite number"),
        (
            {"interconnect": "infiniband"},
            "--interconnect 'infiniband': input should be 'auto', 'no_p2p' or 'socket'",
        ),
        (
            {"set": ["profile_ranks=0-3"]},
            "--set: profile_ranks '0-3' names no ranks; allowed: all, or numbers joined by +, such as 0+3",
        ),
        ({"set": ["pin_memory"]}, "--set 'pin_memory': expected field=value or field=value,value"),
        ({"set": ["repeat=3"]}, "--set: repeat cannot be set here; use --repeats N"),
        ({"set": ["data_dir=/"]}, "--set: data_dir cannot be set here; use --data-dir DIR"),
        ({"gpus": "1", "set": ["world_size=2"]}, "--set: world_size is given twice; give it once"),
        (
            {"batch-per-gpu": "8", "global-batch": "8"},
            "--global-batch: cannot be combined with --batch-per-gpu; give only one of them",
        ),
        ({"repeats": 0}, "--repeats 0: input should be greater than or equal to 1"),
        ({"trial-timeout": 0.0}, "--trial-timeout 0.0: input should be greater than 0"),
        (
            {"goal": "costs"},
            "--goal 'costs' is not known; allowed: throughput, time-to-accuracy, cost; did you mean 'cost'?",
        ),
        ({"price-per-gpu-hour": float("nan")}, "--price-per-gpu-hour nan: input should be a finite number"),
        (
            {"address": "ray://head:10001"},
            "--address 'ray://head:10001' is not an address; allowed: auto, local, HOST:PORT; fix: Ray Client is not "
            "supported, so give HOST:PORT of Ray's GCS, whose default port is 6379",
        ),
        ({"address": "head:99999"}, "--address 'head:99999' is not an address; allowed: auto, local, HOST:PORT"),
        ({"address": "head:0"}, "--address 'head:0' is not an address; allowed: auto, local, HOST:PORT"),
        (
            {"set": ["dataset=cifar10"]},
            "--set dataset: 'cifar10' needs --data-dir DIR with its files; 'fashion_mnist_sample' needs no files",
        ),
        (
            {"model": "mlstm64", "set": ["dataset=amazon_reviews"]},
            "--set dataset: 'amazon_reviews' needs --data-dir DIR with its files; 'text_sample' needs no files",
        ),
    ],
)
def test_an_invalid_option_is_one_line(options: dict[str, Any], expected: str) -> None:
    assert message(options) == expected


def test_an_unknown_axis_suggests_the_nearest_field() -> None:
    assert message({"set": ["batch_per_gup=8"]}).endswith("; did you mean 'batch_per_gpu'?")
    assert message({"set": ["colour=8"]}).endswith("; docs/fields.md lists all")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- 1\n- 2\n", "{path} contains a list; expected a mapping of option names to values, such as `gpus: [1, 2]`"),
        ("just words", "{path} contains a str; expected a mapping of option names to values, such as `gpus: [1, 2]`"),
        ("gpus: [1, 2", "{path} line 1, column 12 is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("gpsu: 1\n", "{path}: unknown key 'gpsu'; did you mean 'gpus'?; keys: " + ", ".join(FILE_KEYS)),
        (
            "image_size: 32\n",
            "{path}: unknown key 'image_size'; it is a field of a trial: put image_size under `set:`; keys: "
            + ", ".join(FILE_KEYS),
        ),
        ("batch-per-gpu: 8\nbatch_per_gpu: 9\n", "{path}: batch-per-gpu is given twice"),
        ("gpus: 1\nsteps: 9\ngpus: 2\n", "{path} line 3: gpus is given twice"),
        ("set:\n  momentum: 0.9\n  momentum: 0.8\n", "{path} line 3: momentum is given twice"),
        ("batch-per-gpu: [8, true]\n", "{path}: batch-per-gpu: batch_per_gpu True: input should not be true or false"),
        ("batch-per-gpu: []\n", "{path}: batch-per-gpu: batch_per_gpu has no values"),
        ("precision: 16\n", "{path}: precision: precision 16: input should be a valid string"),
        (
            "set: {model: resnet81}\n",
            f"{{path}}: set: model 'resnet81' is not known; allowed: {', '.join(MODELS)}; did you mean 'resnet18'?",
        ),
        ("profile: 0+3\n", "{path}: profile '0+3': expected true or false; to select ranks, set profile_ranks"),
        ("study: [default]\n", f"{{path}}: study: unknown study ['default']; studies: {', '.join(STUDIES)}"),
    ],
)
def test_an_invalid_file_is_one_line_with_its_path(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "study.yaml", text)
    assert message({}, path) == expected.replace("{path}", path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    assert (
        message({}, str(tmp_path / "none.yaml"))
        == f"--config: {tmp_path}/none.yaml cannot be read: No such file or directory"
    )
    assert message({}, str(tmp_path)) == f"--config: {tmp_path} cannot be read: Is a directory"


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.py"
    os.mkfifo(pipe)
    assert message({}, str(pipe)) == f"--config: {pipe} is a named pipe; give a regular file"
    assert message({}, "/dev/zero") == "--config: /dev/zero is a device; give a regular file"
    assert message({"workload": f"{pipe}:mine"}) == f"--workload: {pipe} is a named pipe; give a regular file"


def test_a_configuration_can_be_piped_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "study.scaling", "plan", "smoke", "--address", "local", "--json"]
    ran = subprocess.run(
        [*command, "--out", str(tmp_path), "--config", "/dev/stdin"],
        input="repeats: 1\ngpus: [1]\n", capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert json.loads(ran.stdout)["counts"] == {"pending": 2}


def test_yaml_cannot_create_python_objects(tmp_path: Path) -> None:
    path = write(tmp_path / "study.yaml", "gpus: !!python/object/apply:os.getcwd []\n")
    assert message({}, path).startswith(f"{path} line 1, column 7 is not valid YAML: could not determine a constructor")


# --------------------------------------------------------------------------------------------------- data and workload


@pytest.mark.parametrize(("entry", "dataset"), [("FashionMNIST", "fashion_mnist"), ("cifar-10-batches-py", "cifar10")])
def test_the_data_set_is_detected_from_the_folder(
    entry: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / entry).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve({"data-dir": "data"}).axes == {"data_dir": (str(tmp_path / "data"),), "dataset": (dataset,)}


@pytest.mark.parametrize("name", ["reviews.json", "reviews.jsonl", "Books_5.json.gz", "Books.jsonl.gz"])
def test_reviews_are_detected_from_their_file_names(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "")
    assert resolve({"data-dir": str(tmp_path), "model": "mlstm64"}).axes["dataset"] == ("amazon_reviews",)


def test_a_results_folder_is_not_a_data_set(tmp_path: Path) -> None:
    write(tmp_path / "study.json", "{}")
    assert message({"data-dir": str(tmp_path)}).startswith(f"--data-dir: {tmp_path} contains no known data set; ")


def test_text_models_default_to_the_text_sample(tmp_path: Path) -> None:
    assert resolve({"model": "mlstm64,transformer"}).axes["dataset"] == ("text_sample",)
    assert "dataset" not in resolve({"model": "mlstm64,mlp"}).axes
    assert resolve({"model": "mlstm64", "set": ["dataset=synthetic"]}).axes["dataset"] == ("synthetic",)


def test_a_requested_data_set_overrides_detection(tmp_path: Path) -> None:
    config = write(tmp_path / "study.yaml", "set: {dataset: cifar10}\n")
    assert resolve({"data-dir": str(tmp_path)}, config).axes["dataset"] == ("cifar10",)


def test_an_invalid_data_directory_is_named(tmp_path: Path) -> None:
    assert message({"data-dir": str(tmp_path / "none")}) == f"--data-dir: folder {tmp_path}/none does not exist"
    file = write(tmp_path / "file", "")
    assert message({"data-dir": file}) == f"--data-dir: {file} is not a folder"
    assert message({"data-dir": f"{file}/below"}) == f"--data-dir: folder {file}/below cannot be read: Not a directory"
    error = message({"data-dir": str(tmp_path)})
    assert error.startswith(f"--data-dir: {tmp_path} contains no known data set; ")
    assert all(name in error for name in names_with(DATASETS, "needs_data_dir"))
    for entry in ("FashionMNIST", "cifar-10-batches-py"):
        (tmp_path / entry).mkdir()
    error = message({"data-dir": str(tmp_path)})
    assert error.startswith(f"--data-dir: {tmp_path} contains several data sets; ")
    assert error.endswith("--set dataset=fashion_mnist or --set dataset=cifar10")


def test_a_workload_becomes_an_absolute_path_with_a_digest_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def mine(trial):\n    return None\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    axes = resolve({"workload": "mine.py:mine"}).axes
    assert axes == {
        "workload": (f"{tmp_path}/mine.py:mine",),
        "workload_digest": (hashlib.sha256(text.encode()).hexdigest()[:8],),
    }
    assert Trial(workload=axes["workload"][0]).trial_id.startswith("mine-ddp-")


@pytest.mark.parametrize(
    "text",
    ["if True:\n    def mine(trial): ...\n", "from os import getcwd as mine\n", "mine = print\n", "from os import *\n"],
)
def test_a_workload_can_be_bound_in_any_way(text: str, tmp_path: Path) -> None:
    resolve({"workload": f"{write(tmp_path / 'file.py', text)}:mine"})


def test_a_workload_may_be_named_by_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    path = write(tmp_path / "package" / "inner" / "mine.py", "def build(trial): ...\n")
    monkeypatch.chdir(tmp_path)
    assert resolve({"workload": "package.inner.mine:build"}).axes["workload"] == (f"{path}:build",)
    assert resolve({"workload": "package/inner/mine.py:build"}).axes["workload"] == (f"{path}:build",)
    with pytest.raises(ConfigurationError) as error:
        resolve({"workload": "package.other:build"})
    assert "'package.other:build': expected path/to/file.py:name, or package.module:name" in str(error.value)


def test_a_workload_is_checked_without_running_it(tmp_path: Path) -> None:
    path = write(tmp_path / "file.py", "import no_such_module\ndef mine(trial): ...\nraise SystemExit\n")
    resolve({"workload": f"{path}:mine"})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("file.py", "--workload 'file.py': expected path/to/file.py:name, or package.module:name"),
        ("file.txt:mine", "--workload 'file.txt:mine': expected path/to/file.py:name, or package.module:name"),
        ("none.py:mine", "--workload: file {folder}/none.py does not exist"),
        (
            "file.py:mien",
            "--workload: {folder}/file.py does not define 'mien'; did you mean 'mine'?; functions: mine, other",
        ),
        ("broken.py:mine", "--workload: {folder}/broken.py line 2: '(' was never closed"),
        ("folder.py:mine", "--workload: {folder}/folder.py cannot be read: Is a directory"),
    ],
)
def test_an_invalid_workload_is_one_line(
    spec: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.py").write_text("def mine(trial): ...\ndef other(trial): ...\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef mine(\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    assert message({"workload": spec}) == expected.replace("{folder}", str(tmp_path))


# --------------------------------------------------------------------------------------------------- never a traceback

FIELDS = [name for name in Trial.model_fields if name not in OTHER_OPTION_OF_FIELD]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.dates(), st.binary(max_size=5))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS, max_size=2))
LISTS = st.one_of(
    st.text(), st.lists(st.sampled_from(["1", "0", "2", "fp32", "mlp", "-1", "1e9", ""]), max_size=4).map(",".join)
)


def plan_or_explain(options: dict[str, Any], config: str | None = None) -> None:
    try:
        configuration = resolve(options, config)
        plan_trials(STUDIES[configuration.study](HOST).with_overrides(configuration.axes, configuration.repeats), HOST)
    except (ConfigurationError, PlanError) as error:
        assert str(error)
        assert "\n" not in str(error).replace(repr("\n"), "")


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(AXIS_OPTIONS, LISTS),
            "study": st.one_of(st.text(), st.sampled_from(list(STUDIES))),
            "address": st.text(),
            "out": st.text(),
            "workload": st.text(),
            "data-dir": st.text(),
            "profile": st.booleans(),
            "repeats": st.integers(),
            "trial-timeout": st.floats(),
            "price-per-gpu-hour": st.floats(),
            "goal": st.text(),
            "set": st.lists(st.one_of(st.text(), st.tuples(st.sampled_from(FIELDS), LISTS).map("=".join)), max_size=3),
        },
    )
)
@example({"workload": "\0.py:a"})
@example({"data-dir": "\0"})
@example({"batch-per-gpu": "9" * 30})
def test_no_option_causes_a_traceback(options: dict[str, Any]) -> None:
    plan_or_explain(options)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.one_of(st.sampled_from(FILE_KEYS), st.text(max_size=5), st.integers()), VALUES, max_size=4))
@example({"set": {"batch_per_gpu": 2**70}})
@example({"set": {1: 2}})
@example({"out": "\0"})
def test_no_yaml_mapping_causes_a_traceback(tmp_path: Path, content: dict[Any, Any]) -> None:
    plan_or_explain({}, write(tmp_path / "study.yaml", yaml.safe_dump(content)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass"))))
@example(b"gpus: &a [*a]")
@example(b"[" * 5000)
@example(b"gpus: " + b"1" * 5000)
@example(b"gpus: 0x" + b"f" * 5000)
@example(b"gpus: 2020-13-45")
@example(b"? {a: 1}\n: 2")
def test_no_file_causes_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    plan_or_explain({}, str(path))
