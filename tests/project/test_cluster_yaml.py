"""cluster.yaml, as Ray itself reads it, with Ray's defaults merged in: what `ray up` would do, without a cloud."""

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
    both = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    return [command for command in both if "ray start" in command]


def test_ray_finds_the_file_valid(cluster: dict[str, Any]) -> None:
    validate_config(cluster)


def test_the_dashboard_listens_on_the_head_only(cluster: dict[str, Any]) -> None:
    (head,) = [command for command in cluster["head_start_ray_commands"] if "ray start" in command]
    assert [word for word in shlex.split(head) if "dashboard-host" in word] == ["--dashboard-host=127.0.0.1"]


def test_every_ray_starts_with_token_authentication_on(cluster: dict[str, Any]) -> None:
    commands = start_commands(cluster)
    assert len(commands) == 2
    for command in commands:
        before, _, _ = command.partition("ray start")
        assert "export RAY_AUTH_MODE=token RAY_worker_niceness=0;" in before
    assert cluster["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"


def test_no_nightly_ray_nor_any_other_address_is_installed_from(cluster: dict[str, Any]) -> None:
    keys = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = [command for key in keys for command in cluster[key]]
    assert any("scripts/set_up.sh requirements.lock" in command for command in commands)
    for command in commands:
        assert "ray-" not in command and "://" not in command and "ray[" not in command


def test_what_the_set_up_command_calls_is_in_the_project() -> None:
    assert (PATH.parent / "scripts/set_up.sh").stat().st_mode & 0o111
    assert (PATH.parent / "requirements.lock").is_file()


def test_the_number_of_workers_is_fixed(cluster: dict[str, Any]) -> None:
    workers = {name: kind for name, kind in cluster["available_node_types"].items() if name != "head"}
    assert set(workers) == {"gpu"}
    for kind in workers.values():
        assert kind["min_workers"] == kind["max_workers"] == cluster["max_workers"] > 0


def test_the_head_takes_no_ranks(cluster: dict[str, Any]) -> None:
    head = cluster["available_node_types"][cluster["head_node_type"]]
    assert head["resources"] == {"CPU": 0}


def test_nodes_are_ended_and_not_left_to_cost(cluster: dict[str, Any]) -> None:
    assert cluster["provider"]["cache_stopped_nodes"] is False


def test_no_node_is_a_spot_instance_that_may_vanish(cluster: dict[str, Any]) -> None:
    for kind in cluster["available_node_types"].values():
        assert "InstanceMarketOptions" not in kind["node_config"]
        assert kind["node_config"]["MetadataOptions"] == {"HttpTokens": "required"}


def test_an_owner_changes_five_lines() -> None:
    header, _, settings = PATH.read_text().partition("cluster_name:")
    assert "Five lines, marked CHANGE" in header
    assert settings.count("# CHANGE") == 5
