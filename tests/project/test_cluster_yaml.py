"""cluster.yaml as `ray up` reads it, with Ray's defaults merged in."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

PATH = Path(__file__).parent.parent.parent / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    prepared: dict[str, Any] = prepare_config(yaml.safe_load(PATH.read_text()))
    return prepared


def start_commands(cluster: dict[str, Any]) -> list[str]:
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    return [command for command in commands if "ray start" in command]


def test_the_file_is_valid_for_ray(cluster: dict[str, Any]) -> None:
    validate_config(cluster)


def test_the_dashboard_listens_only_on_the_head(cluster: dict[str, Any]) -> None:
    (head,) = [command for command in cluster["head_start_ray_commands"] if "ray start" in command]
    assert [word for word in shlex.split(head) if "dashboard-host" in word] == ["--dashboard-host=127.0.0.1"]


def test_every_node_starts_ray_with_token_authentication(cluster: dict[str, Any]) -> None:
    commands = start_commands(cluster)
    assert len(commands) == 2
    for command in commands:
        before, _, _ = command.partition("ray start")
        assert "export RAY_AUTH_MODE=token RAY_worker_niceness=0;" in before
    assert cluster["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"


def test_packages_are_installed_only_from_the_lock(cluster: dict[str, Any]) -> None:
    keys = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = [command for key in keys for command in cluster[key]]
    assert any("scripts/set_up.sh requirements.lock" in command for command in commands)
    for command in commands:
        assert "ray-" not in command and "://" not in command and "ray[" not in command


def test_the_files_of_the_set_up_command_exist() -> None:
    assert (PATH.parent / "scripts/set_up.sh").stat().st_mode & 0o111
    assert (PATH.parent / "requirements.lock").is_file()


def test_the_number_of_workers_is_fixed(cluster: dict[str, Any]) -> None:
    workers = {name: kind for name, kind in cluster["available_node_types"].items() if name != "head"}
    assert set(workers) == {"gpu"}
    for kind in workers.values():
        assert kind["min_workers"] == kind["max_workers"] == cluster["max_workers"] > 0


def test_the_head_runs_no_ranks(cluster: dict[str, Any]) -> None:
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert head["resources"] == {"CPU": 0}


def test_nodes_are_terminated_instead_of_stopped(cluster: dict[str, Any]) -> None:
    assert cluster["provider"]["cache_stopped_nodes"] is False


def test_no_node_is_a_spot_instance(cluster: dict[str, Any]) -> None:
    for kind in cluster["available_node_types"].values():
        assert "InstanceMarketOptions" not in kind["node_config"]
        assert kind["node_config"]["MetadataOptions"] == {"HttpTokens": "required"}


def test_a_user_changes_five_lines() -> None:
    header, _, settings = PATH.read_text().partition("cluster_name:")
    assert "Five lines, marked CHANGE" in header
    assert settings.count("# CHANGE") == 5
