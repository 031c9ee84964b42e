"""Every metric of the dashboard comes from a live study through a real Prometheus; and which ports a study opens."""

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from study.orchestrate.cluster import Cluster, connect
from study.orchestrate.local_ray import temporary_folder
from study.orchestrate.protocol import Event
from study.orchestrate.tune import run_trials
from tests.support.dashboard import METRICS, OF_GPUS, OF_OTHER_STUDIES, QUERIES
from tests.support.orchestration import new_store, workload_trial
from tests.support.system import needs, program
from tests.support.trials import quick_trial

pytestmark = [pytest.mark.xdist_group("own ray"), needs("prometheus")]

ROOT = Path(__file__).resolve().parent.parent.parent
RANKS = 2
ABSENT = (*OF_GPUS, *OF_OTHER_STUDIES)
"""Metrics that this study on CPUs does not have."""


class Study:
    """A small study on a local Ray, scraped by Prometheus. `answers`: query -> its values during the run."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.folder = folder
        self.dashboard_port = urllib.parse.urlsplit(cluster.dashboard_url or "").port
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.listening: dict[str, set[tuple[str, int]]] = {}
        self.trials = [quick_trial(world_size=ranks, batch_per_gpu=8, communication_steps=4) for ranks in (1, RANKS)]
        self.trials.append(workload_trial("raises"))
        with self._prometheus() as self.port:
            store = new_store(folder / "results")
            run_trials("watched", [self.trials], store, cluster, on_event=self.see)
        self.statuses = store.statuses()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks; the answers stay in this process

    def see(self, event: Event) -> None:
        """After the second trial, wait until Prometheus has scraped it. The worker group is still alive."""
        if event.kind != "trial_ended" or event.trial not in self.trials[1:]:
            return
        if event.trial == self.trials[1]:
            self.listening = listeners()
        wanted = [("left", 1.0), ("failed", 0.0)] if event.trial == self.trials[1] else [("left", 0.0), ("failed", 1.0)]
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            time.sleep(1)
            found = {row["metric"]["status"]: float(row["value"][1]) for row in self.ask("ray_scaling_study_trials")}
            if all(found.get(status) == value for status, value in wanted):
                break
        if event.trial == self.trials[1]:
            self.answers = {query: self.ask(query.replace("$study", ".*")) for query in (*QUERIES, *METRICS)}
        self.progress = found

    def ask(self, query: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as page:
                return list(json.load(page)["data"]["result"])
        except OSError:
            return []  # not started yet

    @contextlib.contextmanager
    def _prometheus(self) -> Iterator[int]:
        """Start Debian's Prometheus, configured as in docs/monitoring.md, and yield its port."""
        prometheus = program("prometheus")
        assert prometheus
        documented = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL)
        assert documented
        config = self.folder / "prometheus.yml"
        text = documented[1].replace("scrape_interval: 10s", "scrape_interval: 1s")
        config.write_text(text.replace("/tmp/ray/", f"{temporary_folder()}/"))
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            port = chosen.getsockname()[1]
        options = [f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'tsdb'}"]
        with (self.folder / "prometheus.log").open("w") as log:
            process = subprocess.Popen([prometheus, *options, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
        try:
            yield port
        finally:
            process.terminate()
            process.wait(30)


def listeners() -> dict[str, set[tuple[str, int]]]:
    """Return kind of process -> addresses and ports on which this session's processes listen."""
    session = str(ray._private.worker._global_node.get_session_dir_path())
    family = {process.pid for process in psutil.Process().children(recursive=True)} | {psutil.Process().pid}
    found: dict[str, set[tuple[str, int]]] = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            parent = process.parent() if command.startswith("ray::") else None
            of_session = session in command or (parent is not None and session in " ".join(parent.cmdline()))
            if process.pid not in family and not of_session:
                continue
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(kind_of(command, process), set()).add((connection.laddr.ip, connection.laddr.port))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def kind_of(command: str, process: psutil.Process) -> str:
    known = {
        "gcs_server": "gcs", "raylet/raylet": "raylet", "dashboard/dashboard.py": "dashboard",
        "dashboard/agent.py": "agent",
        "runtime_env/agent": "agent", "monitor.py": "monitor", "default_worker": "worker", "ray-dashboard": "dashboard",
        "TrainWorker": "worker", "prometheus": "prometheus", "fork_server": "loaders", "resource_tracker": "loaders",
    }  # fmt: skip
    if process.pid == psutil.Process().pid:
        return "driver"
    if process.name().startswith("rank "):
        return "rank"
    named = next((name for part, name in known.items() if part in command), None)
    return named or ("worker" if command.startswith("ray::") else command[:80])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Study]:
    with connect("local") as cluster:
        yield Study(cluster, tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize("metric", [name for name in METRICS if name not in ABSENT])
def test_every_metric_of_the_dashboard_exists_in_a_live_study(metric: str, study: Study) -> None:
    assert study.answers[metric], f"Prometheus knows no {metric}"


@pytest.mark.parametrize("query", [query for query in QUERIES if not any(name in query for name in ABSENT)])
def test_every_query_of_the_dashboard_has_an_answer(query: str, study: Study) -> None:
    assert study.answers[query]


def test_metrics_describe_the_latest_trial(study: Study) -> None:
    (throughput,) = [query for query in QUERIES if "throughput" in query]
    assert [row["metric"]["trial"] for row in study.answers[throughput]] == [study.trials[1].trial_id]


def test_progress_ends_with_no_trial_left_and_counts_the_failure(study: Study) -> None:
    assert sorted(study.statuses.values()) == ["done", "done", "failed"]
    assert {status: count for status, count in study.progress.items() if count} == {"done": 2, "failed": 1}


def test_only_ray_and_its_ranks_listen_and_the_dashboard_only_on_loopback(study: Study) -> None:
    assert set(study.listening) <= {
        "gcs", "raylet", "dashboard", "agent", "monitor", "worker", "rank", "driver", "prometheus",
    }  # fmt: skip
    assert {"gcs", "raylet", "rank"} <= set(study.listening)
    pages = {address for address, port in study.listening["dashboard"] if port == study.dashboard_port}
    assert pages == {"127.0.0.1"}
