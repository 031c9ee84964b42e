"""Tests that need system programs or privileges are skipped without them, and report what to install."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.system import HOSTS, NEEDS, missing, needs

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).name


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be a system without programs and files."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SYSTEM_ROOT", str(tmp_path))


def test_a_missing_program_or_file_is_reported_with_its_package(bare: None) -> None:
    for name, need in NEEDS.items():
        if need.package:
            assert missing(name) == f"needs {name}: apt install {need.package}"
    assert str(missing("ip", "tc", "sshd")).endswith("apt install iproute2 openssh-server")


def test_a_program_in_sbin_is_found_without_sbin_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbin/sshd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert missing("sshd") is None


def test_a_missing_privilege_is_reported_only_if_all_programs_exist(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(missing(*HOSTS)).startswith("needs ")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing("root") == "must run as root"


def test_an_unknown_need_is_refused() -> None:
    with pytest.raises(AssertionError, match="netscape"):
        needs("netscape")


def test_every_test_with_system_needs_is_skipped_on_a_bare_system(bare: None, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "support.system import" in path.read_text()]
    options = ["-q", "-m", "system", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"FORBID_SKIPS": "0"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3_000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) > 20
    skips = {str(case.get("name")): case.find("skipped") for case in cases}
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    root_only = {name for text in texts for name in re.findall(r'@needs\("root"\)\n(?:@.*\n)*def (\w+)', text)}
    assert {name for name, skip in skips.items() if skip is None} == (root_only if os.geteuid() == 0 else set())
    messages = {name: str(skip.get("message")) for name, skip in skips.items() if skip is not None}
    assert all("apt install" in message for name, message in messages.items() if name not in root_only)


def test_no_other_test_checks_for_programs_or_privileges_itself() -> None:
    files = [path for path in (ROOT / "tests").glob("*.py") if path.name not in ("system.py", HERE)]
    assert not [path.name for path in files if "shutil.which" in path.read_text() or "geteuid" in path.read_text()]
