"""Results of a complete study on a real S3 server."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyarrow import fs

from study.capacity import NodeCapacity
from study.cli import commands as session
from study.plan.trials import plan_trials
from study.scaling import main
from study.store.lock import NAME, one_run
from study.store.result import TrialResult
from study.store.store import Store
from study.studies.basic import STUDIES
from tests.support.frames import environment, steps
from trainables.trial import Trial

HOST = [NodeCapacity(node_id="", address="here", cpus=2, gpus=0)]
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
CLIENT = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "the-key-of-somebody",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Start an S3 server in a separate process on a free port, and return its address."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=clean,
    )  # fmt: skip
    assert server.stdout and server.stdin
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        server.wait(20)


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of an empty bucket, with the environment variables of the AWS command line."""
    for name, value in (CLIENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    fs.FileSystem.from_uri("s3://results?allow_bucket_creation=true")[0].create_dir("results")
    return "s3://results"


@pytest.fixture(autouse=True)
def host_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "local_capacity", lambda: HOST)
    monkeypatch.setattr(session, "is_local", lambda address: True)


def smoke_trials() -> list[Trial]:
    return [row.trial for row in plan_trials(STUDIES["smoke"](HOST), HOST) if row.trial]


def measured(trial: Trial, status: str = "done", reason: str = "") -> TrialResult:
    fields = trial.model_dump()
    table = pa.Table.from_pandas(steps(fields, 0.1), preserve_index=False) if status == "done" else None
    return TrialResult(
        trial=trial, status=status, reason=reason, steps=table, environment=environment(fields), worker_group="group-0",
        started_at=1e9, duration_s=1.0, log=reason,
    )  # fmt: skip


def opened(out: str) -> Store:
    study = STUDIES["smoke"](HOST)
    return Store.open(
        out, name="smoke", question=study.question, configuration={}, versions={}, command="python -m study.scaling"
    )


def objects(out: str) -> set[str]:
    """Return the keys of all objects below a URI, relative to it, without markers of empty folders."""
    system, root = fs.FileSystem.from_uri(out)
    found = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    return {entry.path.removeprefix(f"{root}/") for entry in found if entry.type == fs.FileType.File}


def planned(out: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    assert main(["plan", "smoke", "--out", out, "--json"]) == 0
    return {row["trial_id"]: row["status"] for row in json.loads(capsys.readouterr().out)["trials"]}


def test_a_study_in_a_bucket_is_planned_saved_resumed_and_reported(
    bucket: str, capsys: pytest.CaptureFixture[str], no_figures: None
) -> None:
    out = f"{bucket}/team/smoke"
    first, *others = smoke_trials()
    assert set(planned(out, capsys).values()) == {"pending"}
    store = opened(out)
    for trial in others:
        store.save(measured(trial))
    store.save(measured(first, "failed", "rank 1 died"))
    assert planned(out, capsys) == {first.trial_id: "pending"} | {trial.trial_id: "done" for trial in others}

    assert main(["status", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"done": len(others), "failed": 1}
    assert found["failures"][0]["log"] == f"{out}/trials/{first.trial_id}/error.log"

    opened(out).save(measured(first))
    assert f"trials/{first.trial_id}/error.log" not in objects(out)
    assert main(["run", "smoke", "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{out}/report/index.html"
    assert {"report/index.html", "report/report.md", "report/tables/throughput.csv"} <= objects(out)
    system, root = fs.FileSystem.from_uri(out)
    with system.open_input_file(f"{root}/report/report.md") as file:
        assert STUDIES["smoke"](HOST).question in file.read().decode()


def test_results_in_a_bucket_are_reported_to_a_local_folder(
    bucket: str, capsys: pytest.CaptureFixture[str], no_figures: None, results_folder: str
) -> None:
    store = opened(f"{bucket}/smoke")
    for trial in smoke_trials():
        store.save(measured(trial))
    before = objects(f"{bucket}/smoke")
    assert main(["report", f"{bucket}/smoke", "--out", results_folder]) == 0
    assert os.path.isfile(f"{results_folder}/index.html")
    assert objects(f"{bucket}/smoke") == before


def test_a_missing_bucket_is_a_one_line_error_with_its_name(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smoke", "--out", "s3://no-such-bucket/smoke"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: s3://no-such-bucket/smoke cannot be used: ")
    assert "no-such-bucket" in line.partition("used: ")[2]


@pytest.mark.parametrize("is_in_address", [True, False])
def test_an_address_with_a_query_is_planned_run_and_reported(
    bucket: str,
    endpoint: str,
    is_in_address: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_figures: None,
) -> None:
    query = "?region=us-east-1"
    if is_in_address:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        query += f"&endpoint_override={endpoint.removeprefix('http://')}&scheme=http"
    out = f"{bucket}/smoke{query}"
    store = opened(out)
    first, *others = smoke_trials()
    for trial in others:
        store.save(measured(trial))
    store.save(measured(first, "failed", "rank 1 died"))
    assert main(["status", out, "--json"]) == 0
    log = json.loads(capsys.readouterr().out)["failures"][0]["log"]
    assert log == f"{bucket}/smoke/trials/{first.trial_id}/error.log{query}"
    store.save(measured(first))
    assert main(["run", "smoke", "--out", out]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{bucket}/smoke/report/index.html{query}"
    assert {"study.json", "report/index.html", "report/tables/throughput.csv"} <= objects(out)
    assert main(["report", out]) == 0


def test_two_runs_do_not_write_into_the_same_folder_of_a_bucket(
    bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = opened(f"{bucket}/smoke")
    with one_run(store):
        assert main(["run", "smoke", "--out", store.out]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {store.out}: another run writes into it: pid {os.getpid()} on host ")
        assert planned(store.out, capsys)
    assert NAME not in objects(store.out)


def test_results_contain_no_credentials(bucket: str) -> None:
    store = opened(f"{bucket}/smoke")
    store.save(measured(smoke_trials()[0]))
    system, root = fs.FileSystem.from_uri(f"{bucket}/smoke")
    for key in objects(f"{bucket}/smoke"):
        with system.open_input_file(f"{root}/{key}") as file:
            assert CLIENT["AWS_SECRET_ACCESS_KEY"].encode() not in file.read()
