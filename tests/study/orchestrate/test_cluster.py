"""Joining a running Ray cluster of two nodes by its address, with exact layouts."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from study.orchestrate.cluster import connect
from study.orchestrate.discovery.address import ClusterError
from study.orchestrate.local_ray import make_token
from study.orchestrate.processes.watch import servers_of
from tests.support.command import ROOT, Command, finished

pytestmark = pytest.mark.xdist_group("own ray")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two nodes of two CPUs each on this host. They share an address and differ only in their node ids."""
    make_token()  # in a home in which no Ray has run, a server started by `Cluster` would crash
    with pytest.MonkeyPatch.context() as patch:
        # otherwise commands of other tests find this cluster by the address in /tmp/ray
        patch.setattr("ray._private.utils.write_ray_address", lambda *_: None)
        # as in cluster.yaml: at Ray's default, ranks start only once the host does nothing else
        patch.setenv("RAY_worker_niceness", "0")
        # a port of its own: a Ray that another test starts at the same moment may take the default one
        head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": free_port()}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def test_ranks_are_placed_on_the_requested_number_of_nodes(two_nodes: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = [
        "run", "smoke", "--gpus", "2,4", "--nodes", "2", "--batch-per-gpu", "8", "--repeats", "1", "--out", str(out),
    ]  # fmt: skip
    # in a process of its own, since Ray ends one that loses its cluster
    status, _, stderr = Command([*arguments, "--address", two_nodes.address], tmp_path).wait()
    assert status == 0, stderr
    assert f"the Ray cluster at {two_nodes.address}: 2 nodes, 0 GPUs, 4 CPUs" in stderr
    records: list[Any] = list(finished(out).values())
    assert sorted(record["trial"]["world_size"] for record in records) == [2, 4]
    for record in records:
        ranks_by_node = Counter(rank["node_id"] for rank in record["environment"]["ranks"])
        assert list(ranks_by_node.values()) == [record["trial"]["world_size"] // 2] * 2
    assert len({record["worker_group"] for record in records}) == 1


def test_an_unreachable_address_is_an_error_with_a_fix() -> None:
    with (
        pytest.raises(ClusterError, match=r"127\.0\.0\.1:9 \(.*\); fix: start"),
        connect("127.0.0.1:9"),
    ):
        pass


def test_an_invalid_address_is_an_error_with_its_source_and_the_allowed_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        pytest.raises(ClusterError, match="^--address 'nowhere' .*auto, local or HOST:PORT"),
        connect("nowhere"),
    ):
        pass
    monkeypatch.setenv("RAY_ADDRESS", "there")
    with pytest.raises(ClusterError, match="^RAY_ADDRESS 'there' .*auto, local or HOST:PORT"), connect():
        pass


def test_a_local_ray_leaves_no_temporary_file_outside_the_folder_of_studies() -> None:
    code = "from study.orchestrate.cluster import connect\nwith connect('local'):\n    pass"
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # a short path, for Ray's sockets
        environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
        subprocess.run([sys.executable, "-c", code], env=environment | {"TMPDIR": folder}, check=True)
        (of_studies,) = Path(folder).iterdir()
        assert of_studies.name.startswith("scaling-study-")
        assert {path.name for path in of_studies.iterdir()} <= {"ray", "lock", "logs", "bytecode"}


MISSES_ITS_LIMIT = """
import sys
from study.orchestrate.cluster import connect
from study.orchestrate.local_ray import TOO_BUSY, set_environment

set_environment()
import ray._private.services as services

get_node, calls = services.get_node, []

def late_once(*arguments):
    calls.append(arguments)
    if len(calls) == 1:
        raise Exception(f"{TOO_BUSY}.")  # Ray would wait 30 s
    return get_node(*arguments)

services.get_node = late_once
with connect("local", print):
    import ray

    assert ray.get(ray.remote(lambda: 7).remote()) == 7
    print("session", ray._private.worker._global_node.get_session_dir_path(), flush=True)
    sys.stdin.read()
"""


def test_a_local_ray_that_misses_its_limit_starts_again_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # below `tmp_path`, paths of sockets would be too long
        process = subprocess.Popen(
            [sys.executable, "-c", MISSES_ITS_LIMIT], cwd=ROOT, env=os.environ | {"RAY_TMPDIR": folder},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin and process.stdout
        warning, session = process.stdout.readline(), process.stdout.readline()
        assert warning.startswith("warning: Ray did not start within its limit")
        used = Path(session.removeprefix("session ").strip())
        late, started = sorted(used.parent.glob(f"session_*_{process.pid}"))
        assert started == used
        assert servers_of(str(used / "logs"))
        assert servers_of(str(late / "logs")) == []
        process.stdin.close()
        assert process.wait(60) == 0


TRAINING = """
import json, os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
with open(f"{os.environ['PLACES']}/{dist.get_world_size()}-{dist.get_rank()}.json", "w") as file:
    json.dump({name: int(os.environ[name]) for name in names}, file)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_runs_on_two_nodes_as_under_torchrun(two_nodes: Cluster, tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "results"
    script.write_text(TRAINING)
    arguments = [
        "run", "--script", str(script), "--gpus", "4", "--nodes", "2", "--steps", "4", "--repeats", "1",
        "--set", "sweep_bytes=4096", "--env", f"PLACES={tmp_path}", "--out", str(out),
    ]  # fmt: skip
    status, _, stderr = Command([*arguments, "--address", two_nodes.address], tmp_path).wait()
    assert status == 0, stderr
    records: list[Any] = list(finished(out).values())
    assert [(record["status"], record["trial"]["nodes"]) for record in records] == [("done", 2)]
    places = [json.loads((tmp_path / f"4-{rank}.json").read_text()) for rank in range(4)]
    assert [place["RANK"] for place in places] == [0, 1, 2, 3]
    assert [place["LOCAL_RANK"] for place in places] == [0, 1, 0, 1]
    assert [place["GROUP_RANK"] for place in places] == [0, 0, 1, 1]
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) for place in places} == {(4, 2)}
