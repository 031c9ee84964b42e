"""Simulated hosts in namespaces are isolated from each other and leave nothing behind."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import ROOT, Hosts, HostsError, bucket_bytes
from tests.support.system import HOSTS, needs

pytestmark = needs(*HOSTS)

BYTES = 5_000_000
SINK = f"""
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection, _ = server.accept()
left = {BYTES}
while left:
    left -= len(connection.recv(min(left, 1 << 20)))
connection.sendall(b"!")
"""
SOURCE = f"""
import socket, time
connection = socket.create_connection(("host2", 7000), timeout=30)
began_s = time.perf_counter()
connection.sendall(bytes({BYTES}))
assert connection.recv(1) == b"!"
print({BYTES} / (time.perf_counter() - began_s))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def bytes_per_s(hosts: Hosts) -> float:
    """Measure the rate of sending 5 MB from the first host to the second."""
    sink = hosts[1].start(["python", "-c", SINK], stdout=subprocess.PIPE)
    assert sink.stdout.readline() == "ready\n"
    rate = float(hosts[0].run(["python", "-c", SOURCE]).stdout)
    sink.communicate(timeout=30)
    return rate


def test_each_host_has_its_own_name_address_and_processes(hosts: Hosts) -> None:
    sleeper = hosts[0].start(["sleep", "1234"])
    seen = [host.run(["ps", "-eo", "args"]).stdout for host in hosts]
    assert "sleep 1234" in seen[0] and "sleep 1234" not in seen[1]
    assert [host.run(["hostname", "-i"]).stdout.split() for host in hosts] == [[host.address] for host in hosts]
    assert [host.run(["hostname"]).stdout.strip() for host in hosts] == ["host1", "host2"]
    hosts[0].run(["pkill", "sleep"])
    assert sleeper.wait(10) != 0


def test_each_host_has_its_own_temporary_folder_and_shared_memory(hosts: Hosts) -> None:
    for folder in ("/tmp", "/dev/shm", "/run"):
        hosts[0].run(["touch", f"{folder}/mine"])
        assert hosts[1].run(["ls", folder]).stdout.count("mine") == 0
    assert (hosts[0].tmp / "mine").exists()
    assert not Path("/dev/shm/mine").exists()


def test_ssh_reaches_every_host_from_the_console_and_from_the_others(hosts: Hosts) -> None:
    quiet = ["ssh", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR"]
    for machine in (hosts.console, hosts[0]):
        assert machine.run([*quiet, hosts[1].address, "hostname; echo ~"]).stdout.split() == ["host2", "/tmp/home"]


def test_a_cable_carries_its_configured_rate(hosts: Hosts) -> None:
    hosts.set_rate("100mbit")
    shaped = bytes_per_s(hosts)
    hosts.set_rate(None)
    assert shaped < 1.05 * 100e6 / 8
    assert bytes_per_s(hosts) > 2 * shaped


def test_the_bucket_of_a_shaper_holds_two_milliseconds_of_its_rate() -> None:
    assert [bucket_bytes(rate) for rate in ("1gbit", "200mbit", "64kbit")] == [250_000, 65_536, 65_536]
    with pytest.raises(HostsError, match="rate '1 Gbit/s'"):
        bucket_bytes("1 Gbit/s")


def test_a_disconnected_host_is_unreachable_until_its_cable_is_back(hosts: Hosts) -> None:
    reach = ["python", "-c", "import socket; socket.create_connection(('host2', 22), timeout=2)"]
    hosts.cut(hosts[1])
    assert hosts[0].run(reach, check=False).returncode
    hosts.restore(hosts[1])
    hosts[0].run(reach)


def test_a_failed_command_reports_the_command_the_host_and_its_output(hosts: Hosts) -> None:
    with pytest.raises(HostsError, match=r"host2: ls /nowhere: 2\n.*No such file"):
        hosts[1].run(["ls", "/nowhere"])


def test_powering_off_a_host_ends_its_processes() -> None:
    with Hosts(1) as made:
        sleeper = made[0].start(["sleep", "4321"])
        made[0].power_off()
        assert sleeper.wait(10) != 0
        folder = made.folder
    assert not folder.exists()


def test_hosts_end_with_the_process_that_created_them_even_if_it_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"""
import time
from pathlib import Path
from tests.support.hosts import Hosts
with Hosts(2) as hosts:
    Path({str(pids)!r} + "~").write_text(f"{{hosts.folder}} " + " ".join(str(host.pid) for host in hosts))
    Path({str(pids)!r} + "~").rename({str(pids)!r})
    time.sleep(600)
"""
    maker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    while not pids.exists():
        assert maker.poll() is None
        time.sleep(0.05)
    maker.kill()
    maker.wait()
    folder, *left = pids.read_text().split()
    for pid in map(int, left):
        with contextlib.suppress(psutil.NoSuchProcess):
            for _ in range(200):
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    break
                time.sleep(0.05)
            else:
                raise AssertionError(f"process {pid} of a host is left")
    os.system(f"rm -r {folder}")


def test_the_command_line_runs_a_command_on_the_first_host_and_returns_its_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hosts", "--count", "2", "--",
         "sh", "-c", "hostname; getent hosts host2; exit 7"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (7, ["host1", "10.77.0.3", "host2"])
