"""Inject faults into one of two hosts while a study runs, and check what must hold after each fault.

The trials of the study have two ranks, one per host, and sleep in every step (`faulty_workloads:slow`). One study meets
all faults, one after another. After each fault, its next trial must finish before the next fault. The clock of the
second host is always an hour ahead. Faults that a group between two repeats would not notice are injected in a step.
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
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.faulty_workloads import STARVED
from tests.support.hosts import ROOT, Host, Hosts
from tests.support.orchestration import WORKLOADS
from tests.support.system import file, missing

REPEATS = 14
"""of two batches; each fault ends one trial, and the trials before and after it must finish"""
LEFT = 3
"""planned trials that must be left before a fault: one that it meets, one whose result is saved later, and a spare"""
MORE_REPEATS = 6
"""A study that has no more trials left before all faults were injected is continued with this many more repeats."""
TRIAL_TIMEOUT_S = 25
MESSAGE_TIMEOUT_S = 240.0
NEXT_TIMEOUT_S = 600.0
"""long enough for a worker group that fails to start, and for the next one"""
CUT_S = 30.0
AHEAD_S = 3600
COMMAND = ("-m", "study.scaling")
SHORT_PAUSES = (
    "-c",
    """
import sys
from study.cli.process import supervised
from study.scaling import main

def with_short_pauses(arguments):
    from study.store import spool
    spool.PAUSES_S = (1.0, 2.0, 4.0)
    return main(arguments)

sys.exit(supervised(with_short_pauses, sys.argv[1:]))
""",
)
"""The same command, which gives up saving a result after 7 s instead of 138 s."""
WORKER = "ray::.*TrainWorker"
"""pattern of the command line of a worker of Ray Train, which starts the processes of a rank"""
RANK = "^rank 1$"
"""pattern of the name of a process of the rank on the second host"""
STEPPING = Path("/tmp/stepping")
"""folder on a host, in which each of its ranks creates a file in every step"""
Records = dict[str, dict[str, Any]]


class FaultError(AssertionError):
    """A requirement after a fault is violated."""


class NoStepError(FaultError):
    """There is no step to inject a fault into, for example because the command has ended."""


@dataclass
class Cluster:
    """Two hosts under Ray, and a study's command on the first."""

    hosts: Hosts
    address: str
    repeats: int = REPEATS
    command: Sequence[str] = COMMAND
    batches: str = "4,8"
    number: int = field(default=0)
    run: "Run | None" = None
    """the command that was started last"""

    @property
    def out(self) -> str:
        return f"/tmp/results/{self.number}"

    @property
    def folder(self) -> Path:
        """Return the results folder through the host's root, because its mount is invisible from outside."""
        return Path(f"/proc/{self.hosts[0].pid}/root{self.out}")

    def arguments(self) -> list[str]:
        """Return the command of the study for the current results folder."""
        return [
            "python", *self.command, "run", "smoke", "--workload", f"{WORKLOADS}:slow",
            "--address", self.address,
            "--gpus", "2", "--nodes", "2", "--batch-per-gpu", self.batches, "--repeats", str(self.repeats),
            "--steps", "4", "--out", self.out, "--trial-timeout", str(TRIAL_TIMEOUT_S),
            "--set", "communication_steps=2", "--set", "warmup_steps=2",
        ]  # fmt: skip

    def records(self) -> Records:
        """Return the records of all trials in the results folder, by trial id."""
        return {path.parent.name: json.loads(path.read_text()) for path in self.folder.glob("trials/*/trial.json")}

    def planned_trials(self) -> set[str]:
        return set(json.loads((self.folder / "study.json").read_text())["configuration"]["planned_trials"])

    def start(self) -> "Run":
        log = self.hosts[0].tmp / f"run-{self.number}-{time.monotonic_ns()}.err"
        earlier = self.records()
        with log.open("w") as stderr:
            process = self.hosts[0].start(self.arguments(), cwd=str(ROOT), stdout=subprocess.DEVNULL, stderr=stderr)
        self.run = Run(process, log, earlier)
        return self.run

    def left(self, run: "Run") -> int:
        """Count the planned trials that this run may still finish or, if it has ended, that the next one would run."""
        ended = set(self.done_trials())
        if not run.has_ended:
            ended |= {trial for trial, record in self.records().items() if record != run.earlier.get(trial)}
        return self.repeats * len(self.batches.split(",")) - len(ended)

    def alive_nodes(self) -> int:
        """Return the number of nodes that Ray considers alive."""
        code = (
            "import logging, ray; "
            f"ray.init(address='{self.address}', log_to_driver=False, logging_level=logging.ERROR); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        process = self.hosts[0].run(["python", "-c", code], check=False)
        return int(process.stdout.split()[-1]) if process.returncode == 0 else 0

    def done_trials(self) -> Records:
        return {trial: record for trial, record in self.records().items() if record["status"] == "done"}

    def reasons(self, earlier: Records) -> list[str]:
        """Return the reasons of failed trials whose records are not among `earlier`."""
        records = self.records().items()
        return [record["reason"] for trial, record in records if record["reason"] and record != earlier.get(trial)]

    def rejoin(self) -> None:
        """Bring the second host back if it has left the cluster."""
        if self.alive_nodes() == 2:
            return
        host = self.hosts[1]
        host.run(["ray", "stop", "--force"], check=False)
        start_node(host, [f"--address={self.address}"], _second_host())
        deadline_s = time.monotonic() + 60
        while self.alive_nodes() != 2:
            if time.monotonic() > deadline_s:
                raise FaultError("the second host did not rejoin the cluster")
            time.sleep(1)


@dataclass
class Run:
    """A running command of a study."""

    process: "subprocess.Popen[str]"
    log: Path
    earlier: Records
    """the records in the results folder when it started"""

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def await_reason(self, pattern: str, since: int, reasons: Callable[[], Sequence[str]]) -> str:
        """Return a line that matches: printed after the first `since` characters, or one of `reasons`.

        The command prints a cause only once, even if several trials fail for it.
        """
        deadline_s = time.monotonic() + MESSAGE_TIMEOUT_S
        while True:
            has_ended = self.has_ended
            for line in (*self.output[since:].splitlines(), *reasons()):
                if re.search(pattern, line):
                    return line.strip()
            if has_ended or time.monotonic() > deadline_s:
                raise FaultError(f"no message matches {pattern!r}:\n{self.output[since:]}")
            time.sleep(0.2)

    def end(self, silence_s: float = 420, timeout_s: float = 3600) -> int:
        """Return the exit code when the command ends. Raises FaultError if it prints nothing for `silence_s`.

        How long all its trials take depends on what else runs on this machine.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            before = len(self.output)
            try:
                return self.process.wait(silence_s)
            except subprocess.TimeoutExpired:
                if len(self.output) == before or time.monotonic() > deadline_s:
                    self.process.kill()
                    raise FaultError(f"the study does not end or says nothing:\n{self.output}") from None


@contextlib.contextmanager
def cluster(
    repeats: int = REPEATS, command: Sequence[str] = COMMAND, batches: str = Cluster.batches
) -> Iterator[Cluster]:
    """Create two hosts of two CPUs each under Ray, for a study of these repeats and batches. Remove them at the end."""
    with Hosts(2) as hosts:
        address = f"{hosts[0].address}:6379"
        for host in hosts:
            (host.tmp / STEPPING.name).mkdir()
            (host.tmp / "home/.ray").mkdir(exist_ok=True)
            (host.tmp / "home/.ray/auth_token").write_text("0" * 64)
        start_node(hosts[0], ["--head", "--port=6379", "--dashboard-host=127.0.0.1"])
        start_node(hosts[1], [f"--address={address}"], _second_host())
        hosts[0].run(["mkdir", "-p", "/tmp/results"])
        hosts[0].run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", "/tmp/results"])
        yield Cluster(hosts, address, repeats, command, batches)


def start_node(host: Host, role: list[str], env: dict[str, str] | None = None) -> None:
    """Start Ray on a host."""
    limits = ["--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
    host.run(["ray", "start", *role, f"--node-ip-address={host.address}", *limits], env=env, timeout_s=400)


def processes(host: Host, pattern: str) -> list[int]:
    """Return the ids, in the host's own namespace, of processes whose command line matches, or name if it is `RANK`."""
    by_command = [] if pattern == RANK else ["-f"]
    return [int(pid) for pid in host.run(["pgrep", *by_command, pattern], check=False).stdout.split()]


def send(host: Host, pattern: str, number: signal.Signals) -> None:
    """Send a signal to all matching processes of a host. Raises FaultError if there are none within 30 s."""
    deadline_s = time.monotonic() + 30
    while not (pids := processes(host, pattern)):
        if time.monotonic() > deadline_s:
            raise FaultError(f"no process {pattern!r} on {host.name}")
        time.sleep(0.2)
    host.run(["kill", f"-{int(number)}", *map(str, pids)], check=False)


def await_step(cluster: Cluster) -> None:
    """Wait until the rank on the second host is in a step.

    Raises NoStepError if the command has ended, or if there is no step within `NEXT_TIMEOUT_S`.
    """
    folder = cluster.hosts[1].tmp / STEPPING.name
    for sign in folder.iterdir():
        sign.unlink(missing_ok=True)
    deadline_s = time.monotonic() + NEXT_TIMEOUT_S
    while not any(folder.iterdir()):
        if time.monotonic() > deadline_s or (cluster.run and cluster.run.has_ended):
            raise NoStepError(f"no rank is in a step:\n{cluster.run.output if cluster.run else ''}")
        time.sleep(0.05)


# -------------------------------------------------------------------------------------------------------------- faults


def kill_rank(cluster: Cluster) -> None:
    await_step(cluster)
    send(cluster.hosts[1], RANK, signal.SIGKILL)


def kill_worker(cluster: Cluster) -> None:
    await_step(cluster)
    send(cluster.hosts[1], WORKER, signal.SIGKILL)


def kill_starting_rank(cluster: Cluster) -> None:
    """Kill a rank of the next worker group at a random moment before its first step."""
    earlier = set(processes(cluster.hosts[1], RANK))
    deadline_s = time.monotonic() + NEXT_TIMEOUT_S
    while not (started := set(processes(cluster.hosts[1], RANK)) - earlier):
        if time.monotonic() > deadline_s or (cluster.run and cluster.run.has_ended):
            raise NoStepError("no further worker group was started")
        time.sleep(0.05)
    cluster.hosts[1].run(["kill", f"-{int(signal.SIGKILL)}", str(min(started))], check=False)


def kill_raylet(cluster: Cluster) -> None:
    await_step(cluster)
    send(cluster.hosts[1], "raylet/raylet", signal.SIGKILL)


def cut_link(cluster: Cluster) -> None:
    await_step(cluster)
    cluster.hosts.cut(cluster.hosts[1])
    time.sleep(CUT_S)
    cluster.hosts.restore(cluster.hosts[1])


def kill_driver(cluster: Cluster) -> None:
    send(cluster.hosts[0], r"study\.scaling.* run smoke", signal.SIGKILL)


def hang_rank(cluster: Cluster) -> None:
    await_step(cluster)
    send(cluster.hosts[1], RANK, signal.SIGSTOP)


def fill_disk(cluster: Cluster) -> None:
    cluster.hosts[0].run(["dd", "if=/dev/zero", "of=/tmp/results/filler", "bs=64k"], check=False)


def empty_disk(cluster: Cluster) -> None:
    cluster.hosts[0].run(["rm", "-f", "/tmp/results/filler"])


def starve(cluster: Cluster) -> None:
    (cluster.hosts[1].tmp / STARVED.name).touch()


def feed(cluster: Cluster) -> None:
    (cluster.hosts[1].tmp / STARVED.name).unlink(missing_ok=True)


def _second_host() -> dict[str, str]:
    """Return the environment of the second host's processes: a clock that is ahead, and a folder for signs of steps."""
    library = file("libfaketime")
    if library is None:  # the linker would only warn, and the clocks would be equal
        raise FaultError(missing("libfaketime"))
    return {
        "STEPPING": str(STEPPING),
        "LD_PRELOAD": str(library),
        "FAKETIME": f"+{AHEAD_S}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(ROOT / "tests/support/clock_ahead"),
    }


@dataclass(frozen=True)
class Fault:
    """How a fault is injected and repaired.

    message: pattern of the command's output, or of the reason in the record of the trial that failed; None if the fault
    ends the command, which is then repeated.
    """

    inject: Callable[[Cluster], None]
    message: str | None = None
    repair: Callable[[Cluster], None] = Cluster.rejoin


ON_HOST2 = r"host2 \([0-9a-f]{8}\)|10\.77\.0\.3"
FAULTS = {
    "rank killed": Fault(kill_rank, ON_HOST2),
    "worker of Ray Train killed": Fault(kill_worker, ON_HOST2),
    "rank killed while its group starts": Fault(kill_starting_rank, ON_HOST2),
    "rank hangs": Fault(hang_rank, rf"trial-timeout.*\brank 1\b.*({ON_HOST2})"),
    "link cut for 30 s": Fault(cut_link, ON_HOST2),
    "disk full": Fault(fill_disk, r"No space left on device", repair=empty_disk),
    "driver killed": Fault(kill_driver),
    "raylet killed": Fault(kill_raylet, ON_HOST2),
    "out of memory on one node": Fault(starve, ON_HOST2, repair=feed),
}
"""in the order of injection; the last one prunes trials with larger batches"""

CLOCKS = "clocks an hour apart"
COMPLETED = "the same command completes exactly the planned trials"


def suffer(cluster: Cluster, rng: random.Random, names: Sequence[str] = tuple(FAULTS)) -> Iterator[dict[str, Any]]:
    """Run a study, inject these faults at random times, and complete the study by repeating its command.

    Yields what happened at each fault, and then for `CLOCKS` and `COMPLETED`. Raises FaultError if a finished trial is
    lost or repeated, a failure does not name its node, no further trial runs although the cluster has room for it, a
    duration mixes the clocks of nodes, the study is incomplete, or its trials are not the planned ones.
    """
    cluster.number += 1
    run = cluster.start()
    for name in names:
        fault = FAULTS[name]
        started_s = time.monotonic()
        for further in (1, 0):
            run = _await_next_trial(cluster, run)
            wait_s = rng.uniform(0.0, 4.0)
            time.sleep(wait_s)
            finished, earlier, since = cluster.done_trials(), cluster.records(), len(run.output)
            try:
                fault.inject(cluster)
                break
            except NoStepError:  # the last planned trial may be over; the command is repeated with more
                if not further:
                    raise
        said = ""
        if fault.message is None:
            run.end()
        else:
            said = run.await_reason(fault.message, since, partial(cluster.reasons, earlier))
        fault.repair(cluster)
        _check_unchanged(cluster, finished)
        yield {
            "fault": name,
            "moment_s": round(wait_s, 2),
            "finished_before": len(finished),
            "said": said,
            "seconds": round(time.monotonic() - started_s, 1),
        }
    started_s = time.monotonic()
    codes = [run.end()]
    finished = cluster.done_trials()
    while codes[-1] != 0 and len(codes) < 4:
        cluster.rejoin()
        run = cluster.start()
        codes.append(run.end())
    _check_unchanged(cluster, finished)
    final = cluster.records()
    longest_s = max(record["duration_s"] for record in final.values() if record["status"] == "done")
    _require(longest_s < AHEAD_S / 2, f"a trial reports a duration of {longest_s:.0f} s: it mixes the clocks of nodes")
    yield {"fault": CLOCKS, "longest_trial_s": longest_s}
    _require(codes[-1] == 0, f"repeating the command did not complete the study: exit codes {codes}\n{run.output}")
    _require(set(final) == cluster.planned_trials(), "the final trials are not the planned ones")
    statuses = {record["status"] for record in final.values()}
    allowed = {"done", "out_of_memory", "pruned"} if "out of memory on one node" in names else {"done"}
    _require(statuses <= allowed, f"unexpected statuses: {statuses - allowed}")
    yield {
        "fault": COMPLETED,
        "exit_codes": codes,
        "trials": len(final),
        "seconds": round(time.monotonic() - started_s, 1),
    }


def _await_next_trial(cluster: Cluster, run: Run) -> Run:
    """Wait until one more trial is done. If the command ends first, repair the cluster and repeat it once.

    If fewer than `LEFT` trials are left, the command ends and is repeated with more repeats.
    """
    if not run.has_ended and cluster.left(run) < LEFT:
        run.end()
    before = len(cluster.done_trials())
    for _ in range(2):
        if run.has_ended:
            if cluster.left(run) < LEFT:
                cluster.repeats += MORE_REPEATS
            cluster.rejoin()
            run = cluster.start()
        deadline_s = time.monotonic() + NEXT_TIMEOUT_S
        while not run.has_ended and time.monotonic() < deadline_s:
            if len(cluster.done_trials()) > before:
                return run
            time.sleep(0.2)
    run.process.kill()
    raise FaultError(f"no other trial finished:\n{run.output}")


def _check_unchanged(cluster: Cluster, finished: Records) -> None:
    records = cluster.records()
    changed = sorted(trial for trial, record in finished.items() if records.get(trial) != record)
    _require(not changed, f"finished trials were lost or repeated: {changed}")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise FaultError(message)
