"""clusters/: launcher files as Ray reads them, Kubernetes manifests against KubeRay's schema, the Slurm script as bash."""

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
LAUNCHED = ("cluster.yaml", "clusters/local.yaml", "clusters/gcp.yaml")
MANIFESTS = ("clusters/kuberay/raycluster.yaml", "clusters/kuberay/rayjob.yaml")
SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("kuberay_schema.json").read_text())["schemas"]


def loaded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


def wrong(manifest: dict[str, Any]) -> list[str]:
    """What KubeRay's schema says against a manifest."""
    schema = SCHEMAS[f"{manifest['apiVersion']} {manifest['kind']}"]
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


def cluster_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return spec


# ------------------------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize("name", LAUNCHED)
def test_ray_finds_every_launcher_file_valid(name: str) -> None:
    validate_config(prepare_config(loaded(name)))


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launcher_file_starts_ray_with_a_token_and_shows_the_dashboard_to_the_head_alone(name: str) -> None:
    content = loaded(name)
    starts = {
        role: [line for line in content[f"{role}_start_ray_commands"] if "ray start" in line]
        for role in ("head", "worker")
    }
    for (command,) in starts.values():
        assert "export RAY_AUTH_MODE=token RAY_worker_niceness=0;" in command.partition("ray start")[0]
    assert "--dashboard-host=127.0.0.1" in shlex.split(starts["head"][0])
    assert "dashboard" not in starts["worker"][0]


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_token_is_never_readable_for_others(name: str) -> None:
    text, content = (ROOT / name).read_text(), loaded(name)
    assert content["setup_commands"][0] == "chmod 600 ~/.ray/auth_token"
    # rsync -a keeps the mode of the file that it copies: it is closed before the first `ray up`
    assert text.index("ray get-auth-token") < text.index("chmod 600 ~/.ray/auth_token") < text.index("ray up ")


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launcher_file_installs_the_lock_and_no_nightly_ray(name: str) -> None:
    prepared = prepare_config(loaded(name))
    keys = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = [command for key in keys for command in prepared[key]]
    assert any(command.endswith("scripts/set_up.sh requirements.lock") for command in commands)
    assert not [command for command in commands if "://" in command or re.search(r"\bray\[", command)]


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_launcher_file_copies_what_a_study_needs_and_never_the_environment_or_results(name: str) -> None:
    """Ray's launcher reads every file below what is copied, whatever rsync leaves out."""
    copied = {there.partition("scaling-study/")[2]: here for there, here in loaded(name)["file_mounts"].items()}
    assert copied.pop("") == "~/.ray/auth_token"
    assert {there: there for there in copied} == copied
    folders = {"analysis", "examples", "scripts", "study", "trainables"}
    assert {*copied} == {*folders, "pyproject.toml", "requirements.lock"}
    assert all((ROOT / here).exists() for here in copied.values())


@pytest.mark.parametrize("name", LAUNCHED)
def test_an_unknown_name_in_a_launcher_file_is_found(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        validate_config(prepare_config(loaded(name) | {"setup_comands": []}))


@pytest.mark.parametrize("name", ["cluster.yaml", "clusters/gcp.yaml"])
def test_clouds_have_a_fixed_number_of_workers_and_end_their_nodes(name: str) -> None:
    content = loaded(name)
    gpu = content["available_node_types"]["gpu"]
    assert gpu["min_workers"] == gpu["max_workers"] == content["max_workers"]
    assert content["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert content["provider"]["cache_stopped_nodes"] is False


def test_a_local_cluster_uses_all_its_workers() -> None:
    prepared = prepare_config(loaded("clusters/local.yaml"))
    (kind,) = prepared["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == len(prepared["provider"]["worker_ips"])


def test_port_22_of_aws_is_not_left_to_the_launcher() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    name = loaded("cluster.yaml")["provider"]["security_group"]["GroupName"]
    assert f"create-security-group --group-name {name} " in text
    assert re.search(rf"--group-name {name} --protocol tcp --port 22 --cidr MY-ADDRESS/32", text)
    assert "0.0.0.0" not in text


# --------------------------------------------------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_finds_every_manifest_valid(name: str) -> None:
    assert wrong(loaded(name)) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("workerGroupSpecs", 0, "replicas"), "two", "'two' is not of type 'integer'"),
        (("workerGroupSpecs", 0, "minReplica"), 2, "'minReplica' was unexpected"),
        (("authOptions", "mode"), "on", "'on' is not one of ['disabled', 'token']"),
        (("headGroupSpec", "template", "spec", "containers", 0, "img"), "x", "'img' was unexpected"),
    ],
)
def test_mistakes_in_a_manifest_are_found(place: tuple[Any, ...], value: Any, said: str) -> None:
    manifest = loaded(MANIFESTS[1])
    at: Any = cluster_spec(manifest)
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    (message,) = wrong(manifest)
    assert said in message


@pytest.mark.parametrize("name", MANIFESTS)
def test_on_kubernetes_there_is_a_token_shared_memory_and_a_fixed_number_of_workers(name: str) -> None:
    spec = cluster_spec(loaded(name))
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    for template in (spec["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert template["spec"]["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_both_manifests_describe_the_same_cluster_with_the_ray_of_the_lock() -> None:
    cluster, job = (cluster_spec(loaded(name)) for name in MANIFESTS)
    assert cluster == job
    assert f"\nray=={cluster['rayVersion']} " in (ROOT / "requirements.lock").read_text()


def test_facts_of_a_crd_are_closed_where_a_manifest_goes_and_open_below() -> None:
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

STEP = """#!/bin/bash
# srun of a job of two nodes: what is asked of all of them is written down, what is asked of one is done
if [[ $1 == --nodes=1 ]]; then echo "10.0.0.5 fe80::1"; else printf '%s\\n' "$@" >"$SAID"; exit "$GIVES"; fi
"""


@pytest.mark.parametrize("exit_code", [0, 1])
def test_slurm_starts_one_ray_over_all_nodes_and_gives_the_exit_code_of_the_study(
    tmp_path: Path, exit_code: int
) -> None:
    programs = {"srun": STEP, "scontrol": "#!/bin/bash\nprintf 'node5\\nnode6\\n'\n", "ray": "#!/bin/bash\nexit 1\n"}
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
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SAID": str(tmp_path / "said")}
    done = subprocess.run(
        ["bash", str(ROOT / "clusters/slurm.sh"), "weak", "--out", "results/my study"],
        env=environment | job | {"GIVES": str(exit_code)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (exit_code, "")
    address = "10.0.0.5:20123"
    assert (tmp_path / "said").read_text().splitlines() == [
        "ray", "symmetric-run", "--address", address, "--min-nodes", "2", "--num-cpus", "32", "--num-gpus", "4", "--",
        "python", "-m", "study.scaling", "run", "--address", address, "weak", "--out", "results/my study",
    ]  # fmt: skip


def test_the_slurm_script_can_be_submitted() -> None:
    script = ROOT / "clusters/slurm.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = script.read_text().splitlines()
    asked = [line for line in lines if line.startswith("#SBATCH ")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in asked) < first_command  # sbatch reads no further
    assert "#SBATCH --ntasks-per-node=1" in asked
