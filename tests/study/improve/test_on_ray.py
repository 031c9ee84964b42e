"""A small search under Ray Tune on two CPU ranks, by the command."""

import json
from typing import Any

import pytest

from study.errors import DONE
from study.scaling import main
from study.store.store import Store

TINY = [
    "--model", "mlp", "--gpus", "2", "--batch-per-gpu", "4", "--steps", "4", "--keep-arithmetic", "--trials", "11",
    "--set", "warmup_steps=2", "--set", "communication_steps=2", "--set", "sweep_bytes=4096",
    "--set", "prefetch_batches=1", "--json",
]  # fmt: skip


def test_a_search_on_two_cpu_ranks_ends_and_resumes_as_finished(
    local_ray: str, results_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def improve() -> tuple[dict[str, Any], str]:
        status = main(["improve", *TINY, "--address", local_ray, "--out", results_folder])
        printed = capsys.readouterr()
        assert status == DONE, printed.err
        return json.loads(printed.out), printed.err

    card, _ = improve()
    assert card["form"] == "improve"
    assert not card["partial"]
    study = Store.at(results_folder).study()
    records = Store.at(results_folder).records()
    assert {record["status"] for record in records} == {"done"}
    assert study["improve"]["is_complete"]
    assert any(row["is_tried"] for row in study["improve"]["levers"])
    assert 5 <= study["improve"]["trials"] == len(records) <= 11
    blocks = {record["worker_group"] for record in records}
    assert len(blocks) >= 3, "the baseline alone, then two groups of a round"
    again, messages = improve()
    assert "round" not in messages
    assert again["lines"] == card["lines"]
