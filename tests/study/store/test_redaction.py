"""Secrets are removed from texts of any length, in linear time, and what is stored of a text is limited."""

import json
from pathlib import Path

import pytest

from analysis.export import main as export
from study.orchestrate.failures import describe_failure, first_line
from study.scaling import main
from study.store.redaction import (
    LINE_LENGTH,
    LOG_LENGTH,
    REASON_LENGTH,
    redacted,
    redacted_line,
    redacted_log,
    secret_in,
)
from tests.study.store.test_store import open_store, result_of
from tests.support.frames import FIELDS, grid, record, write_results, write_trial
from trainables.trial import Trial

HIDDEN = "hunter2hunter2"
LONG = 250_000


@pytest.mark.timeout(60)  # quadratic work would take minutes
@pytest.mark.parametrize("word", ["x", "QUJD", "-", "--a", "token", "--token", "token=a ", "Bearer ", "://", " "])
def test_a_long_text_without_secrets_is_unchanged_and_secrets_around_it_are_found(word: str) -> None:
    filler = (word * (LONG // len(word) + 1))[:LONG]
    assert redacted(filler, {}) == filler
    text = f"--hub-token {HIDDEN} | {filler} | secret_key={HIDDEN} of s3://user:{HIDDEN}@bucket"
    assert redacted(text, {}) == f"--hub-token *** | {filler} | secret_key=*** of s3://***@bucket"


def test_a_name_of_a_secret_at_the_end_of_a_long_word_is_found() -> None:
    assert redacted(f"{'x' * LONG}token={HIDDEN}", {}) == f"{'x' * LONG}token=***"


@pytest.mark.timeout(60)
def test_an_exception_that_echoes_its_input_is_described_in_one_clipped_line() -> None:
    error = ValueError("cannot decode: " + "QUJD" * LONG)
    failure = describe_failure(1, "node", error)
    assert failure.line == first_line(error)
    assert failure.line.startswith("ValueError: cannot decode: QUJD") and len(failure.line) == LINE_LENGTH
    assert failure.traceback.startswith("ValueError: cannot decode: QUJD") and len(failure.traceback) <= LOG_LENGTH


def test_a_secret_with_several_lines_is_removed_from_the_line_of_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNING_KEY", "begin of it\nend of it")
    assert first_line(ValueError("bad key begin of it\nend of it")) == "ValueError: bad key ***"


def test_a_clipped_log_keeps_its_start_and_end_without_secrets() -> None:
    filler = f"token={HIDDEN} and more\n" * 200_000
    log = redacted_log(f"first call\n{filler}last call")
    assert log.startswith("first call\n") and log.endswith("last call")
    assert "characters left out" in log and HIDDEN not in log
    assert len(log) <= LOG_LENGTH and redacted_log(log) == log


def test_a_clipped_line_shows_no_part_of_a_secret() -> None:
    line = redacted_line(f"{'x' * (LINE_LENGTH - 10)} token={HIDDEN}")
    assert len(line) <= LINE_LENGTH and HIDDEN[:2] not in line


def test_reason_and_log_of_a_stored_trial_are_limited(tmp_path: Path) -> None:
    store, trial = open_store(tmp_path), Trial()
    store.save(result_of(trial, "failed", reason="x" * LONG, log="y " * LONG))
    folder = Path(store.trial_folder(trial.trial_id))
    assert len(json.loads((folder / "trial.json").read_text())["reason"]) == REASON_LENGTH
    assert (folder / "error.log").stat().st_size <= LOG_LENGTH


UNENCODABLE = "bad\udcff.JPEG \ud800"


def test_a_text_that_is_not_utf_8_is_escaped_where_it_becomes_a_message() -> None:
    failure = describe_failure(0, "node", ValueError(f"cannot decode {UNENCODABLE}"))
    assert failure.line == r"ValueError: cannot decode bad\udcff.JPEG \ud800"
    failure.traceback.encode()


def test_a_trial_whose_reason_is_not_utf_8_can_be_saved_and_read(tmp_path: Path) -> None:
    store, good, bad = open_store(tmp_path), Trial(), Trial(repeat=1)
    store.save(result_of(good))
    environment = {"nodes": [{"node_id": "a", "gpus": [], "host": UNENCODABLE}]}
    store.save(result_of(bad, "failed", reason=UNENCODABLE, log=UNENCODABLE, environment=environment))
    records = {record["trial_id"]: record for record in store.records()}
    assert records[bad.trial_id]["reason"] == r"bad\udcff.JPEG \ud800"
    json.dumps(records, ensure_ascii=False).encode()
    assert Path(store.trial_folder(bad.trial_id), "error.log").read_text() == r"bad\udcff.JPEG \ud800"


def test_every_command_reads_a_folder_that_holds_a_reason_that_is_not_utf_8(
    tmp_path: Path, no_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = grid({}, world_size=[1, 2, 4], repeat=[0, 1])
    folder = str(write_results(tmp_path / "results", trials, lambda fields: {"step_s": 0.1}))
    write_trial(Path(folder), record(FIELDS | {"repeat": 7}, "failed", UNENCODABLE))
    commands = ["report"], ["compare", folder], ["predict", "--gpus", "8"]
    codes = {command: main([command, folder, *more]) for command, *more in commands}
    shown = capsys.readouterr()
    assert codes == {"report": 0, "compare": 0, "predict": 0}, shown.err
    assert export([folder, "--tensorboard", str(tmp_path / "export")]) == 0
    assert r"bad\udcff.JPEG \ud800" in Path(folder, "report", "index.html").read_text()


def test_a_record_keeps_what_identifies_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(model="transformer_tiny", dataset="text_sample")
    for name, value in {
        "MODEL_KEY": "transformer_tiny",
        "STATUS_TOKEN": "infeasible",
        "BUILD_KEY": "2.11.0+cu",
    }.items():
        monkeypatch.setenv(name, value)
    store = open_store(tmp_path, versions={"torch": "2.11.0+cu"}, configuration={"planned_trials": [trial.trial_id]})
    environment = {"versions": {"torch": "2.11.0+cu"}, "variables": {"NCCL_NET_PLUGIN": "transformer_tiny"}}
    store.save(result_of(trial, "infeasible", reason="no transformer_tiny", environment=environment))
    [record] = store.records()
    assert Trial.model_validate(record["trial"]) == trial
    assert (record["trial_id"], record["status"]) == (trial.trial_id, "infeasible")
    assert record["environment"] == {"versions": {"torch": "2.11.0+cu"}, "variables": {"NCCL_NET_PLUGIN": "***"}}
    assert record["reason"] == "no ***"
    assert store.study()["versions"] == {"torch": "2.11.0+cu"}
    assert store.study()["configuration"]["planned_trials"] == [trial.trial_id]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("transformer_tiny", "the value of MODEL_KEY"),
        ("--model transformer_tiny --lr 0.1", "the value of MODEL_KEY"),
        ("HF=transformer_tiny", "the value of MODEL_KEY"),
        ("--hub-token hunter2hunter2", "a password, token or key"),
        ("s3://user:hunter2hunter2@bucket", "a password, token or key"),
        ("--tokenizer gpt2-medium --max-tokens 100000000 --max_tokens=100000000", None),
        ("/data/transformer_tiny_2", None),
        ("resnet18", None),
    ],
)
def test_the_secret_in_a_value_is_found_by_its_source(value: str, found: str | None) -> None:
    assert secret_in(value, {"MODEL_KEY": "transformer_tiny", "EDITOR": "resnet18"}) == found


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"api_key": "hunter2", "model": "a"}', '{"api_key": "***", "model": "a"}'),
        ("{'password': 'hunter\\'2', 'b': 1}", "{'password': '***', 'b': 1}"),
        ('{"db_password" : "it\'s \\"me\\""}', '{"db_password" : "***"}'),
        ('{"body": "{\\"hub_token\\": \\"hunter2\\"}"}', '{"body": "{\\"hub_token\\": \\"***\\"}"}'),
        ("{'token': b'hunter2'}", "{'token': b'***'}"),
        ("{'pwd': 'hunter2'}", "{'pwd': '***'}"),
        ("pwd=hunter2hunter2 key=QUJDQUJDQUJDQUJDQUJD", "pwd=*** key=***"),
        (f"pushed with ghp_{'a1' * 18}.", "pushed with ***."),
        ("AKIAIOSFODNN7EXAMPLE:x", "***:x"),
        (f"(hf_{'aB' * 17})", "(***)"),
        (f"sk-proj-{'a1' * 20}", "***"),
        (f"glpat-{'a1' * 10}", "***"),
        (f"AIza{'a1' * 17}b", "***"),
        (f"xoxb-{'12-' * 8}", "***"),
        (f"npm_{'a1' * 18}", "***"),
        (f"pypi-{'a1' * 20}", "***"),
        ("https://hooks.slack.com/services/T000/B000/XXXX", "https://hooks.slack.com/services/***"),
        ("cannot reach user:hunter2@host:1", "cannot reach ***@host:1"),
        ("cannot reach user:hunt@er2@host:1", "cannot reach ***@host:1"),
        ("https://user:hunt@er2@host/x@y", "https://***@host/x@y"),
        ("s3://AKIA1:hun/ter+2@bucket/x", "s3://***@bucket/x"),
        ("run --api-key=hunter2hunter2 --gpus 1", "run --api-key=*** --gpus 1"),
        ("run --api-key 'hunter2 hunter2' --gpus 1", "run --api-key '***' --gpus 1"),
        ("connect(password='hunter2', user='me')", "connect(password='***', user='me')"),
        ('export HUB_TOKEN="hunter2 hunter2"; run', 'export HUB_TOKEN="***"; run'),
        ("X-Api-Key: hunter2hunter2", "X-Api-Key: ***"),
        ("AccountName=me;AccountKey=hunter2hunter2==;", "AccountName=me;AccountKey=***;"),
        (f"sk_live_{'a1' * 12}", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def_1", "***"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_secrets_in_json_dicts_and_of_well_known_forms_are_replaced(text: str, kept: str) -> None:
    assert redacted(text, {}) == kept
    assert redacted(kept, {}) == kept


@pytest.mark.parametrize(
    "text",
    [
        'KeyError: "token"',
        "{'tokens': 'many of them', 'vocabulary': 'bytes'}",
        "sorted(trials, key=operator.itemgetter(0))",
        "PWD=/home/user/project",
        "model sk-learn, hf_hub, AKIA",
        "http://localhost:8000/a@2x.png",
        "token='' password=\"\"",
        "train.py:12: @decorated at 12:30 by user@host",
    ],
)
def test_text_without_a_secret_is_unchanged(text: str) -> None:
    assert redacted(text, {}) == text


@pytest.mark.parametrize(
    "name", ["DB_PASS", "GITHUB_PAT", "SLACK_WEBHOOK", "SENTRY_DSN", "ROOT_PWD", "DATABASE_URL", "NPM_AUTH"]
)
def test_values_of_variables_with_the_name_of_a_secret_are_replaced(name: str) -> None:
    assert redacted("login with hunter2hunter2", {name: HIDDEN}) == "login with ***"
    assert redacted("login with hunter2hunter2", {"BYPASS": HIDDEN, "PWD": HIDDEN}) == "login with hunter2hunter2"


def test_errors_on_the_terminal_and_in_traceback_files_show_no_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["status", f"s3://somebody:{HIDDEN}@bucket/x?region=nowhere&endpoint_override=127.0.0.1:1"]) == 2
    assert main(["plan", "--address", f"user:{HIDDEN}@host"]) == 2
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(*arguments: object) -> None:
        raise RuntimeError(f"token={HIDDEN}")

    monkeypatch.setattr("study.cli.status.status_of", fail)
    folder = str(tmp_path)
    assert main(["status", folder]) == main(["status", folder, "--debug"]) == 70
    [log] = tmp_path.rglob("error-*.log")
    shown = capsys.readouterr()
    for text in (shown.err, shown.out, log.read_text()):
        assert HIDDEN not in text
    assert shown.err.count("***") >= 3 and "***" in log.read_text()
