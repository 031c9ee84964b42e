"""The doctor detects each problem and suggests a fix."""

import json
import os
from pathlib import Path

import pytest

from study.cli import doctor
from study.orchestrate.local_ray import make_token
from study.scaling import main


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("study.orchestrate.discovery.address.BOOTSTRAP_FILE", tmp_path / "no-cluster")


def test_this_environment_satisfies_pyproject() -> None:
    assert [(check.name, check.status) for check in doctor.versions()] == [("python", "ok"), ("packages", "ok")]


def test_missing_and_outdated_packages_are_listed(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\nrequires-python = "<3"\ndependencies = ["rich>=999", "no-such-package", "ray[tune]>=1", "typer"]\n'
    )
    python, packages = doctor.versions(project)
    assert (python.status, packages.status) == ("fail", "fail")
    assert python.message.endswith("; this project requires <3")
    assert packages.message.startswith("rich ")
    assert packages.message.endswith(" is not >=999; no-such-package is missing")
    assert "requirements.lock" in packages.fix


def test_the_sample_images_can_be_read_and_a_damaged_file_is_reported(tmp_path: Path) -> None:
    [readable] = doctor.shipped_data()
    assert (readable.status, readable.message) == ("ok", "12000 images in fashion_mnist_sample.parquet")
    damaged = tmp_path / "sample.parquet"
    damaged.write_bytes(b"PAR1 no")
    [unreadable] = doctor.shipped_data(damaged)
    assert unreadable.status == "fail"
    assert unreadable.message.startswith(f"{damaged} cannot be read")


def test_low_shared_memory_and_disk_space_are_warnings(tmp_path: Path) -> None:
    [enough] = doctor.shared_memory(str(tmp_path), min_bytes=1)
    [little] = doctor.shared_memory(str(tmp_path), min_bytes=2**60)
    [missing] = doctor.shared_memory(str(tmp_path / "none"))
    assert (enough.status, little.status, missing.status) == ("ok", "warn", "warn")
    assert "--shm-size" in little.fix
    assert {check.status for check in doctor.disk(min_bytes=2**60)} == {"warn"}


def test_a_token_that_others_can_read_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    [none] = doctor.authentication()
    assert none.status == "ok"
    token.write_text("secret")
    token.chmod(0o644)
    [open_to_all] = doctor.authentication()
    assert open_to_all.status == "warn"
    assert open_to_all.fix == f"chmod 600 {token}"
    token.chmod(0o600)
    [private] = doctor.authentication()
    assert (private.status, private.message) == ("ok", f"token in {token}")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    [off] = doctor.authentication()
    assert off.status == "warn"
    assert "secret" not in f"{private}{open_to_all}{off}"


def test_only_its_owner_can_read_the_token_of_a_local_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    make_token()
    assert not (tmp_path / ".ray").exists(), "RAY_AUTH_TOKEN is used instead"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    make_token()
    token = tmp_path / ".ray" / "auth_token"
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    [check] = doctor.authentication()
    assert (check.status, len(token.read_text())) == ("ok", 64)
    token.write_text("mine")
    make_token()
    assert token.read_text() == "mine"


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    [busy] = doctor.processors()
    assert busy.status == "warn"
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 1000.0, 1000.0))
    [idle] = doctor.processors()
    assert idle.status == "ok"


def test_doctor_exits_with_0_without_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"python", "packages", "GPUs", "CPU", "disk", "data sample", "Ray authentication", "cluster"} <= {
        check["name"] for check in checks
    }
    assert all(check["fix"] for check in checks if check["status"] == "fail")


def test_doctor_exits_with_4_if_the_cluster_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", "127.0.0.1:1"]) == 4
    assert "FAIL cluster: no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().out


@pytest.mark.parametrize("address", ["foo", "", "127.0.0.1:65536"])
def test_an_invalid_address_is_a_usage_error(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--address", address]) == 2
    output = capsys.readouterr()
    assert output.err == f"error: --address {address!r} is not an address; allowed: auto, local, HOST:PORT\n"
    assert output.out == ""


def test_the_address_of_a_stopped_cluster_is_a_warning_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ray_current_cluster"
    path.write_text("127.0.0.1:1")
    monkeypatch.setattr("study.orchestrate.discovery.address.BOOTSTRAP_FILE", path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"warn Ray address: no Ray answers at 127.0.0.1:1 in {path}" in out
    assert f"     fix: rm {path}, or" in out
    assert "ok   cluster: none; a run starts a local Ray" in out
