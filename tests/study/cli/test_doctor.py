"""The doctor: each trouble is seen, and its mend is said."""

import json
import os
import socket
from pathlib import Path

import pytest

from study.cli import doctor
from study.orchestrate.cluster import make_token
from study.scaling import main


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("study.orchestrate.cluster.BOOTSTRAP_FILE", tmp_path / "no-cluster")


def test_this_environment_satisfies_its_own_declaration() -> None:
    assert [(check.name, check.status) for check in doctor.versions()] == [("python", "ok"), ("packages", "ok")]


def test_packages_that_are_missing_or_too_old_are_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\nrequires-python = "<3"\ndependencies = ["rich>=999", "no-such-package", "ray[tune]>=1", "typer"]\n'
    )
    python, packages = doctor.versions(project)
    assert (python.status, packages.status) == ("fail", "fail")
    assert python.found.endswith("; this project needs <3")
    assert packages.found.startswith("rich ")
    assert packages.found.endswith(" is not >=999; no-such-package is missing")
    assert "requirements.lock" in packages.mend


def test_the_shipped_images_can_be_read_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    [whole] = doctor.shipped_data()
    assert (whole.status, whole.found) == ("ok", "12000 images in fashion_mnist_sample.parquet")
    damaged = tmp_path / "sample.parquet"
    damaged.write_bytes(b"PAR1 no")
    [told] = doctor.shipped_data(damaged)
    assert told.status == "fail"
    assert told.found.startswith(f"{damaged} cannot be read")


def test_little_shared_memory_and_little_disk_are_warned_of(tmp_path: Path) -> None:
    [enough] = doctor.shared_memory(str(tmp_path), least_bytes=1)
    [little] = doctor.shared_memory(str(tmp_path), least_bytes=2**60)
    [missing] = doctor.shared_memory(str(tmp_path / "none"))
    assert (enough.status, little.status, missing.status) == ("ok", "warn", "warn")
    assert "--shm-size" in little.mend
    assert {check.status for check in doctor.disk(least_bytes=2**60)} == {"warn"}


def test_a_token_that_others_can_read_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    [none] = doctor.authentication()
    assert none.status == "ok"
    token.write_text("secret")
    token.chmod(0o644)
    [open_to_all] = doctor.authentication()
    assert open_to_all.status == "warn"
    assert open_to_all.mend == f"chmod 600 {token}"
    token.chmod(0o600)
    [own] = doctor.authentication()
    assert (own.status, own.found) == ("ok", f"token in {token}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    [off] = doctor.authentication()
    assert off.status == "warn"
    assert "secret" not in f"{own}{open_to_all}{off}"


def test_the_token_of_a_local_ray_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    make_token()
    assert not (tmp_path / ".ray").exists(), "another one is used"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    make_token()
    token = tmp_path / ".ray" / "auth_token"
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    [check] = doctor.authentication()
    assert (check.status, len(token.read_text())) == ("ok", 64)
    token.write_text("mine")
    make_token()
    assert token.read_text() == "mine"


def test_an_address_where_nobody_answers_any_more_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ray_current_cluster"
    assert list(doctor.left_behind(path)) == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        path.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert list(doctor.left_behind(path)) == []
    [stale] = doctor.left_behind(path)
    assert stale.status == "warn"
    assert stale.mend == f"ray stop, or rm {path}"
    path.write_text("nonsense")
    [stale] = doctor.left_behind(path)
    assert stale.status == "warn"


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    [busy] = doctor.processors()
    assert busy.status == "warn"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 1000.0, 1000.0))
    [idle] = doctor.processors()
    assert idle.status == "ok"


def test_the_doctor_ends_with_0_where_no_cluster_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"python", "packages", "GPUs", "CPU", "disk", "data sample", "Ray authentication", "cluster"} <= {
        check["name"] for check in checks
    }
    assert all(check["mend"] for check in checks if check["status"] == "fail")


def test_the_doctor_ends_with_4_where_the_cluster_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "127.0.0.1:1"]) == 4
    assert "FAIL cluster: no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.parametrize("address", ["foo", "", "127.0.0.1:65536"])
def test_an_address_that_is_none_is_a_mistake_of_use_for_the_doctor_too(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--address", address]) == 2
    told = capsys.readouterr()
    assert told.err == f"error: --address {address!r} is not an address; allowed: auto, local, HOST:PORT\n"
    assert told.out == ""


def test_what_an_ended_cluster_left_behind_is_warned_of_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ray_current_cluster"
    path.write_text("127.0.0.1:1")
    monkeypatch.setattr("study.orchestrate.cluster.BOOTSTRAP_FILE", path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"warn stale Ray address: {path} names 127.0.0.1:1, where no Ray answers" in out
    assert "ok   cluster: a run starts a local Ray" in out
