"""Files in clusters/: launcher files read by Ray, manifests checked by KubeRay's schema, and the Slurm script."""

import json
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from scripts.crd_facts import closed_schema

ROOT = Path(__file__).parent.parent.parent
LAUNCHER_FILES = ("cluster.yaml", "clusters/local.yaml", "clusters/gcp.yaml")
MANIFESTS = ("clusters/kuberay/raycluster.yaml", "clusters/kuberay/rayjob.yaml")
SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())["schemas"]


def read_yaml(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


def schema_errors(manifest: dict[str, Any]) -> list[str]:
    """Return the errors of a manifest according to KubeRay's schema."""
    schema = SCHEMAS[f"{manifest['apiVersion']} {manifest['kind']}"]
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return spec


# ------------------------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_every_launcher_file_is_valid_for_ray(name: str) -> None:
    validate_config(prepare_config(read_yaml(name)))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_every_launcher_file_starts_ray_with_a_token_and_a_local_dashboard(name: str) -> None:
    content = read_yaml(name)
    starts = {
        role: [line for line in content[f"{role}_start_ray_commands"] if "ray start" in line]
        for role in ("head", "worker")
    }
    for (command,) in starts.values():
        assert "export RAY_AUTH_MODE=token RAY_worker_niceness=0;" in command.partition("ray start")[0]
    assert "--dashboard-host=127.0.0.1" in shlex.split(starts["head"][0])
    assert "dashboard" not in starts["worker"][0]


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_the_token_is_never_readable_by_other_users(name: str) -> None:
    text, content = (ROOT / name).read_text(), read_yaml(name)
    assert content["setup_commands"][0] == "chmod 600 ~/.ray/auth_token"
    # rsync -a keeps the mode of the source file, so it must be private before the first `ray up`
    assert text.index("ray get-auth-token") < text.index("chmod 600 ~/.ray/auth_token") < text.index("ray up ")


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_every_launcher_file_installs_only_the_lock(name: str) -> None:
    prepared = prepare_config(read_yaml(name))
    keys = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = [command for key in keys for command in prepared[key]]
    assert any(command.endswith("scripts/set_up.sh requirements.lock") for command in commands)
    assert not [command for command in commands if "://" in command or re.search(r"\bray\[", command)]


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_every_launcher_file_copies_the_sources_without_environment_and_results(name: str) -> None:
    """Check `file_mounts`: Ray's launcher reads every file in a copied folder, even those that rsync excludes."""
    copied = {remote.partition("scaling-study/")[2]: local for remote, local in read_yaml(name)["file_mounts"].items()}
    assert copied.pop("") == "~/.ray/auth_token"
    assert {remote: remote for remote in copied} == copied
    folders = {"analysis", "examples", "scripts", "study", "trainables"}
    assert {*copied} == {*folders, "pyproject.toml", "requirements.lock"}
    assert all((ROOT / local).exists() for local in copied.values())


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_an_unknown_name_in_a_launcher_file_is_an_error(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        validate_config(prepare_config(read_yaml(name) | {"setup_comands": []}))


@pytest.mark.parametrize("name", ["cluster.yaml", "clusters/gcp.yaml"])
def test_cloud_clusters_have_a_fixed_size_and_terminate_their_nodes(name: str) -> None:
    content = read_yaml(name)
    gpu = content["available_node_types"]["gpu"]
    assert gpu["min_workers"] == gpu["max_workers"] == content["max_workers"]
    assert content["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert content["provider"]["cache_stopped_nodes"] is False


def test_a_local_cluster_uses_all_its_workers() -> None:
    prepared = prepare_config(read_yaml("clusters/local.yaml"))
    (kind,) = prepared["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == len(prepared["provider"]["worker_ips"])


def test_port_22_on_aws_is_only_open_to_the_users_address() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    name = read_yaml("cluster.yaml")["provider"]["security_group"]["GroupName"]
    assert f"create-security-group --group-name {name} " in text
    assert re.search(rf"--group-name {name} --protocol tcp --port 22 --cidr MY-ADDRESS/32", text)
    assert "0.0.0.0" not in text


# --------------------------------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_manifest_is_valid_for_kuberay(name: str) -> None:
    assert schema_errors(read_yaml(name)) == []


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("workerGroupSpecs", 0, "replicas"), "two", "'two' is not of type 'integer'"),
        (("workerGroupSpecs", 0, "minReplica"), 2, "'minReplica' was unexpected"),
        (("authOptions", "mode"), "on", "'on' is not one of ['disabled', 'token']"),
        (("headGroupSpec", "template", "spec", "containers", 0, "img"), "x", "'img' was unexpected"),
    ],
)
def test_mistakes_in_a_manifest_are_detected(keys: tuple[Any, ...], value: Any, expected: str) -> None:
    manifest = read_yaml(MANIFESTS[1])
    parent: Any = cluster_spec(manifest)
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    (message,) = schema_errors(manifest)
    assert expected in message


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_clusters_have_a_token_shared_memory_and_a_fixed_size(name: str) -> None:
    spec = cluster_spec(read_yaml(name))
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    for template in (spec["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert template["spec"]["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_both_manifests_describe_the_same_cluster_with_the_locked_ray() -> None:
    cluster, job = (cluster_spec(read_yaml(name)) for name in MANIFESTS)
    assert cluster == job
    assert f"\nray=={cluster['rayVersion']} " in (ROOT / "requirements.lock").read_text()


def test_the_schema_is_closed_at_names_in_the_manifest_and_open_below() -> None:
    crd = {
        "type": "object",
        "description": "long",
        "properties": {
            "used": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "description": "x"}}},
            "ports": {"type": "array", "items": {"x-kubernetes-int-or-string": True}},
            "unused": {"type": "object", "properties": {"b": {"type": "string"}}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    }
    assert closed_schema(crd, [{"used": {"a": 1}, "ports": [1], "labels": {"x": "y"}}]) == {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "ports": {"type": "array", "items": {"type": ["integer", "string"]}},
            "unused": {},
            "used": {
                "type": "object",
                "required": ["a"],
                "additionalProperties": False,
                "properties": {"a": {"type": "integer"}},
            },
        },
    }


# -------------------------------------------------------------------------------------------------------------- Slurm

SRUN = """#!/bin/bash
# srun in a job of two nodes: prints addresses for one node, and records the command for all nodes
if [[ $1 == --nodes=1 ]]; then echo "10.0.0.5 fe80::1"; else printf '%s\\n' "$@" >"$COMMAND"; exit "$EXIT_CODE"; fi
"""


@pytest.mark.parametrize("exit_code", [0, 1])
def test_slurm_starts_one_ray_on_all_nodes_and_returns_the_exit_code_of_the_study(
    tmp_path: Path, exit_code: int
) -> None:
    programs = {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf 'node5\\nnode6\\n'\n", "ray": "#!/bin/bash\nexit 1\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("token")
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[5-6]",
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "4",
    }
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COMMAND": str(tmp_path / "command"),
    }
    process = subprocess.run(
        ["bash", str(ROOT / "clusters/slurm.sh"), "weak", "--out", "results/my study"],
        env=environment | job | {"EXIT_CODE": str(exit_code)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (exit_code, "")
    address = "10.0.0.5:20123"
    assert (tmp_path / "command").read_text().splitlines() == [
        "ray", "symmetric-run", "--address", address, "--min-nodes", "2", "--num-cpus", "32", "--num-gpus", "4", "--",
        "python", "-m", "study.scaling", "run", "--address", address, "weak", "--out", "results/my study",
    ]  # fmt: skip


def test_the_slurm_script_can_be_submitted() -> None:
    script = ROOT / "clusters/slurm.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH ")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in options) < first_command  # sbatch stops reading there
    assert "#SBATCH --ntasks-per-node=1" in options
