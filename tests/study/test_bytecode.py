"""Compiled modules are kept where the installation does not have them."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from study.bytecode import keep_bytecode
from trainables.scratch import VARIABLE


def test_modules_that_each_process_would_compile_are_kept_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("compiled", "uncompiled"):
        (tmp_path / f"{name}_module.py").write_text("")
    py_compile.compile(str(tmp_path / "compiled_module.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "scratch"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    keep_bytecode(["uncompiled_module"])
    assert "PYTHONPYCACHEPREFIX" not in os.environ, "the first process that imports it writes it"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keep_bytecode(["compiled_module", "absent_module"])
    assert "PYTHONPYCACHEPREFIX" not in os.environ
    keep_bytecode(["compiled_module", "uncompiled_module"])
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert sys.pycache_prefix == os.environ["PYTHONPYCACHEPREFIX"] and not sys.dont_write_bytecode
    subprocess.run([sys.executable, "-c", "import uncompiled_module"], cwd=tmp_path, check=True)
    assert list((tmp_path / "scratch" / "bytecode").rglob("uncompiled_module.*.pyc"))
