"""Security: hostile results folders, configurations and names are harmless, and secrets are never written."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from analysis.read.results import ResultsError, load
from analysis.report.report import write_report
from study.orchestrate.failures import describe_failure
from study.scaling import main
from study.store.redaction import redacted
from study.store.store import Store, StoreError
from tests.analysis.report.test_report import GPU
from tests.study.store.test_store import open_store, result_of
from tests.support.frames import FIELDS, grid, record, steps, write_results, write_study, write_trial
from tests.support.report import show_figures
from tests.support.system import needs, program
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import WorkloadError

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted(
    path for room in ("study", "trainables", "analysis", "scripts") for path in (ROOT / room).rglob("*.py")
)

# ------------------------------------------------------------------------------------------------- code execution

UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MAY_UNPICKLE = {"trainables/data/cifar10.py"}
"""CIFAR-10 is published as pickles; its reader admits arrays and plain values only"""

RUNS_THE_SCRIPT = "trainables/probe/child.py"
"""executes the script that the user names on the command line, which no results folder or configuration can add to"""

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
YAML_READERS = {"safe_load", "safe_dump", "compose"}  # compose makes YAML nodes and creates no objects


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def dangers(path: Path) -> list[str]:
    """Return the calls and imports of a file through which its input could run code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [f"imports {name}" for name in names if name.partition(".")[0] in UNPICKLING]
        elif isinstance(node, ast.Call):
            name = called(node)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_yaml = name.startswith("yaml.") and name.partition(".")[2] not in YAML_READERS
            unsafe_load = name == "torch.load" and options.get("weights_only") != "True"
            if name in RUNS_CODE or unsafe_yaml or unsafe_load or name.endswith("read_pickle"):
                found.append(f"line {node.lineno}: {name}")
            if options.get("allow_pickle") == "True" or options.get("shell") == "True" or name == "os.system":
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_input_files_cannot_run_code() -> None:
    found = {str(path.relative_to(ROOT)): dangers(path) for path in SOURCES}
    assert [danger.partition(": ")[2] for danger in found.pop(RUNS_THE_SCRIPT)] == ["exec", "compile"]
    assert {path: each for path, each in found.items() if each} == {path: ["imports pickle"] for path in MAY_UNPICKLE}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from dill import loads", "eval(text)", "yaml.load(text)", "torch.load(path)",
     "pd.read_pickle(path)",
     "np.load(path, allow_pickle=True)", "subprocess.run(text, shell=True)", "torch.load(path, weights_only=False)"],
)  # fmt: skip
def test_the_check_detects_calls_that_run_code(line: str, tmp_path: Path) -> None:
    path = tmp_path / "reader.py"
    path.write_text(line)
    assert len(dangers(path)) == 1


def test_the_oldest_allowed_ray_reads_parquet_without_pickle() -> None:
    """Ray before 2.55 unpickles Parquet columns of its own types (CVE-2026-41486); Ray Tune registers these types."""
    floor = re.search(r'"ray\[[^\]]*\]>=(\d+)\.(\d+)', (ROOT / "pyproject.toml").read_text())
    assert floor is not None
    assert (int(floor[1]), int(floor[2])) >= (2, 55)


def test_no_command_runs_the_workload_file_that_a_results_folder_names(
    tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(ran)!r}, 'w')\n")
    trials = [fields | {"workload": f"{trap}:make"} for fields in grid({}, world_size=[1, 2, 4], repeat=[0, 1])]
    directory = write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1})
    write_study(directory, configuration={"workload": f"{trap}:make", "config": "!!python/object/apply:os.system [id]"})
    for command, *more in (["status"], ["report"], ["compare", str(directory)], ["predict", "--gpus", "8"]):
        assert main([command, str(directory), *more]) == 0, capsys.readouterr().err
    assert not ran.exists()


def test_a_configuration_that_creates_an_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    config = tmp_path / "study.yaml"
    config.write_text(f"model: !!python/object/apply:os.system ['touch {ran}']\n")
    assert main(["plan", "--config", str(config)]) == 2
    assert "could not determine a constructor for the tag" in capsys.readouterr().err
    assert not ran.exists()


def test_workload_text_is_not_run_from_a_folder_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = "def stood_in(trial):\n    return None\n"
    spec = f"{tmp_path}/absent/stands_in_{os.getpid()}.py:stood_in"
    assert callable(load_user_workload(spec, source))
    (folder,) = tmp_path.glob("scaling-study-*/workload-*")
    folder.chmod(0o777)
    with pytest.raises(WorkloadError, match="writable by other users"):
        load_user_workload(spec, source)


# ------------------------------------------------------------------------------------------ links out of a folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "old").mkdir(parents=True)
    (folder / "old" / "precious").write_text("mine")
    for path in (folder / "old", folder / "old" / "precious"):
        os.utime(path, (0, 0))
    return folder


@pytest.mark.parametrize("entry", [".partial", "trials", "report", "checkpoints", "study.json"])
def test_a_link_out_of_a_results_folder_is_refused(entry: str, tmp_path: Path, outside: Path) -> None:
    results = tmp_path / "results"
    open_store(results).save(result_of(Trial()))
    if entry == "study.json":
        (results / entry).rename(outside / entry)
    else:
        shutil.rmtree(results / entry, ignore_errors=True)
    (results / entry).symlink_to(outside / entry if entry == "study.json" else outside)
    expected = f"{results / entry} points outside of {results}; replace the link by its target"
    for use in (open_store, lambda folder: Store.at(str(folder))):
        with pytest.raises(StoreError, match=re.escape(expected)):
            use(results)
    with pytest.raises(ResultsError, match="leads outside of"):
        write_report(results)
    assert (outside / "old" / "precious").read_text() == "mine"
    assert not (outside / "index.html").exists()


def test_a_file_of_a_trial_cannot_be_a_link_out_of_the_folder(tmp_path: Path, outside: Path) -> None:
    results = tmp_path / "results"
    store = open_store(results)
    store.save(result_of(Trial()))
    (Path(store.trial_folder(Trial().trial_id)) / "error.log").symlink_to(outside / "old" / "precious")
    with pytest.raises(StoreError, match=r"error\.log points outside of"):
        Store.at(str(results))


def test_a_results_folder_can_be_a_link_and_contain_internal_links(tmp_path: Path, outside: Path) -> None:
    results = tmp_path / "results"
    open_store(results).save(result_of(Trial()))
    (tmp_path / "alias").symlink_to(results)
    (results / "notes").symlink_to(outside)
    (results / "trials" / "again").symlink_to(results / "trials" / Trial().trial_id)
    assert Trial().trial_id in Store.at(str(tmp_path / "alias")).statuses()


@pytest.mark.parametrize("name", ["../../outside", "..", "/etc/passwd", "a/b"])
def test_paths_in_records_are_not_followed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    store = open_store(results)
    store.save(result_of(Trial(), "failed", reason="broke", log="why"))
    marker = Path(store.trial_folder(Trial().trial_id)) / "trial.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps(content | {"log": name}))
    assert main(["status", str(results)]) == 0
    told = capsys.readouterr().out.replace("\n", "")
    assert f"log: {store.trial_folder(Trial().trial_id)}/error.log" in told
    marker.write_text(json.dumps(content | {"trial_id": name}))
    assert Store.at(str(results)).corrupt() == [Trial().trial_id]
    found = load(results)
    assert found.trials.empty
    [line] = found.damaged
    assert "trial_id is" in line


def test_a_partial_trial_with_a_path_as_id_is_not_moved_outside(tmp_path: Path) -> None:
    results = tmp_path / "results"
    open_store(results)
    partial = results / ".partial" / f"999999999-1-{os.uname().nodename}"
    partial.mkdir(parents=True)
    (partial / "trial.json").write_text(json.dumps({"trial_id": "../../escaped"}))
    open_store(results)
    assert not (tmp_path / "escaped").exists()
    assert not partial.exists()


# -------------------------------------------------------------------------------------------------- hostile names

ATTACKS = (
    "</script><script>pwned(1)</script>",
    "\"><img src=x onerror='pwned(2)'>",
    "<svg/onload=pwned(3)>",
    "</title></style></textarea><script>pwned(4)//",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:pwned(5)",
    "]]><script>pwned(6)</script>",
    "$\\frac{$ ![picture](http://x/p.png) \x1b[2J",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a results folder in which every free string is an attack."""
    directory = tmp_path_factory.mktemp("hostile") / "results"
    evil = "".join(ATTACKS)
    write_study(directory, name=evil, question=evil, command=evil, configuration={"planned_trials": [evil], evil: evil})
    axes = grid(GPU, world_size=[1, 2], batch_per_gpu=[32, 64], precision=[evil, "bf16"], parallel=[evil])
    for number, fields in enumerate(axes):
        fields |= {"model": evil, "workload": evil, "data_dir": evil, "dataset": evil, evil: evil}
        written = record(fields) | {"trial_id": f"t{number}-" + evil.replace("/", "\N{DIVISION SLASH}")[:150]}
        written |= {"worker_group": evil}
        environment: Any = written["environment"]
        for node in environment["nodes"]:
            node |= {"host": evil, "cpu_model": evil}
            for gpu in node["gpus"]:
                gpu |= {"name": evil, "driver": evil}
        environment |= {"variables": {evil: evil}, "versions": {"torch": evil, evil: evil}}
        environment |= {"git": {"commit": evil, "dirty": True}}
        write_trial(directory, written, steps(fields, 0.1))
    failed = record(FIELDS | GPU | {"repeat": 7}, "failed", evil) | {"log": evil, "trial_id": "b<b onclick=pwned(8)>"}
    write_trial(directory, failed)
    with pytest.MonkeyPatch.context() as patch:
        show_figures(patch, {"phases", "batch_size", "work"})
        write_report(directory)
    return directory


@needs("chromium")
def test_hostile_names_remain_text_in_a_browser(hostile: Path, tmp_path: Path) -> None:
    page = (hostile / "report" / "index.html").read_text()
    assert page.count("<script") == 1  # the report's script, which sorts and filters
    assert "&lt;script&gt;pwned" in page
    assert "{{ 7 * 7 }}" in page  # unchanged, and not 49
    trap = "<script>window.hits = []; window.pwned = (n) => hits.push(n);</script>"
    witness = (
        "<script>addEventListener('load', () => setTimeout(() => { const found = {hits, "
        "ours: document.querySelectorAll('script').length, strange: [...document.querySelectorAll('*')].filter("
        "(e) => [...e.attributes].some("
        "(a) => a.name.startsWith('on') || /javascript:/i.test(a.name == 'href' ? a.value : ''))"
        ").map((e) => e.outerHTML.slice(0, 80)), images: document.querySelectorAll('img').length}; "
        "const p = document.createElement('pre'); p.id = 'result'; "
        "p.textContent = encodeURIComponent(JSON.stringify(found)); document.body.append(p); }, 200));</script>"
    )
    file = tmp_path / "page.html"
    # without the page's security policy, which alone would stop most attacks
    bare = re.sub(r"<meta http-equiv=.*?>", "", page, count=1)
    file.write_text(bare.replace("<head>", f"<head>{trap}", 1).replace("</body>", f"{witness}</body>"))
    browser = program("chromium")
    assert browser
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *options, "--virtual-time-budget=3000", "--dump-dom", file.as_uri()]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    written = re.search(r'<pre id="result">(.*?)</pre>', run.stdout)
    assert written, run.stderr[-2_000:]
    assert json.loads(unquote(written[1])) == {"hits": [], "ours": 3, "strange": [], "images": 0}


def test_figures_and_markdown_contain_no_markup_from_names(hostile: Path) -> None:
    pictures = list((hostile / "report" / "figures").glob("*.svg"))
    assert pictures
    for text in [picture.read_text() for picture in pictures] + [(hostile / "report" / "report.md").read_text()]:
        assert not re.search(r"<(script|img|svg/onload|b onclick)", text)
        assert "\x1b" not in text
        assert "![picture](http" not in text or "<svg" in text


# -------------------------------------------------------------------------------------------------------- secrets

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "RAY_AUTH_TOKEN": "5e3c0c1f9d2b4a7788aa",
    "HF_TOKEN": 'hf_with"quotes\\and\nlines',
    "DB_PASSWORD": "correct horse battery",
    "WANDB_API_KEY": "0123456789abcdef0123",
}
ADDRESSES = {
    "s3://AKIAWHOEVER:hunter2hunter2@bucket/study": "s3://***@bucket/study",
    "s3://bucket/a?region=eu&secret_key=hunter2hunter2": "s3://bucket/a?region=eu&secret_key=***",
    "https://user@host/x?X-Amz-Signature=abcdef0123456789": "https://***@host/x?X-Amz-Signature=***",
    "run --hub-token hunter2hunter2 --gpus 1,2": "run --hub-token *** --gpus 1,2",
    "Authorization: Bearer hunter2hunter2": "Authorization: Bearer ***",
}
PLAIN = (
    "python -m study.scaling run --gpus 1,2 --data-dir /data/tokens --set model=byte_gpt",
    "rank 1: ValueError: tokens classified wrongly; 3,000 tokens processed",
    "https://docs.ray.io/en/latest/ray-security/token-auth.html",
    "s3://bucket/study",
)


@pytest.mark.parametrize(("given", "kept"), ADDRESSES.items())
def test_credentials_in_addresses_and_options_are_replaced(given: str, kept: str) -> None:
    assert redacted(given, {}) == kept
    assert redacted(kept, {}) == kept


@pytest.mark.parametrize("text", PLAIN)
def test_text_that_only_mentions_secrets_is_unchanged(text: str) -> None:
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_AUTH_MODE": "token",
        "TOKEN_FILE": "/",
        "EDITOR": "bucket/study",
    }
    assert redacted(text, environment) == text


def test_redaction_covers_nested_values_and_keeps_their_types() -> None:
    value = {"a": [1, None, True, "x TheSecret1 y"], "b": ("TheSecret1",), "TheSecret1": 2.5}
    assert redacted(value, {"MY_SECRET": "TheSecret1"}) == {
        "a": [1, None, True, "x *** y"],
        "b": ["***"],
        "TheSecret1": 2.5,
    }


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "auth_token"
    token.write_text("token-of-the-cluster-7f3a\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return SECRETS | {"token file": "token-of-the-cluster-7f3a"}


def spellings(secret: str) -> set[bytes]:
    """Return a secret as plain text and as JSON text."""
    return {secret.encode(), json.dumps(secret)[1:-1].encode()}


def test_no_file_of_a_results_folder_or_its_report_contains_a_secret(planted: dict[str, str], tmp_path: Path) -> None:
    everything = " and ".join(planted.values())
    store = Store.open(
        str(tmp_path / "results"),
        name="default",
        question="How does it scale?",
        configuration={"out": "s3://AKIA:hunter2hunter2@bucket", "workload": everything},
        versions={"python": "3.11"},
        command=f"python -m study.scaling run --set x={everything} --out s3://AKIA:hunter2hunter2@bucket",
    )
    fields = FIELDS | {"world_size": 1}
    written = record(fields)
    environment = dict(written["environment"]) | {"variables": {"NCCL_NET_PLUGIN": everything}}
    try:
        raise RuntimeError(f"login failed for {everything}\nwith {everything}")
    except RuntimeError as error:
        failure = describe_failure(1, "node", error)
    store.save(result_of(Trial(), environment=environment))
    store.save(
        result_of(Trial(repeat=1), "failed", reason=f"{failure.line} {everything}", log=failure.traceback + everything)
    )
    write_report(tmp_path / "results")
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert {"study.json", "trial.json", "error.log", "index.html", "report.md"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for secret in [*planted.values(), "hunter2hunter2"]:
            assert not any(spelling in content for spelling in spellings(secret)), f"{path} holds {secret}"
    assert "login failed for ***" in (tmp_path / "results/trials" / Trial(repeat=1).trial_id / "error.log").read_text()


def test_error_messages_of_ranks_contain_no_secret_from_the_environment(planted: dict[str, str]) -> None:
    failure = describe_failure(0, "node", ValueError(f"bad key {planted['AWS_SECRET_ACCESS_KEY']}"))
    assert failure.line == "ValueError: bad key ***"
    assert planted["AWS_SECRET_ACCESS_KEY"] not in failure.traceback


def test_only_allowed_environment_variables_are_recorded(
    monkeypatch: pytest.MonkeyPatch, planted: dict[str, str]
) -> None:
    from study.store.environment import variables

    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert variables()["NCCL_DEBUG"] == "INFO"
    assert not set(variables()) & set(planted)
    assert not [
        name for name in variables() if not name.startswith(("NCCL_", "GLOO_", "OMP_", "CUBLAS_", "CUDA_", "TORCH_"))
    ]


# --------------------------------------------------------------------------------------------------- dependencies


def test_every_locked_dependency_is_pinned_with_a_digest() -> None:
    for lock in ("requirements.lock", "requirements-dev.lock"):
        entries = re.split(r"\n(?=[a-z0-9])", (ROOT / lock).read_text())
        pinned = [entry for entry in entries if not entry.startswith("#")]
        assert len(pinned) > 50
        assert all(re.match(r"[\w.\[\],-]+==\S+", entry) and "--hash=sha256:" in entry for entry in pinned)
        assert "://" not in re.sub(r"#.*", "", "\n".join(pinned)), "an index or an address in the lock file"


def test_the_audit_fails_if_it_could_not_look_a_package_up(tmp_path: Path) -> None:
    """Without `--strict`, pip-audit reports packages that it could not look up as free of vulnerabilities."""
    recipe = (ROOT / "Makefile").read_text().partition("\naudit:")[2].partition("\n\n")[0]
    assert "pip-audit" in recipe
    assert "--strict" in recipe
    assert "requirements.lock" in recipe
