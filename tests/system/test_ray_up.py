"""A real `ray up` of clusters/local.yaml on three hosts with sshd, a study, `ray down`, and refused connections."""

import json
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from tests.support.hosts import ROOT, Host, Hosts
from tests.support.system import HOSTS, needs

pytestmark = [pytest.mark.timeout(1500), needs("rsync", *HOSTS)]

TOKEN = "5" * 64
SMALL = "--object-store-memory=100000000"
AGENTS = "--dashboard-agent-grpc-port=52361 --runtime-env-agent-port=52362"
START = f"for turn in 1 2 3; do RAY_raylet_start_wait_time_s=90 nice -n -10 ray start {SMALL} {AGENTS}"
ENOUGH = "&& break; ray stop --force; done"
"""A raylet that waits for its agents' ports gives up after half a minute, whatever its settings. It never receives the
dashboard agent's HTTP port (Ray 2.60). Other tests start Ray at the same time: this one runs first, with retries."""
STUDY = (
    "python -m study.scaling run smoke --gpus 4 --nodes 2 --batch-per-gpu 8 --repeats 1 --set communication_steps=1 "
    "--set sweep_bytes=65536 --out results/up"
)
WAIT = (
    "import ray, time; ray.init(); "
    "[time.sleep(1) for _ in iter(lambda: sum(n['Alive'] for n in ray.nodes()) < 3, False)]"
)
JOIN = """
import sys
from study.orchestrate.cluster import ClusterError, connect
try:
    with connect(sys.argv[1]) as cluster:
        print(cluster.description)
except ClusterError as error:
    print("error:", error)
"""
OLDER_RAY = """
import sys
import ray
from ray._common.usage import usage_lib
ray.init(sys.argv[1])
ray.__version__ = "2.59.0"
usage_lib.put_cluster_metadata(ray._private.worker.global_worker.gcs_client, ray_init_cluster=False)
"""
"""Overwrites the version that the cluster's head reports."""


OLDER = {"RAY_UP_enable_autoscaler_v2": "0"}
"""as in clusters/local.yaml: version 2 of the autoscaler may not use machines that already exist"""


def configuration(hosts: Hosts) -> dict[str, Any]:
    """Return clusters/local.yaml with its four lines changed, and this machine's environment instead of a new one."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "clusters/local.yaml").read_text())
    head, *workers = [host.address for host in hosts]
    content["provider"] |= {"head_ip": head, "worker_ips": workers}
    content["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    (installs,) = [number for number, line in enumerate(content["setup_commands"]) if "set_up.sh" in line]
    content["setup_commands"][installs] = f"ln -sfn {Path(sys.prefix)} ~/scaling-study/.venv"
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        stop, start = content[key]
        content[key] = [stop, f"{start.replace('ray start', START)} {ENOUGH}"]
    return content


def processes_of_ray(host: Host) -> list[str]:
    lines = host.run(["ps", "-eo", "args"]).stdout.splitlines()
    return [line for line in lines if "raylet" in line or "gcs_server" in line or "ray::" in line]


def launch(hosts: Hosts, *arguments: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command of Ray's launcher on the console, in the project's folder."""
    return hosts.console.run(["ray", *arguments], env=OLDER, cwd=str(ROOT), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Yield three hosts on which `ray up` has started a cluster, with its head on the first."""
    with Hosts(3) as made:
        home = made.console.tmp / "home"
        (home / ".ray").mkdir(mode=0o700)
        (home / ".ray/auth_token").write_text(TOKEN)
        (home / ".ray/auth_token").chmod(0o600)
        (made.console.tmp / "cluster.yaml").write_text(yaml.safe_dump(configuration(made)))
        launch(made, "up", "-y", "--no-config-cache", "/tmp/cluster.yaml")
        # the head's autoscaler starts the workers
        launch(made, "exec", "/tmp/cluster.yaml", f"timeout 400 python -c {shlex.quote(WAIT)}")
        yield made


def test_a_study_runs_on_a_cluster_from_ray_up(hosts: Hosts) -> None:
    assert [oct((host.tmp / "home/.ray/auth_token").stat().st_mode & 0o777) for host in hosts] == ["0o600"] * 3
    done = launch(hosts, "exec", "/tmp/cluster.yaml", f"cd ~/scaling-study && {STUDY}")
    said = done.stdout + done.stderr
    assert f"the Ray cluster at {hosts[0].address}:6379: 3 nodes, 0 GPUs, " in said
    assert "this machine alone" not in said
    launch(hosts, "rsync-down", "/tmp/cluster.yaml", "~/scaling-study/results/", "/tmp/results/")
    (record,) = [json.loads(path.read_text()) for path in hosts.console.tmp.glob("results/up/trials/*/trial.json")]
    assert (record["status"], record["reason"]) == ("done", "")
    assert (hosts.console.tmp / "results/up/report/index.html").is_file()
    hosts_of_ranks = {node["node_id"]: node["host"] for node in record["environment"]["nodes"]}
    ranks = Counter(hosts_of_ranks[rank["node_id"]] for rank in record["environment"]["ranks"])
    assert ranks == {"host2": 2, "host3": 2}  # none on the head


# ----------------------------------------------------------------------------------------------- refused connections


def joining(head: Host, **env: str) -> list[str]:
    """Connect a driver on the head's host with another environment. Return its lines on stdout and stderr."""
    command = [sys.executable, "-c", JOIN, f"{head.address}:6379"]
    done = head.run(command, cwd=str(ROOT), env=env, timeout_s=240)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


COPY = "copy ~/.ray/auth_token from the cluster's head to this host (chmod 600), or set RAY_AUTH_TOKEN to what is in it"


def test_a_wrong_token_is_one_line_with_its_source(hosts: Hosts) -> None:
    head = hosts[0]
    assert joining(head, RAY_AUTH_TOKEN="1" * 64) == [
        f"error: the Ray cluster at {head.address}:6379 refuses the token in RAY_AUTH_TOKEN; fix: {COPY}"
    ]


def test_no_token_is_one_line(hosts: Hosts) -> None:
    head = hosts[0]
    assert joining(head, HOME="/tmp") == [
        f"error: the Ray cluster at {head.address}:6379 wants a token, and there is none here; fix: {COPY}"
    ]


def test_disabled_authentication_is_one_line(hosts: Hosts) -> None:
    head = hosts[0]
    line = f"the Ray cluster at {head.address}:6379 wants a token, and RAY_AUTH_MODE=disabled sends none"
    assert joining(head, RAY_AUTH_MODE="disabled") == [f"error: {line}; fix: export RAY_AUTH_MODE=token"]


def test_another_version_of_ray_on_the_cluster_is_one_line_with_both_versions(hosts: Hosts) -> None:
    head = hosts[0]
    head.run([sys.executable, "-c", OLDER_RAY, f"{head.address}:6379"], timeout_s=240)
    python = platform.python_version()
    versions = f"runs Ray 2.59.0 on Python {python}, and this process Ray {ray.__version__} on Python {python}"
    mend = "install the same requirements.lock, on the same Python, here and on all nodes"
    assert joining(head) == [f"error: the Ray cluster at {head.address}:6379 {versions}; fix: {mend}"]


def test_ray_down_leaves_no_process(hosts: Hosts) -> None:
    launch(hosts, "down", "-y", "/tmp/cluster.yaml")
    for host in hosts[1:]:  # as in clusters/local.yaml: `ray down` stops only the head
        quiet = ["-o", "StrictHostKeyChecking=no", host.address]
        hosts.console.run(["ssh", *quiet, "scaling-study/.venv/bin/ray stop"])
    assert [processes_of_ray(host) for host in hosts] == [[], [], []]
