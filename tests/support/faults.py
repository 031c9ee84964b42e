"""Faults that a cluster meets while a study runs on it, injected into one of two hosts, and what must hold after each.

The study: trials of two ranks, one on each host, which take their time in every step (`faulty_workloads:slow`). One
study suffers all faults, one after another; after each its next trial has to finish before the next fault comes. The
second host's clock is an hour ahead all the time.
"""

import contextlib
import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.faulty_workloads import STARVED
from tests.support.hosts import ROOT, Host, Hosts
from tests.support.orchestration import WORKLOADS
from tests.support.system import file, missing

REPEATS = 10
"""of two batches: a fault takes the trial that it meets, and those before and after it are to finish"""
TRIAL_TIMEOUT_S = 25
NAMED_TIMEOUT_S = 240.0
NEXT_TIMEOUT_S = 600.0
"""long enough for a group that does not start, and for the next one"""
CUT_S = 30.0
AHEAD_S = 3600
RANK = r"ray::.*TrainWorker"
Records = dict[str, dict[str, Any]]


class FaultError(AssertionError):
    """Something that must hold after a fault does not."""


@dataclass
class Cluster:
    """Two hosts under Ray, and a study's command on the first of them."""

    hosts: Hosts
    address: str
    repeats: int = REPEATS
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
            "--gpus", "2", "--nodes", "2", "--batch-per-gpu", "4,8", "--repeats", str(self.repeats), "--steps", "4", "--out", self.out,
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

    def done(self) -> Records:
        return {trial: record for trial, record in self.records().items() if record["status"] == "done"}

    def rejoin(self) -> None:
        """Brings the second host back into the cluster, where it is no part of it any more."""
        if self.alive() == 2:
            return
        host = self.hosts[1]
        host.run(["ray", "stop", "--force"], check=False)
        start_node(host, [f"--address={self.address}"], _clock_ahead())
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

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def await_said(self, pattern: str, since: int) -> None:
        """Waits until the command has said so, after its first `since` characters."""
        deadline_s = time.monotonic() + NAMED_TIMEOUT_S
        while not re.search(pattern, self.said[since:]):
            if self.ended or time.monotonic() > deadline_s:
                raise FaultError(f"no reason names {pattern!r}:\n{self.said[since:]}")
            time.sleep(0.2)

    def end(self, timeout_s: float = 420) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise FaultError(f"the study did not end within {timeout_s:.0f} s:\n{self.said}") from None


@contextlib.contextmanager
def cluster(repeats: int = REPEATS) -> Iterator[Cluster]:
    """Two hosts of two CPUs each under Ray, for a study of so many repeats; gone afterwards."""
    with Hosts(2) as hosts:
        address = f"{hosts[0].address}:6379"
        for host in hosts:
            (host.tmp / "home/.ray").mkdir(exist_ok=True)
            (host.tmp / "home/.ray/auth_token").write_text("0" * 64)
        start_node(hosts[0], ["--head", "--port=6379", "--dashboard-host=127.0.0.1"])
        start_node(hosts[1], [f"--address={address}"], _clock_ahead())
        hosts[0].run(["mkdir", "-p", "/tmp/results"])
        hosts[0].run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", "/tmp/results"])
        yield Cluster(hosts, address, repeats)


def start_node(host: Host, role: list[str], env: dict[str, str] | None = None) -> None:
    """Starts Ray on a host."""
    bounded = ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
    host.run(["ray", "start", *role, f"--node-ip-address={host.address}", *bounded], env=env, timeout_s=400)


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


def _clock_ahead() -> dict[str, str]:
    library = file("libfaketime")
    if library is None:  # the linker only warns of a library that is missing, and the clocks would be one
        raise FaultError(missing("libfaketime"))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME": f"+{AHEAD_S}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(ROOT / "tests/support/clock_ahead"),
    }


@dataclass(frozen=True)
class Fault:
    """How a fault is injected and mended. named: what the command says of it; None: the command itself ends by it, and the
    same one goes on.
    """

    inject: Callable[[Cluster], None]
    named: str | None = None
    mend: Callable[[Cluster], None] = Cluster.rejoin


ON_HOST2 = r"host2 \([0-9a-f]{8}\)|10\.77\.0\.3"
FAULTS = {
    "rank killed": Fault(kill_rank, ON_HOST2),
    "rank hangs": Fault(hang_rank, rf"--trial-timeout\); rank 1 on node ({ON_HOST2}) does not answer"),
    "link cut for 30 s": Fault(cut_link, ON_HOST2),
    "disk full": Fault(fill_disk, r"No space left on device", mend=empty_disk),
    "driver killed": Fault(kill_driver),
    "raylet killed": Fault(kill_raylet, ON_HOST2),
    "out of memory on one node": Fault(starve, ON_HOST2, mend=feed),
}
"""in the order in which a study suffers them: what ran out of memory leaves larger batches out"""

CLOCKS = "clocks an hour apart"
COMPLETED = "the same command completes exactly the planned trials"


def suffer(cluster: Cluster, moments: random.Random, names: Sequence[str] = tuple(FAULTS)) -> Iterator[dict[str, Any]]:
    """Runs a study that meets these faults at random moments, and in the end completes it by the same command.

    Gives what happened at each fault, then for `CLOCKS` and `COMPLETED`. Raises FaultError where something does not
    hold: a finished trial lost or run again, a failure that does not name its node, no further trial although the
    cluster fits it, a span that mixes clocks, the study not complete, other trials than planned.
    """
    cluster.number += 1
    run = cluster.start()
    for name in names:
        fault = FAULTS[name]
        began_s = time.monotonic()
        run = _after_next(cluster, run)
        wait_s = moments.uniform(0.0, 4.0)
        time.sleep(wait_s)
        kept, since = cluster.done(), len(run.said)
        fault.inject(cluster)
        if fault.named is None:
            run.end()
        else:
            run.await_said(fault.named, since)
        fault.mend(cluster)
        _keeps(cluster, kept)
        yield {
            "fault": name,
            "moment_s": round(wait_s, 2),
            "finished_before": len(kept),
            "said": _line(run.said[since:], fault.named),
            "seconds": round(time.monotonic() - began_s, 1),
        }
    began_s = time.monotonic()
    codes = [run.end()]
    kept = cluster.done()
    while codes[-1] != 0 and len(codes) < 4:
        run = cluster.start()
        codes.append(run.end())
    _keeps(cluster, kept)
    final = cluster.records()
    longest_s = max(record["duration_s"] for record in final.values() if record["status"] == "done")
    _require(
        longest_s < AHEAD_S / 2, f"a trial lasted {longest_s:.0f} s by its own account: clocks of nodes were mixed"
    )
    yield {"fault": CLOCKS, "longest_trial_s": longest_s}
    _require(codes[-1] == 0, f"the same command did not complete the study: exit codes {codes}\n{run.said}")
    _require(set(final) == cluster.planned(), "the final trials are not those planned")
    statuses = {record["status"] for record in final.values()}
    allowed = {"done", "out_of_memory", "pruned"} if "out of memory on one node" in names else {"done"}
    _require(statuses <= allowed, f"statuses {statuses}")
    yield {
        "fault": COMPLETED,
        "exit_codes": codes,
        "trials": len(final),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _after_next(cluster: Cluster, run: Run) -> Run:
    """Waits until one more trial is done. Where the command ended before that, a host made whole gets the same one again."""
    before = len(cluster.done())
    for _ in range(2):
        if run.ended:
            cluster.rejoin()
            run = cluster.start()
        deadline_s = time.monotonic() + NEXT_TIMEOUT_S
        while not run.ended and time.monotonic() < deadline_s:
            if len(cluster.done()) > before:
                return run
            time.sleep(0.2)
    run.process.kill()
    raise FaultError(f"no further trial finished:\n{run.said}")


def _keeps(cluster: Cluster, kept: Records) -> None:
    now = cluster.records()
    changed = sorted(trial for trial, record in kept.items() if now.get(trial) != record)
    _require(not changed, f"finished trials were lost or ran again: {changed}")


def _line(said: str, pattern: str | None) -> str:
    """The line that names a fault."""
    return next((line.strip() for line in said.splitlines() if pattern and re.search(pattern, line)), "")


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise FaultError(otherwise)
