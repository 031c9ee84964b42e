"""Simulated hosts on this machine: sets of namespaces with separate network, processes, mounts, IPC, name and folders.

A host has an address, an sshd, its own /tmp, /run, /dev/shm and home, and a cable to a switch. The rate of the cable
can be set, and the cable can be pulled. Commands that see all processes or all of /tmp, such as `ray stop`, only see
one host's. Files outside these folders (this project, its .venv) are shared with this machine.

    with Hosts(2, rate="1gbit") as hosts:
        hosts[0].run(["ray", "start", "--head"])

`python -m tests.support.hosts --count 2 --rate 1gbit -- COMMAND` runs COMMAND on the first host and removes all hosts
afterwards.

Hosts need no clean-up by name. A host is the PID namespace of its first process, which ends when its standard input is
closed, that is with its parent process, even if that is killed. The kernel then ends all processes of the host and
removes its interfaces and mounts. Only its folder in the system's temporary folder remains if the parent is killed.
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
"""root's home on each host; the real home stays visible, because Python may be installed there"""
START_TIMEOUT_S = 20.0
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""long timeouts, because Ray's start may take minutes on a busy machine; and no busy-waiting threads, which took a
sixth of the time of tests that train"""


class HostsError(Exception):
    """Hosts cannot be created on this machine, or a command on a host failed."""


def bucket_bytes(rate: str) -> int:
    """Return the size of a shaper's token bucket for a rate in tc's notation (200mbit): 2 ms of data, at least 64 KB.

    64 KB is the kernel's largest TCP packet. A bucket of 64 KB fills in 0.5 ms at 1 Gbit/s and overflows before the
    shaper runs again: an all-reduce, which sends in both directions at once, reached only 80 of 125 MB/s.
    """
    match = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if not match:
        raise HostsError(f"invalid rate {rate!r}; use for example 200mbit or 1gbit")
    bytes_per_s = int(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8
    return max(65_536, round(0.002 * bytes_per_s))


@dataclass
class Host:
    """One host. `tmp` is its /tmp and `pid` its first process, both as seen from outside."""

    name: str
    address: str
    folder: Path
    init: subprocess.Popen[bytes] = field(repr=False)
    pid: int

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    def command(self, arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: str = HOME) -> list[str]:
        """Return the command that runs `arguments` on the host, with the host's environment and `env`."""
        variables = _environment() | dict(env or {})
        enter = ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in ("net", "pid", "mount", "ipc", "uts"))]
        script = f'cd {shlex.quote(cwd)} && exec "$@"'
        return [
            *enter, "env", "-i", *(f"{name}={value}" for name, value in variables.items()),
            "sh", "-c", script, "sh", *arguments,
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
        """Run a command on this host and wait for it. Raises HostsError with its output if it fails."""
        process = subprocess.run(
            self.command(arguments, env, cwd),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if check and process.returncode:
            command = shlex.join(arguments)
            raise HostsError(f"{self.name}: {command}: {process.returncode}\n{process.stdout}{process.stderr}")
        return process

    def start(
        self, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command on this host, which ends with the host at the latest. `options` are passed to Popen."""
        options = {"stdin": subprocess.DEVNULL, "text": True} | options
        return subprocess.Popen(self.command(arguments, env, cwd), **options)

    def power_off(self) -> None:
        """End all processes of this host at once, like a power failure."""
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
    """Context manager for `count` hosts on one switch. `console` is the machine that contains the switch.

    The console has namespaces, folders and an address like a host, but no cable. It acts as a user's laptop, from which
    `ray up` and ssh reach the hosts. `rate` limits every cable in each direction, in tc's notation ("200mbit"); None
    means unlimited. Raises HostsError.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.number, self.rate = count, rate
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        # Imported here, because the first process of a host runs this file without site-packages.
        from tests.support.system import HOSTS, missing

        if reason := missing(*HOSTS):
            raise HostsError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self.machines: list[Host] = []
        try:
            self._create()
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
        """Private key accepted for root on every host, and the default key of root on every machine."""
        return self.folder / "key"

    def set_rate(self, rate: str | None, host: Host | None = None) -> None:
        """Limit the rate of a host's cable in both directions, or of all cables. None means unlimited."""
        for end in [host] if host else self.hosts:
            for machine, device in ((end, "eth0"), (self.console, end.name)):
                machine.run(["tc", "qdisc", "del", "dev", device, "root"], check=False)
                if rate:
                    shape = ["tbf", "rate", rate, "burst", f"{bucket_bytes(rate)}b", "latency", "100ms"]
                    machine.run(["tc", "qdisc", "add", "dev", device, "root", *shape])

    def cut(self, host: Host) -> None:
        """Pull a host's cable."""
        self.console.run(["ip", "link", "set", host.name, "down"])

    def restore(self, host: Host) -> None:
        """Plug a host's cable in again."""
        self.console.run(["ip", "link", "set", host.name, "up"])

    def _create(self) -> None:
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
        for command in (
            "link add switch type bridge forward_delay 0 stp_state 0",
            f"address add {self.console.address}/24 dev switch",
            "link set switch up",
        ):
            self.console.run(["ip", *command.split()])
        for host in self.hosts:
            self._connect(host)
        if self.rate:
            self.set_rate(self.rate)
        for machine in self.machines:
            machine.run(["/usr/sbin/sshd", "-f", "/run/sshd/config", "-E", "/tmp/sshd.log"])

    def _connect(self, host: Host) -> None:
        """Connect a host to the switch with a cable."""
        cable = f"link add {host.name} type veth peer name eth0 netns /proc/{host.pid}/ns/net"
        # The PID namespace of the console does not contain the hosts, so run this from this machine's.
        enter_network = ["nsenter", f"--target={self.console.pid}", "--net"]
        subprocess.run([*enter_network, "ip", *cable.split()], check=True, capture_output=True)
        self.console.run(["ip", "link", "set", host.name, "master", "switch", "up"])
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
        host.run(["ip", "link", "set", "eth0", "up"])


def start_ray(hosts: Hosts, cpus: int = 2, head_cpus: int | None = None) -> str:
    """Start Ray on every host, with the head on the first, and return its address.

    `head_cpus` None means as many CPUs as on the other hosts.
    """
    limits = ["--object-store-memory=200000000", "--disable-usage-stats"]
    address = f"{hosts[0].address}:6379"
    token = {"RAY_AUTH_TOKEN": "0" * 64}
    for number, host in enumerate(hosts):
        (host.tmp / "home/.ray").mkdir(exist_ok=True)
        (host.tmp / "home/.ray/auth_token").write_text(token["RAY_AUTH_TOKEN"])
        host_cpus = cpus if number or head_cpus is None else head_cpus
        role = ["--head", "--port=6379", "--dashboard-host=127.0.0.1"] if number == 0 else [f"--address={address}"]
        start = ["ray", "start", *role, f"--node-ip-address={host.address}", f"--num-cpus={host_cpus}", *limits]
        host.run(start, timeout_s=400)
    return address


def _environment() -> dict[str, str]:
    """Return the environment of commands on a host. It has nothing of this machine's but the path of Python."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    ray = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}  # as in cluster.yaml
    return {"HOME": HOME, "PATH": path, "LANG": "C.UTF-8", "USER": "root"} | ray | PATIENCE


def _boot(name: str, address: str, folder: Path, table: str) -> Host:
    """Start a host, and wait until its namespaces are set up. Raises HostsError."""
    host_folder = folder / name
    for part in ("tmp/home/.ssh", "etc"):
        (host_folder / part).mkdir(parents=True)
    (host_folder / "tmp").chmod(0o1777)
    _write_etc(host_folder / "etc", name, table, folder / "key.pub")
    home = host_folder / "tmp/home"
    (home / ".profile").touch()
    (home / ".bashrc").write_text("".join(f"export {key}={value}\n" for key, value in PATIENCE.items()))
    shutil.copy(folder / "key", home / ".ssh/id_ed25519")
    (home / ".ssh/id_ed25519").chmod(0o600)
    flags = ["--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--ipc", "--uts"]
    init = subprocess.Popen(
        ["unshare", *flags, sys.executable, "-S", __file__, "init", name, str(host_folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert init.stdout
    answer = init.stdout.readline()
    if answer != b"up\n":
        init.kill()
        raise HostsError(f"{name} did not start: {(answer + init.stdout.read()).decode()}")
    (child,) = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return Host(name, address, host_folder, init, int(child))


def _write_etc(etc: Path, name: str, table: str, public_key: Path) -> None:
    """Write the files that replace those of this machine on a host."""
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
    """Run as the first process of a host: set up its namespaces, then reap dead processes until its input is closed."""

    def sh(*command: str) -> None:
        process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if process.returncode:
            sys.stdout.write(f"{shlex.join(command)}: {process.stdout.decode()}")
            sys.exit(1)

    sh("hostname", name)
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "tmpfs", "-o", "mode=755,size=64m", "tmpfs", "/run")
    shutil.copytree(f"{folder}/etc", "/run/sshd")
    for file in ("hosts", "hostname", "resolv.conf", "passwd"):
        sh("mount", "--bind", f"/run/sshd/{file}", os.path.realpath(f"/etc/{file}"))
    sh("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    root = Path(__file__).resolve().parent.parent.parent
    if root.is_relative_to("/tmp"):  # keep a clone in /tmp visible
        clone = Path(folder, "tmp", root.relative_to("/tmp"))
        clone.mkdir(parents=True)
        sh("mount", "--bind", str(root), str(clone))
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
    parser = argparse.ArgumentParser(description="Create several hosts and run a command on the first.")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--rate", help="of each cable in tc's notation, such as 200mbit")
    parser.add_argument("--ray", action="store_true", help="start Ray on all hosts first")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with Hosts(options.count, options.rate) as hosts:
        address = {"RAY_ADDRESS": start_ray(hosts)} if options.ray else {}
        return hosts[0].start(options.command, env=address, cwd=os.getcwd(), stdin=None).wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["init"]:
        _init(*sys.argv[2:])
    else:
        sys.exit(_main())
