"""Scripts for one GPU on two gloo ranks with --add-ddp: their ranks train one model, and are measured as with DDP."""

import re
from pathlib import Path

import pytest

from tests.trainables.probe.runs import SHORT, rows, run_on

WEIGHT_BYTES = 4 * (16 * 64 + 64 + 64 + 1)
"""of the script's model"""


def printed(logs: Path, form: str, name: str) -> list[list[str]]:
    """Return a number that the script prints after each step, by rank."""
    return [re.findall(rf"{name} (\S+)", (logs / f"single-{form}-rank{rank}.log").read_text()) for rank in range(2)]


@pytest.mark.parametrize("form", ["plain", "compiled", "accumulated", "methods", "unused", "gan"])
def test_the_ranks_of_a_script_for_one_gpu_train_one_model(form: str, tmp_path: Path) -> None:
    """Their data and first weights differ. Without DDP so do their weights after each step."""
    for output in run_on(2, "single.py", form, logs=tmp_path, add_ddp=True):
        assert output.failure is None
        assert output.evidence["group_size"] == 2
        assert output.evidence["samples_per_step"] == (16 if form == "accumulated" else 8)
        assert len(rows(output, "plain")) == SHORT.plain_steps
        of_critic = 8 if form == "gan" else 0
        unused = 4 * 65 + 4 * 6 if form == "unused" else 0  # with DDP's list of which of the 6 parameters are used
        sent = sum(row["bytes"] for row in rows(output, "communication", "buckets")) / SHORT.trace_steps
        passes = 2 if form == "accumulated" else 1
        assert sent == passes * (WEIGHT_BYTES + unused) + of_critic
    first, second = printed(tmp_path, form, "weight")
    assert first == second
    assert len(set(first)) > SHORT.needed_steps / 2, "the model learns"
    of_first, of_second = printed(tmp_path, form, "critic")
    assert (of_first == of_second) is (form == "gan"), "a module that no step uses is not in DDP"


def test_a_script_with_a_single_rank_stays_as_it_is(tmp_path: Path) -> None:
    [output] = run_on(1, "single.py", "plain", logs=tmp_path, add_ddp=True)
    assert output.failure is None
    assert output.evidence["group_size"] == 1
    assert output.tables["collectives"] == []


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("functions", "--add-ddp: 1 parameters have gradients, but are in no module that the loop calls"),
        ("group", "--add-ddp: the script has a process group of its own; leave the option out (single.py:"),
    ],
)
def test_a_script_that_cannot_be_made_data_parallel_says_why(form: str, reason: str, tmp_path: Path) -> None:
    for output in run_on(2, "single.py", form, logs=tmp_path, add_ddp=True):
        assert output.failure is not None
        assert output.failure.kind == "alone"
        assert output.failure.line.startswith(reason)
