"""Programs, files and privileges that some tests need from the system. Without them, a test is skipped.

    @needs("prometheus")
    def test_...

The skip happens before any fixture runs (tests/conftest.py). `python -m tests.support.system` prints the Debian
packages that satisfy all needs; .ci/run installs them.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Need:
    """One need: any of `programs` on the PATH, a match of the glob `file` below the root folder, or a passed `check`.

    package: the Debian package that provides it; None for a privilege. check: returns what is missing, or None.
    """

    package: str | None = None
    programs: tuple[str, ...] = ()
    file: str | None = None
    check: Callable[[], str | None] | None = None


def _no_root() -> str | None:
    return None if os.geteuid() == 0 else "must run as root"


_NETWORK = (
    "ip link add name one type veth peer name two && "
    "tc qdisc add dev one root tbf rate 100mbit burst 64kb latency 100ms"
)


@functools.cache
def _no_namespaces() -> str | None:
    command = ["unshare", "--net", "--pid", "--fork", "--mount", "sh", "-c", _NETWORK]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"cannot create namespaces: {error}"
    return f"cannot create namespaces: {process.stderr.strip()}" if process.returncode else None


NEEDS = {
    "chromium": Need("chromium", ("chromium", "chromium-browser", "google-chrome")),
    "g++": Need("g++", ("g++",)),
    "ip": Need("iproute2", ("ip",)),
    "tc": Need("iproute2", ("tc",)),
    "mount": Need("mount", ("mount",)),
    "nsenter": Need("util-linux", ("nsenter",)),
    "pgrep": Need("procps", ("pgrep",)),
    "ps": Need("procps", ("ps",)),
    "prometheus": Need("prometheus", ("prometheus",)),
    "rsync": Need("rsync", ("rsync",)),
    "ssh": Need("openssh-client", ("ssh",)),
    "ssh-keygen": Need("openssh-client", ("ssh-keygen",)),
    "sshd": Need("openssh-server", ("sshd",)),
    "unshare": Need("util-linux", ("unshare",)),
    "fashion-mnist": Need("dataset-fashion-mnist", file="usr/share/datasets/fashion-mnist"),
    "libfaketime": Need("libfaketime", file="usr/lib/*/faketime/libfaketimeMT.so.1"),
    "root": Need(check=_no_root),
    "namespaces": Need(check=_no_namespaces),
}
NETWORK = ("ip", "tc", "root", "namespaces")
"""for network namespaces"""
HOSTS = ("mount", "nsenter", "ps", "pgrep", "ssh", "ssh-keygen", "sshd", "unshare", *NETWORK)
"""for the hosts of tests/support/hosts.py"""


def program(name: str) -> str | None:
    """Return the path of the first program of this need, in PATH or an sbin folder next to its bin folders."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    sbin = [f"{folder[:-3]}sbin" for folder in folders if folder.endswith("/bin")]
    search_path = os.pathsep.join([*folders, *sbin])
    paths = (shutil.which(candidate, path=search_path) for candidate in NEEDS[name].programs)
    return next(filter(None, paths), None)


def file(name: str) -> Path | None:
    """Return the file or folder of this need. SYSTEM_ROOT replaces the root folder, for tests that hide the files."""
    return next(Path(os.environ.get("SYSTEM_ROOT", "/")).glob(NEEDS[name].file or ""), None)


def missing(*names: str) -> str | None:
    """Return the reason why these needs are not met, with the packages to install; None if all are met."""
    absent = [
        name for name in names if (NEEDS[name].programs and not program(name)) or (NEEDS[name].file and not file(name))
    ]
    if absent:
        packages = sorted({str(NEEDS[name].package) for name in absent})
        return f"needs {', '.join(absent)}: apt install {' '.join(packages)}"
    checks = [check for name in names if (check := NEEDS[name].check)]
    return next((reason for check in checks if (reason := check())), None)


def needs(*names: str) -> "pytest.MarkDecorator":
    """Mark a test, or as `pytestmark` a file of tests, with what it needs from the system."""
    import pytest

    unknown = set(names) - set(NEEDS)
    assert not unknown, f"unknown needs {unknown}"
    return pytest.mark.system(*names)


if __name__ == "__main__":
    print(*sorted({need.package for need in NEEDS.values() if need.package}))
