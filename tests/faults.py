"""Faults that a cluster meets while a study runs on it, injected into one of two hosts, and what must hold afterwards.

The study: four trials of two ranks, one on each host, which take their time in every step (`faulty_workloads:slow`).
"""

import contextlib
import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faulty_workloads import STARVED
from tests.hosts import ROOT, Host, Hosts
from tests.orchestration import WORKLOADS

TRIAL_TIMEOUT_S = 40
CUT_S = 30.0
RANK = r"ray::.*TrainWorker"
Records = dict[str, dict[str, Any]]


class FaultError(AssertionError):
    """Something that must hold after a fault does not."""


@dataclass
class Cluster:
    """Two hosts under Ray, and a study's command on the first of them."""

    hosts: Hosts
    address: str
    number: int = field(default=0)

    @property
    def out(self) -> str:
        return f"/tmp/results/{self.number}"

    @property
    def folder(self) -> Path:
        """The results folder as seen from outside, where what is mounted on the host is not."""
        return Path(f"/proc/{self.hosts[0].pid}/root{self.out}")

    def arguments(self) -> list[str]:
        """The study's command, for the results folder of now."""
        return [
            "python", "-m", "study.scaling", "run", "smoke", "--workload", f"{WORKLOADS}:slow", "--address", self.address,
            "--gpus", "2", "--nodes", "2", "--batch-per-gpu", "4,8", "--repeats", "2", "--steps", "4", "--out", self.out,
            "--trial-timeout", str(TRIAL_TIMEOUT_S), "--set", "account_steps=2", "--set", "warmup_steps=2",
        ]  # fmt: skip

    def records(self) -> Records:
        """Every trial's record in the results folder, by id."""
        return {path.parent.name: json.loads(path.read_text()) for path in self.folder.glob("trials/*/trial.json")}

    def planned(self) -> set[str]:
        return set(json.loads((self.folder / "study.json").read_text())["configuration"]["planned_trials"])

    def start(self) -> "Run":
        log = self.hosts[0].tmp / f"run-{self.number}-{time.monotonic_ns()}.err"
        with log.open("w") as stderr:
            process = self.hosts[0].start(self.arguments(), cwd=str(ROOT), stdout=subprocess.DEVNULL, stderr=stderr)
        return Run(process, log)

    def alive(self) -> int:
        """Nodes that Ray counts as alive."""
        code = (
            f"import ray, logging; ray.init(address='{self.address}', log_to_driver=False, logging_level=logging.ERROR); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        found = self.hosts[0].run(["python", "-c", code], check=False)
        return int(found.stdout.split()[-1]) if found.returncode == 0 else 0

    def rejoin(self, env: dict[str, str] | None = None, force: bool = False) -> None:
        """Brings the second host back into the cluster, where it is no part of it any more."""
        if self.alive() == 2 and not force:
            return
        host = self.hosts[1]
        host.run(["ray", "stop", "--force"], check=False)
        start_node(host, [f"--address={self.address}"], env)
        deadline_s = time.monotonic() + 60
        while self.alive() != 2:
            if time.monotonic() > deadline_s:
                raise FaultError("the second host did not come back into the cluster")
            time.sleep(1)


@dataclass
class Run:
    """A study's command that was started."""

    process: "subprocess.Popen[str]"
    log: Path

    def end(self, timeout_s: float = 420) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise FaultError(f"the study did not end within {timeout_s:.0f} s:\n{self.log.read_text()}") from None


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Two hosts of two CPUs each under Ray; gone afterwards."""
    with Hosts(2) as hosts:
        address = f"{hosts[0].address}:6379"
        for host in hosts:
            (host.tmp / "home/.ray").mkdir(exist_ok=True)
            (host.tmp / "home/.ray/auth_token").write_text("0" * 64)
            role = (
                ["--head", "--port=6379", "--dashboard-host=127.0.0.1"]
                if host is hosts[0]
                else [f"--address={address}"]
            )
            start_node(host, role)
        yield Cluster(hosts, address)


def start_node(host: Host, role: list[str], env: dict[str, str] | None = None) -> None:
    """Starts Ray on a host, also where its machine is so busy that this takes minutes."""
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"} | (env or {})
    bounded = ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
    host.run(["ray", "start", *role, f"--node-ip-address={host.address}", *bounded], env=patient, timeout_s=400)


def processes(host: Host, pattern: str) -> list[int]:
    """Ids, as that host counts them, of processes whose command line matches."""
    found = host.run(["pgrep", "-f", pattern], check=False).stdout.split()
    return [int(pid) for pid in found]


def send(host: Host, pattern: str, number: signal.Signals) -> None:
    """Sends a signal to every such process of a host. Raises FaultError where there is none."""
    deadline_s = time.monotonic() + 30
    while not (found := processes(host, pattern)):
        if time.monotonic() > deadline_s:
            raise FaultError(f"no process {pattern!r} on {host.name}")
        time.sleep(0.2)
    host.run(["kill", f"-{int(number)}", *map(str, found)], check=False)


# -------------------------------------------------------------------------------------------------------------- faults


def kill_rank(cluster: Cluster) -> None:
    send(cluster.hosts[1], RANK, signal.SIGKILL)


def kill_raylet(cluster: Cluster) -> None:
    send(cluster.hosts[1], "raylet/raylet", signal.SIGKILL)


def cut_link(cluster: Cluster) -> None:
    cluster.hosts.cut(cluster.hosts[1])
    time.sleep(CUT_S)
    cluster.hosts.restore(cluster.hosts[1])


def kill_driver(cluster: Cluster) -> None:
    send(cluster.hosts[0], "study.scaling run", signal.SIGKILL)


def hang_rank(cluster: Cluster) -> None:
    send(cluster.hosts[1], RANK, signal.SIGSTOP)


def fill_disk(cluster: Cluster) -> None:
    cluster.hosts[0].run(["dd", "if=/dev/zero", "of=/tmp/results/filler", "bs=64k"], check=False)


def empty_disk(cluster: Cluster) -> None:
    cluster.hosts[0].run(["rm", "-f", "/tmp/results/filler"])


def starve(cluster: Cluster) -> None:
    (cluster.hosts[1].tmp / STARVED.name).touch()


def feed(cluster: Cluster) -> None:
    (cluster.hosts[1].tmp / STARVED.name).unlink(missing_ok=True)


def set_clock_apart(cluster: Cluster) -> None:
    """The second host's clock an hour ahead, from the beginning: a clock that jumps is another fault."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    ahead = {
        "LD_PRELOAD": str(library),
        "FAKETIME": "+3600s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    cluster.rejoin(env=ahead, force=True)


def set_clock_right(cluster: Cluster) -> None:
    cluster.rejoin(force=True)


@dataclass(frozen=True)
class Fault:
    """How a fault is injected and mended. `named`: what the reason of what it ended says, None where nothing ends.

    before: injected before the study starts, and not while it runs.
    result: the status that trials which met it keep; they are done, and do not run again.
    """

    inject: Callable[[Cluster], None]
    named: str | None = None
    mend: Callable[[Cluster], None] = Cluster.rejoin
    before: bool = False
    result: str | None = None


ON_HOST2 = r"host2 \([0-9a-f]{8}\)|10\.77\.0\.3"
FAULTS = {
    "rank killed": Fault(kill_rank, ON_HOST2),
    "raylet killed": Fault(kill_raylet, ON_HOST2),
    "link cut for 30 s": Fault(cut_link, ON_HOST2),
    "driver killed": Fault(kill_driver),
    "disk full": Fault(fill_disk, r"No space left on device", mend=empty_disk),
    "rank hangs": Fault(hang_rank, rf"--trial-timeout\); rank 1 on node ({ON_HOST2}) does not answer"),
    "out of memory on one node": Fault(starve, ON_HOST2, mend=feed, result="out_of_memory"),
    "clocks an hour apart": Fault(set_clock_apart, mend=set_clock_right, before=True),
}


def suffer(cluster: Cluster, name: str, moments: random.Random) -> dict[str, Any]:
    """Runs the study, injects the fault at a random moment of it, mends it and runs the same command until nothing is left.

    Gives what happened. Raises FaultError where something does not hold: a finished trial lost or run again, a failure
    without the node in its reason, the study not complete, other trials than planned.
    """
    fault = FAULTS[name]
    cluster.number += 1
    cluster.hosts[0].run(["mkdir", "-p", "/tmp/results"])
    if not cluster.hosts[0].run(["findmnt", "/tmp/results"], check=False).stdout:
        cluster.hosts[0].run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", "/tmp/results"])
    began_s = time.monotonic()
    if fault.before:
        fault.inject(cluster)
    run = cluster.start()
    _await(cluster, run, finished=1)
    kept = cluster.records()
    wait_s = moments.uniform(0.0, 4.0)
    if not fault.before:
        time.sleep(wait_s)
        kept = cluster.records()
        fault.inject(cluster)
    codes = [run.end()]
    after = cluster.records()
    _require(kept.items() <= after.items(), f"finished trials were lost or changed: {sorted(set(kept) - set(after))}")
    said = run.log.read_text()
    if fault.named is not None and len(kept) < 4:
        _require(re.search(fault.named, said), f"no reason names {fault.named!r}:\n{said}")
    fault.mend(cluster)
    done = {trial: record for trial, record in after.items() if record["status"] == "done"}
    for _ in range(2):
        if codes[-1] == 0 and set(cluster.records()) == cluster.planned():
            break
        again = cluster.start()
        codes.append(again.end())
    final = cluster.records()
    _require(codes[-1] == 0, f"the same command did not complete the study: exit codes {codes}\n{run.log.read_text()}")
    _require(set(final) == cluster.planned(), "the final trials are not those planned")
    allowed = {"done", fault.result} | ({"pruned"} if fault.result else set())
    _require({record["status"] for record in final.values()} <= allowed, f"statuses {final}")
    _require(done.items() <= final.items(), "a finished trial ran again")
    longest_s = max(record["duration_s"] for record in final.values())
    _require(longest_s < 1800, f"a trial lasted {longest_s:.0f} s by its own account: clocks of nodes were mixed")
    return {
        "fault": name,
        "moment_s": None if fault.before else round(wait_s, 2),
        "finished_before": len(kept),
        "ended_by_it": sorted({record["reason"] for record in after.values() if record["status"] != "done"}),
        "exit_codes": codes,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _await(cluster: Cluster, run: Run, finished: int, timeout_s: float = 300) -> None:
    deadline_s = time.monotonic() + timeout_s
    while len(cluster.records()) < finished:
        if run.process.poll() is not None or time.monotonic() > deadline_s:
            run.process.kill()
            raise FaultError(f"no trial finished before the fault:\n{run.log.read_text()}")
        time.sleep(0.2)


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise FaultError(otherwise)
