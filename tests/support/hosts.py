"""Hosts on this machine: each a set of namespaces with its own network, processes, mounts, IPC, name and folders.

A host has an address, a sshd, an own /tmp, /run, /dev/shm and home, and a cable to a switch whose rate can be set and
which can be pulled. Whatever sees all processes or all of /tmp, such as `ray stop`, sees one host's alone. Files outside of
those folders (this project, its .venv) are this machine's.

    with Hosts(2, rate="1gbit") as hosts:
        hosts[0].run(["ray", "start", "--head"])

or `python -m tests.support.hosts --count 2 --rate 1gbit -- COMMAND`, which runs COMMAND on the first host and ends all afterwards.

Nothing has a name outside: a host is the PID namespace below its first process, which ends when its standard input does,
that is with the process that made it, even if that was killed. The kernel then ends all its processes, and with them go
its interfaces and mounts. Only the folder below the system's temporary folder outlives a maker that was killed.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent.parent
NETWORK = "10.77.0"
HOME = "/tmp/home"
"""home of root on each host; what lies in the real one, such as a Python, stays in sight"""
START_TIMEOUT_S = 20.0
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""for a machine so busy that Ray's start takes minutes. And threads that wait for others do not spin, which took a
sixth of the time of tests that train"""


class HostsError(Exception):
    """Hosts cannot be made here, or a command on one of them failed."""


def bucket_bytes(rate: str) -> int:
    """The bucket of a shaper for a rate as tc writes it (200mbit): what passes in 2 ms, and 64 KB at least.

    64 KB is the largest packet that the kernel makes of TCP's. With no more at 1 Gbit/s, where 0.5 ms fill it, an
    all-reduce, which sends both ways at once, got 80 of the 125 MB/s: the bucket overflows before the shaper looks again.
    """
    found = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if not found:
        raise HostsError(f"rate {rate!r}: allowed are such as 200mbit, 1gbit")
    bytes_per_s = int(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8
    return max(65_536, round(0.002 * bytes_per_s))


@dataclass
class Host:
    """One host. `tmp` is its /tmp as seen from outside; `pid` is its first process as seen from outside."""

    name: str
    address: str
    folder: Path
    init: subprocess.Popen[bytes] = field(repr=False)
    pid: int

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    def command(self, arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: str = HOME) -> list[str]:
        """What runs `arguments` on this host, as a command of this machine. Its environment is the host's and `env`."""
        variables = _environment() | dict(env or {})
        entered = ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in ("net", "pid", "mount", "ipc", "uts"))]
        there = f'cd {shlex.quote(cwd)} && exec "$@"'
        return [
            *entered, "env", "-i", *(f"{name}={value}" for name, value in variables.items()),
            "sh", "-c", there, "sh", *arguments,
        ]  # fmt: skip

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        check: bool = True,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host and waits for its end. Raises HostsError with its output where it fails."""
        done = subprocess.run(
            self.command(arguments, env, cwd),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise HostsError(f"{self.name}: {shlex.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def start(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME, **more: Any
    ) -> "subprocess.Popen[str]":
        """Starts a command on this host; `more` is for Popen. It ends with the host at the latest."""
        more = {"stdin": subprocess.DEVNULL, "text": True} | more
        return subprocess.Popen(self.command(arguments, env, cwd), **more)

    def power_off(self) -> None:
        """Ends all processes of this host at once, as a pulled plug would."""
        if self.init.stdin:
            self.init.stdin.close()
        try:
            self.init.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.init.kill()
            self.init.wait()


class Hosts(Sequence[Host]):
    """`count` hosts on one switch, as a context manager; `console` is the machine that the switch is in.

    The console has the same namespaces and folders as a host and its own address, but no cable: a person's laptop, from
    which `ray up` and ssh reach the hosts. rate: of every cable in each direction, as tc writes it ("200mbit"); None:
    as fast as the kernel copies. Raises HostsError.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.number, self.rate = count, rate
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        from tests.support.system import (  # not at the top: the first process of a host runs this file without site
            HOSTS,
            missing,
        )

        if reason := missing(*HOSTS):
            raise HostsError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self.machines: list[Host] = []
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in reversed(self.machines):
            machine.power_off()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.hosts)

    def __getitem__(self, index: Any) -> Any:
        return self.hosts[index]

    @property
    def key(self) -> Path:
        """Private key that every host lets in as root; on each machine also the default one of its root."""
        return self.folder / "key"

    def set_rate(self, rate: str | None, host: Host | None = None) -> None:
        """Sets the rate of a host's cable in both directions, or of all cables; None: unlimited."""
        for each in [host] if host else self.hosts:
            for machine, device in ((each, "eth0"), (self.console, each.name)):
                machine.run(["tc", "qdisc", "del", "dev", device, "root"], check=False)
                if rate:
                    shape = ["tbf", "rate", rate, "burst", f"{bucket_bytes(rate)}b", "latency", "100ms"]
                    machine.run(["tc", "qdisc", "add", "dev", device, "root", *shape])

    def cut(self, host: Host) -> None:
        """Pulls a host's cable out."""
        self.console.run(["ip", "link", "set", host.name, "down"])

    def restore(self, host: Host) -> None:
        """Plugs it in again."""
        self.console.run(["ip", "link", "set", host.name, "up"])

    def _make(self) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hosts", "-f", str(self.key)],
            check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.machines = []
        names = ["console", *(f"host{number}" for number in range(1, self.number + 1))]
        table = "".join(f"{NETWORK}.{number} {name}\n" for number, name in enumerate(names, 1))
        for number, name in enumerate(names, 1):
            self.machines.append(_boot(name, f"{NETWORK}.{number}", self.folder, table))
        self.console, *self.hosts = self.machines
        on_console = [["link", "add", "switch", "type", "bridge", "forward_delay", "0", "stp_state", "0"]]
        on_console += [
            ["address", "add", f"{self.console.address}/24", "dev", "switch"],
            ["link", "set", "switch", "up"],
        ]
        for command in on_console:
            self.console.run(["ip", *command])
        for host in self.hosts:
            cable = [
                "link",
                "add",
                host.name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                f"/proc/{host.pid}/ns/net",
            ]
            # seen from the console there are no other hosts, so the cable is laid from this machine's process tree
            subprocess.run(
                ["nsenter", f"--target={self.console.pid}", "--net", "ip", *cable], check=True, capture_output=True
            )
            self.console.run(["ip", "link", "set", host.name, "master", "switch", "up"])
            host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
            host.run(["ip", "link", "set", "eth0", "up"])
        if self.rate:
            self.set_rate(self.rate)
        for machine in self.machines:
            machine.run(["/usr/sbin/sshd", "-f", "/run/sshd/config", "-E", "/tmp/sshd.log"])


def start_ray(hosts: Hosts, cpus: int = 2, head_cpus: int | None = None) -> str:
    """Starts Ray on every host, the head on the first; gives its address. `head_cpus` None: as many as on the others."""
    bounded = ["--object-store-memory=200000000", "--disable-usage-stats"]
    address = f"{hosts[0].address}:6379"
    token = {"RAY_AUTH_TOKEN": "0" * 64}
    for number, host in enumerate(hosts):
        (host.tmp / "home/.ray").mkdir(exist_ok=True)
        (host.tmp / "home/.ray/auth_token").write_text(token["RAY_AUTH_TOKEN"])
        own = cpus if number or head_cpus is None else head_cpus
        role = ["--head", "--port=6379", "--dashboard-host=127.0.0.1"] if number == 0 else [f"--address={address}"]
        start = ["ray", "start", *role, f"--node-ip-address={host.address}", f"--num-cpus={own}", *bounded]
        host.run(start, timeout_s=400)
    return address


def _environment() -> dict[str, str]:
    """What every command on a host has: of this machine's environment only where its programs are."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"HOME": HOME, "PATH": path, "LANG": "C.UTF-8", "USER": "root", "RAY_AUTH_MODE": "token"} | PATIENCE


def _boot(name: str, address: str, folder: Path, table: str) -> Host:
    own = folder / name
    for part in ("tmp/home/.ssh", "etc"):
        (own / part).mkdir(parents=True)
    (own / "tmp").chmod(0o1777)
    _write_etc(own / "etc", name, table, folder / "key.pub")
    (own / "tmp/home/.profile").touch()
    (own / "tmp/home/.bashrc").write_text("".join(f"export {key}={value}\n" for key, value in PATIENCE.items()))
    shutil.copy(folder / "key", own / "tmp/home/.ssh/id_ed25519")
    (own / "tmp/home/.ssh/id_ed25519").chmod(0o600)
    flags = ["--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc", "--uts"]
    init = subprocess.Popen(
        ["unshare", *flags, sys.executable, "-S", __file__, "init", name, str(own)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert init.stdout
    said = init.stdout.readline()
    if said != b"up\n":
        init.kill()
        raise HostsError(f"{name} did not come up: {(said + init.stdout.read()).decode()}")
    (child,) = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return Host(name, address, own, init, int(child))


def _write_etc(etc: Path, name: str, table: str, public_key: Path) -> None:
    """Files that a host sees in place of this machine's."""
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
    (etc / "hostname").write_text(f"{name}\n")
    (etc / "resolv.conf").write_text("")
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    moved = [[*user[:5], HOME, "/bin/bash"] if user[0] == "root" else user for user in users]
    (etc / "passwd").write_text("".join(":".join(user) + "\n" for user in moved))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / "host_key")], check=True)
    shutil.copy(public_key, etc / "authorized_keys")
    (etc / "config").write_text(
        "ListenAddress 0.0.0.0\nHostKey /run/sshd/host_key\nAuthorizedKeysFile /run/sshd/authorized_keys\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
        "PidFile none\nMaxStartups 100\nMaxSessions 100\nSubsystem sftp internal-sftp\n"
    )


def _init(name: str, folder: str) -> None:
    """First process of a host, in its namespaces: lays them out, then ends dead processes until its input ends."""

    def sh(*command: str) -> None:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            sys.stdout.write(f"{shlex.join(command)}: {done.stdout.decode()}")
            sys.exit(1)

    sh("hostname", name)
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "tmpfs", "-o", "mode=755,size=64m", "tmpfs", "/run")
    shutil.copytree(f"{folder}/etc", "/run/sshd")
    for file in ("hosts", "hostname", "resolv.conf", "passwd"):
        sh("mount", "--bind", f"/run/sshd/{file}", os.path.realpath(f"/etc/{file}"))
    sh("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    root = Path(__file__).resolve().parent.parent.parent
    if root.is_relative_to("/tmp"):  # a clone that lies there stays to be seen
        kept = Path(folder, "tmp", root.relative_to("/tmp"))
        kept.mkdir(parents=True)
        sh("mount", "--bind", str(root), str(kept))
    sh("mount", "--rbind", f"{folder}/tmp", "/tmp")
    sh("ip", "link", "set", "lo", "up")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)
    os.write(1, b"up\n")
    sys.stdin.read()


def _main() -> int:
    parser = argparse.ArgumentParser(description="Runs a command on the first of several hosts made for it.")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--rate", help="of each cable, as tc writes it, such as 200mbit")
    parser.add_argument("--ray", action="store_true", help="start Ray on all of them first")
    parser.add_argument("command", nargs="+")
    wanted = parser.parse_args()
    with Hosts(wanted.count, wanted.rate) as hosts:
        address = {"RAY_ADDRESS": start_ray(hosts)} if wanted.ray else {}
        return hosts[0].start(wanted.command, env=address, cwd=os.getcwd(), stdin=None).wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["init"]:
        _init(*sys.argv[2:])
    else:
        sys.exit(_main())
