"""Number formats, strategies and ways to execute run in the smallest study, or are infeasible with their reason. Models have
their own tests: all of them here would take minutes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from study.studies import STUDIES

ROOT = Path(__file__).parent.parent


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "study.scaling", *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.timeout(600)
def test_every_number_format_strategy_and_execution_runs_here_or_says_why_not(tmp_path: Path) -> None:
    out = str(tmp_path / "everything")
    ran = command("run", "everything", "--model", "mlp", "--address", "local", "--out", out, "-q")
    found = json.loads(command("status", out, "--json").stdout)
    assert found["failures"] == []
    assert ran.returncode == 0, ran.stderr
    assert found["left"] == []
    assert found["counts"].keys() == {"done", "infeasible"}
    assert found["counts"]["infeasible"] == 6
    assert STUDIES["everything"]([]).question in (tmp_path / "everything/report/report.md").read_text()
