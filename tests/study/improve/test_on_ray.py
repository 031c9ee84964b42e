"""A small search under Ray Tune on two CPU ranks, by the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from study.store.store import Store

ROOT = Path(__file__).resolve().parents[3]
TINY = [
    "--model", "mlp", "--gpus", "2", "--batch-per-gpu", "4", "--steps", "4", "--keep-arithmetic", "--trials", "15",
    "--set", "warmup_steps=2", "--set", "account_steps=2", "--set", "sweep_bytes=4096",
    "--set", "prefetch_batches=1", "--address", "local", "--json",
]  # fmt: skip


@pytest.mark.xdist_group("own ray")
@pytest.mark.timeout(600)
def test_a_search_on_two_cpu_ranks_ends_and_resumes_as_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "study.scaling", "improve", *TINY, "--out", str(tmp_path / "out")]
    first, second = (
        subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": ""}
        )
        for _ in range(2)
    )
    assert first.returncode == 0, first.stderr[-3_000:]
    card = json.loads(first.stdout)
    assert card["form"] == "improve"
    assert not card["partial"]
    study = Store.at(str(tmp_path / "out")).study()
    records = Store.at(str(tmp_path / "out")).records()
    assert {record["status"] for record in records} == {"done"}
    assert study["improve"]["is_complete"]
    assert any(row["is_tried"] for row in study["improve"]["levers"])
    assert 5 <= study["improve"]["trials"] == len(records) <= 15
    blocks = {record["worker_group"] for record in records}
    assert len(blocks) >= 3, "the baseline alone, then two groups of a round"
    assert second.returncode == 0
    assert "round" not in second.stderr
    assert json.loads(second.stdout)["lines"] == card["lines"]
