"""Unmodified training scripts on two gloo ranks: what the probe measures of them, and whether it is true."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainables.probe.runs import SHORT, median, rows, run_on
from trainables.measure.collectives import boundaries, read_trace
from trainables.probe.job import ScriptOutput

DELAY_S = 0.1


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def accumulating(logs: Path) -> list[ScriptOutput]:
    """A loop with accumulation and evaluation on rank 0, whose rank 1 is late in each step."""
    return run_on(2, "accumulate.py", "--data", "x", "--slow-rank", "1", "--delay", str(DELAY_S), logs=logs)


def test_all_windows_of_all_ranks_are_complete(accumulating: list[ScriptOutput]) -> None:
    for rank, output in enumerate(accumulating):
        assert output.failure is None
        assert output.evidence["steps_run"] == output.evidence["steps_needed"] == SHORT.needed_steps
        assert [row["step"] for row in output.tables["steps"]] == list(range(SHORT.needed_steps))
        assert {row["rank"] for table in output.tables.values() for row in table} == {rank}
        assert len(rows(output, "warmup")) == SHORT.warmup_steps
        assert sum(row["step_s"] for row in rows(output, "plain")) == pytest.approx(
            rows(output, "plain")[0]["window_s"]
        )


def test_accumulated_batches_are_one_step(accumulating: list[ScriptOutput]) -> None:
    for output in accumulating:
        assert output.evidence["micro_batches"] == 2
        assert output.evidence["samples_per_step"] == 2 * 4
        assert output.evidence["tokens_per_step"] == 2 * 4 * 16
        assert {row["samples"] for row in output.tables["steps"]} == {8}


def test_operations_are_those_of_the_matrix_products(accumulating: list[ScriptOutput]) -> None:
    tokens, products = 2 * 4 * 16, 128 * 256 + 256 * 64
    for output in accumulating:  # forward, and backward for weights and inputs; the embedding has no product
        assert output.evidence["step_flops"] == 3 * 2 * tokens * products


def test_steps_with_an_evaluation_on_any_rank_belong_to_no_measure(accumulating: list[ScriptOutput]) -> None:
    evaluated = {step for step in range(SHORT.warmup_steps, SHORT.needed_steps) if step % 8 == 7}
    first, second = accumulating
    assert evaluated <= set(first.evidence["evaluation_steps"])
    assert second.evidence["evaluation_steps"] == []
    for output in accumulating:
        assert {row["step"] for row in rows(output, "evaluation")} == evaluated
        assert max(row["step_s"] for row in rows(output, "plain")) < 0.5


def test_the_parts_of_a_step_add_up_to_it(accumulating: list[ScriptOutput]) -> None:
    parts = ("load_wait_s", "forward_s", "loss_s", "backward_s", "reduce_s", "optimizer_s", "other_s")
    for output in accumulating:
        for row in rows(output, "phases"):
            assert sum(row.get(part) or 0.0 for part in parts) == pytest.approx(row["step_s"])
            assert row["forward_s"] > 0
            assert row["host_to_device_s"] if row.get("host_to_device_s") else row["host_to_device_bytes"] is None
        assert output.evidence["nulls"]["load_wait_s"] == "no torch DataLoader was used"


@pytest.mark.parametrize("window", ["phases", "communication"])
def test_a_delay_on_one_rank_is_the_wait_of_the_other(accumulating: list[ScriptOutput], window: str) -> None:
    """Without a profiler in the phases window, and from the trace."""
    first, second = (
        [row["end_s"] - row["ready_s"] for row in rows(output, window, "buckets")] for output in accumulating
    )
    assert len(first) == len(second) >= 2
    waits = [one - min(one, two) for one, two in zip(first, second, strict=True)]
    assert DELAY_S / 2 < median(waits) < 2 * DELAY_S
    assert median([row["other_s"] for row in rows(accumulating[1], "phases")]) >= DELAY_S


def test_the_last_gradient_is_ready_within_the_backward_pass(accumulating: list[ScriptOutput]) -> None:
    for output in accumulating:
        stamps = [(row["last_gradient_s"], row["step_s"]) for row in rows(output, "phases")]
        assert all(0 < last_s < step_s for last_s, step_s in stamps)
        reductions = rows(output, "phases", "buckets")
        assert {row["step"] for row in reductions} == {row["step"] for row in rows(output, "phases")}
        assert [row["ready_s"] for row in reductions] == [last_s for last_s, _ in stamps]
        assert {row["bytes"] for row in reductions} == {output.evidence["gradient_bytes"]}


def test_collectives_match_across_ranks(accumulating: list[ScriptOutput]) -> None:
    keys = ("step", "operation", "bytes", "collective")
    first, second = (
        [tuple(row[key] for key in keys) for row in output.tables["collectives"]] for output in accumulating
    )
    assert sorted(first) == sorted(second)
    gradients = 4 * (64 * 128 + 128 * 256 + 256 + 256 * 64 + 64)
    for step in {row["step"] for row in accumulating[0].tables["buckets"]}:
        assert sum(row["bytes"] for row in accumulating[0].tables["buckets"] if row["step"] == step) == gradients


def test_a_gan_has_one_step_per_cycle_of_its_optimizers(logs: Path) -> None:
    for output in run_on(2, "gan.py", logs=logs):
        assert output.failure is None
        assert output.evidence["optimizer_calls_per_step"] == 3
        assert output.evidence["optimizers"] == ["Adam", "Adam"]
        assert (output.evidence["samples_per_step"], output.evidence["micro_batches"]) == (2 * 6, 2)
        assert all(row["backward_s"] > 0 and row["load_wait_s"] > 0 for row in rows(output, "phases"))


def test_fsdp2_has_collectives_but_no_buckets(logs: Path) -> None:
    """Sharded parameters have no operation that accumulates their gradient, so the phases window shows none either."""
    for output in run_on(2, "fsdp2.py", logs=logs):
        assert output.failure is None
        assert output.tables["buckets"] == []
        assert {row["operation"] for row in output.tables["collectives"]} >= {"all_gather"}
        assert all(row["end_s"] > row["start_s"] for row in output.tables["collectives"])
        assert all(0 <= row["hidden_s"] <= row["end_s"] - row["start_s"] for row in output.tables["collectives"])
        for row in rows(output, "communication"):
            assert 0 <= row["exposed_collectives_s"] <= row["collectives_s"] and row["collectives_s"] > 0
        assert output.evidence["samples_per_step"] == 4


def test_each_traced_step_has_its_own_part_of_the_trace(logs: Path) -> None:
    """The trace starts in the step before the window, which is not one of its steps."""
    probe = replace(SHORT, trace_steps=3, keep_trace=True)
    for output in run_on(2, "fsdp2.py", str(DELAY_S), logs=logs, probe=probe):
        assert output.trace is not None
        times_s = np.array(boundaries(read_trace(output.trace))) / 1e6
        steps_s = [row["step_s"] for row in rows(output, "communication")]
        assert np.diff(times_s) == pytest.approx(steps_s, abs=DELAY_S / 2), "neighbours differ by DELAY_S or more"


def test_a_script_has_its_own_modules_arguments_and_loader_processes(logs: Path) -> None:
    for output in run_on(2, "own_modules/epochs.py", "--flag", "a b", logs=logs):
        assert output.failure is None, Path(output.failure.log).read_text()
        assert output.evidence["samples_per_step"] == 5
        assert output.evidence["modules"] == ["DistributedDataParallel", "CrossEntropyLoss"]
        steps_per_epoch = 80 // 2 // 5
        after_epochs = {step for step in range(SHORT.needed_steps) if step and step % steps_per_epoch == 0}
        assert set(output.evidence["evaluation_steps"]) == after_epochs
        assert {row["step"] for row in rows(output, "evaluation")} == {
            step for step in after_epochs if step >= SHORT.warmup_steps
        }


def test_ranks_share_a_new_temporary_folder_and_what_a_script_leaves_is_removed(logs: Path) -> None:
    for _ in range(2):  # the second needs the names of the first
        for output in run_on(2, "leftovers.py", logs=logs):
            assert output.failure is None, Path(output.failure.log).read_text()
        assert not list(Path("/dev/shm").glob("scaling-study-test-*"))


def test_a_module_runs_as_after_torchrun_m(logs: Path) -> None:
    [output] = run_on(1, "as_module.train", "--flag", "a b", logs=logs)
    assert output.failure is None, next(logs.glob("as_module*")).read_text()
    assert output.evidence["samples_per_step"] == 7


def test_a_loop_with_marked_steps_ends_by_itself_and_its_slow_loader_is_seen(logs: Path) -> None:
    [output] = run_on(1, "stream.py", logs=logs)
    assert output.failure is None
    assert output.evidence["entry"] == "loop"
    assert output.evidence["steps_run"] == SHORT.needed_steps
    assert output.evidence["samples_per_step"] == 4
    phases = rows(output, "phases")
    assert all(row["load_wait_s"] >= 4 * 0.005 for row in phases)
    assert median([row["load_wait_s"] / row["step_s"] for row in phases]) > 0.9
    assert "the loop has ended" in next(logs.glob("stream*")).read_text()


@pytest.mark.parametrize("arguments", [[], ["--parts", "2"], ["--scale"]], ids=["plain", "accumulated", "scaled"])
def test_losses_are_those_that_the_script_computes(arguments: list[str], logs: Path) -> None:
    """Only in the phases window, which has instruments anyway; a gradient scaler does not change them."""
    for rank, output in enumerate(run_on(2, "losses.py", *arguments, logs=logs)):
        log = (logs / f"losses-{'-'.join(arguments)}-rank{rank}.log").read_text()
        expected = [float(line.split()[1]) for line in log.splitlines() if line.startswith("loss ")]
        steps = [row["step"] for row in rows(output, "phases")]
        assert output.evidence["losses"] == pytest.approx([expected[step] for step in steps])
        assert len(set(output.evidence["losses"])) == SHORT.phase_steps


def test_optimizers_that_hooks_call_within_the_backward_pass_end_one_step_with_it(logs: Path) -> None:
    """One optimizer per parameter, of which there are more than calls until the counter gives up to find a cycle."""
    parameters = 30
    for output in run_on(2, "fused_updates.py", logs=logs):
        assert output.failure is None
        assert output.evidence["steps_run"] == SHORT.needed_steps
        assert output.evidence["optimizer_calls_per_step"] == 1
        assert output.evidence["samples_per_step"] == 6
        assert output.evidence["step_flops"] == (3 * 15 - 1) * 2 * 6 * 32 * 32  # none for the gradient of the inputs
        for row in rows(output, "phases"):
            assert row["forward_s"] > 0
            assert row["backward_s"] > 0
            assert row.get("optimizer_s") is None
        assert "optimizer_s" in output.evidence["nulls"]
        assert len(output.tables["collectives"]) == parameters * SHORT.trace_steps
