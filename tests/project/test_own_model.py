"""The ports of docs/workload.md, each trained on two gloo ranks."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gloo import on_ranks
from trainables.measure.run import run
from trainables.step.check import check
from trainables.step.context import RankSetup
from trainables.trial import Trial

PAGE = Path(__file__).parent.parent.parent / "docs/workload.md"
BLOCK = re.compile(r'^```python title="(?P<name>[^"]+)"\n(?P<code>.*?)^```$', re.M | re.S)
PORTS = ("torchvision_port", "hf_port", "lightning_port", "timm_port")
PACKAGES = ("transformers", "lightning", "timm")
CPU = torch.device("cpu")


def trial_of(folder: Path, name: str) -> Trial:
    quick: dict[str, Any] = {
        "warmup_steps": 2,
        "steps": 3,
        "communication_steps": 0,
        "world_size": 2,
        "batch_per_gpu": 4,
    }
    return Trial(workload=f"{folder / name}.py:build", **quick)


def train_all(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in PORTS:
        trial = trial_of(folder, name)
        found[name] = check(trial), run(trial, RankSetup(rank, CPU))
    return found


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed")
    folder = tmp_path_factory.mktemp("ports")
    for block in BLOCK.finditer(PAGE.read_text()):
        (folder / block["name"]).write_text(block["code"])
    return on_ranks(2, train_all, folder)


def test_the_page_has_exactly_these_ports() -> None:
    assert [Path(block["name"]).stem for block in BLOCK.finditer(PAGE.read_text())] == list(PORTS)


@pytest.mark.parametrize("name", PORTS)
def test_a_port_is_measured_on_two_ranks(visit: list[dict[str, Any]], name: str) -> None:
    for rank in visit:
        problem, output = rank[name]
        assert problem is None
        rows = output.tables["steps"]
        assert [row["window"] for row in rows].count("plain") == 3
        assert all(row["loss"] is not None for row in rows)
