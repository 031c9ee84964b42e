"""The examples of CONTRIBUTING.md, applied to a copy of the project and run there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.frames import FIELDS, write_results

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r'^```python (?P<how>title|add)="(?P<path>[^"]+)"(?: (?P<where>after|before)="(?P<anchor>[^"]+)")?\n(?P<code>.*?)^```$', re.M | re.S)  # fmt: skip # noqa: E501


def sections() -> dict[str, str]:
    """Return the text below each heading of CONTRIBUTING.md."""
    parts = re.split(r"^## (.*)$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def apply(text: str, copy: Path) -> None:
    """Create the files and insert the lines that the code blocks of `text` name."""
    blocks = list(BLOCK.finditer(text))
    assert blocks, "the section has no example"
    for block in blocks:
        path = copy / block["path"]
        if block["how"] == "title":
            assert not path.exists(), f"{path.name} exists already"
            path.write_text(block["code"])
            continue
        lines = path.read_text().splitlines(keepends=True)
        matches = [number for number, line in enumerate(lines) if line.startswith(block["anchor"])]
        assert len(matches) == 1, f"{block['anchor']!r} matches {len(matches)} lines of {path}"
        lines.insert(matches[0] + (block["where"] == "after"), block["code"])
        path.write_text("".join(lines))


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that applies a section of CONTRIBUTING.md to a copy of the project, and returns the copy."""

    def changed(heading: str) -> Path:
        for room in ("analysis", "study", "trainables"):
            shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
        apply(sections()[heading], tmp_path)
        return tmp_path

    return changed


def run(copy: Path, *arguments: str) -> str:
    """Run Python in the copy and return its standard output."""
    environment = os.environ | {"PYTHONPATH": str(copy), "RAY_ADDRESS": ""}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


ONE_TRIAL = """
import torch
from trainables.measure.run import run
from trainables.step.context import RankSetup
from trainables.trial import Trial
trial = Trial({fields}, steps=2, warmup_steps=2, communication_steps=0)
rows = run(trial, RankSetup(rank=0, device=torch.device("cpu"))).tables["steps"]
print(sum(row["window"] == "plain" for row in rows))
"""


def test_the_example_model_trains(project: Callable[[str], Path]) -> None:
    code = ONE_TRIAL.format(fields="model='linear', parallel='none', batch_per_gpu=8")
    assert int(run(project("Add a model"), "-c", code)) >= 2


def test_the_example_strategy_trains_under_ddp(project: Callable[[str], Path], tmp_path: Path) -> None:
    store = f"import torch.distributed as dist\ndist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"  # noqa: E501
    code = store + ONE_TRIAL.format(fields="model='mlp', parallel='ddp_one_bucket', batch_per_gpu=8")
    assert int(run(project("Add a parallel strategy"), "-c", code)) >= 2


def test_the_example_study_is_planned(project: Callable[[str], Path]) -> None:
    copy = project("Add a study")
    plan = run(copy, "-m", "study.scaling", "plan", "accumulation", "--json", "--address", "local")
    assert plan.count('"status": "pending"') == 9


def test_the_example_table_is_part_of_the_report(project: Callable[[str], Path], tmp_path: Path) -> None:
    results = write_results(tmp_path / "results", [FIELDS], lambda fields: {"step_s": 0.1})
    copy = project("Add a table")
    run(copy, "-c", f"from analysis.report.report import write_report; write_report({str(results)!r})")
    heads = (results / "report" / "tables" / "repeats.csv").read_text().splitlines()[0].split(",")
    assert {"world_size", "n"} <= set(heads)
