"""A local Ray starts with less than `ray.init` would wait for."""

import subprocess
import sys
import threading
import urllib.request
from typing import Any

import psutil
import pytest

from study.orchestrate.cluster import Cluster
from study.orchestrate.processes import ray_init
from study.orchestrate.processes.ray_init import READY_PROCESSES, started_sooner
from study.orchestrate.processes.watch import servers_of
from tests.support.command import ROOT

FAILING = """
import ray._private.node
from study.orchestrate.cluster import connect
from study.orchestrate.discovery.address import ClusterError

def start_api_server(node, **options):
    raise Exception("no port is free")

ray._private.node.Node.start_api_server = start_api_server
try:
    with connect("local"):
        print("connected")
except ClusterError as error:
    print(error)
import ray
print(ray.is_initialized())
"""


def test_the_dashboard_starts_while_the_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.node import Node

    class Started:
        webui_url = ""

    may_end, node = threading.Event(), Started()

    def slow_start(node: Any, **options: Any) -> None:
        may_end.wait(60)
        node.webui_url = f"127.0.0.1:{options['port']}"

    monkeypatch.setattr(Node, "start_api_server", slow_start)
    with started_sooner() as wait:
        Node.start_api_server(node, port=8265)
        assert not node.webui_url
    may_end.set()
    assert wait() == "127.0.0.1:8265"
    assert Node.start_api_server is slow_start


@pytest.mark.parametrize(("cpus", "gpus", "expected"), [(2, 0, 2), (64, 0, 8), (64, 8, READY_PROCESSES + 8)])
def test_a_node_starts_as_many_processes_ahead_as_a_study_takes(
    monkeypatch: pytest.MonkeyPatch, cpus: int, gpus: int, expected: int
) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "start_ray_process", lambda command, *arguments, **options: command)
    monkeypatch.setattr(ray_init, "count_cpus", lambda: cpus)
    monkeypatch.setattr(ray_init, "count_gpus", lambda: gpus)
    with started_sooner():
        command: Any = services.start_ray_process(
            ["raylet", f"--num_prestart_python_workers={cpus}", "--x=1"], "raylet"
        )
    assert command == ["raylet", f"--num_prestart_python_workers={expected}", "--x=1"]


def test_ray_still_takes_what_this_replaces(cluster: Cluster) -> None:
    (raylet,) = (process for process in servers_of(cluster.log_dir) if process.name() == "raylet")
    ready = min(psutil.cpu_count() or 1, READY_PROCESSES + 2)
    assert f"--num_prestart_python_workers={ready}" in raylet.cmdline()
    assert cluster.dashboard_url
    with urllib.request.urlopen(cluster.dashboard_url, timeout=20) as page:
        assert page.status == 200


def test_a_dashboard_that_does_not_start_is_one_line_and_ends_ray() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILING], cwd=ROOT, capture_output=True, text=True, check=True)
    line, is_initialized = ended.stdout.splitlines()
    assert line.startswith("cannot use ") and "no port is free" in line
    assert is_initialized == "False"
