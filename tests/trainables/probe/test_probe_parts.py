"""The parts of the probe that need no script: cycles, batches, traces, and a session in this process."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from trainables.probe.batches import samples, samples_of_inputs, tokens
from trainables.probe.counter import MOST_CALLS, period
from trainables.probe.flops import OperationCounter, traced_operations
from trainables.probe.job import ProbeJob, ScriptJob
from trainables.probe.loop import steps
from trainables.probe.rows import label_evaluations, usual
from trainables.probe.session import Session, probe_session
from trainables.probe.spans import batch_size_of

SHORT = ProbeJob(warmup_steps=6, plain_steps=5, phase_steps=4, issue_steps=3, trace_steps=2)


@pytest.mark.parametrize(
    ("calls", "optimizers", "expected"),
    [
        ("A", 1, 1),
        ("DG", 2, None),
        ("DGDG", 2, 2),
        ("DDGDDG", 2, 3),
        ("DDDDDGDDDDDG", 2, 6),
        ("AAAA", 2, None),
        ("A" * MOST_CALLS, 2, 1),
        (range(2 * MOST_CALLS), 2 * MOST_CALLS, None),
        ([*range(2 * MOST_CALLS)] * 2, 2 * MOST_CALLS, 2 * MOST_CALLS),
        (range(4 * MOST_CALLS), 2 * MOST_CALLS, 1),
    ],
)
def test_the_cycle_of_several_optimizers_is_recognised(
    calls: Sequence[Hashable], optimizers: int, expected: int | None
) -> None:
    assert period(calls, optimizers) == expected


@given(st.lists(st.sampled_from("ABC"), min_size=1, max_size=6), st.integers(2, 4))
def test_a_recognised_cycle_repeats_the_calls(cycle: list[str], repeats: int) -> None:
    calls = cycle * repeats
    found = period(calls, len(set(cycle)))
    assert found is not None
    assert found <= len(cycle)
    assert calls == (calls[:found] * len(calls))[: len(calls)]


NUMBERS: Any = range(10)
X, Y = torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64)


class Graphs:
    """Seven graphs in one object whose tensors have a row per node."""

    num_graphs = 7

    @property
    def batch_size(self) -> int:
        raise RuntimeError("of a single graph only")


@dataclass
class Item:
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, 5),
        ((X, Y), 5),
        ({"pixels": X, "label": Y, "name": ["a"] * 5}, 5),
        ([{"image": X[0]}, {"image": X[0]}], 2),
        (([X[0], X[1]], [{"boxes": X}, {"boxes": X}]), 2),
        (([X, X[:, :, :4]], Y), 5),
        ([[X, X]], 5),
        ([X[0], X[0]], 3),
        (([X[0], X[0]], [{"boxes": X[0]}, {"boxes": X[0]}]), 2),
        (pack_sequence([torch.zeros(4), torch.zeros(2)]), 2),
        ((X, (Y, {"weights": Y})), 5),
        (Graphs(), 7),
        ((Graphs(), 0.5), 7),
        ((Graphs(), Y), 5),
        (Item(X, Y), 5),
        (None, None),
        (torch.tensor(1.0), None),
        ("text", None),
    ],
)
def test_the_samples_of_a_batch_are_counted(batch: Any, expected: int | None) -> None:
    assert samples(batch) == expected


BATCH = {"pixels": X, "label": Y}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([X], 5),
        ([X, Y], 5),
        ([BATCH], 5),
        ([BATCH, {"mask": Y}], 5),
        ([(X, Y)], 5),
        ([[X[0], X[1]]], 2),
        ([[X[0], X[1]], [{"boxes": X}, {"boxes": X}]], 2),
        ([[{"image": X[0]}, {"image": X[0]}]], 2),
        ([Graphs()], 7),
        ([], None),
    ],
)
def test_the_samples_of_a_call_are_counted(arguments: list[Any], expected: int | None) -> None:
    assert samples_of_inputs(arguments) == expected


def test_a_loader_of_batches_without_tensors_states_their_size() -> None:
    assert batch_size_of(iter(DataLoader(NUMBERS, batch_size=4, collate_fn=str))) == 4
    assert batch_size_of(iter(DataLoader(NUMBERS, batch_size=None))) is None


def test_tokens_are_the_elements_of_an_integer_matrix() -> None:
    ids = torch.zeros(4, 16, dtype=torch.int64)
    assert tokens(([ids], {"attention_mask": ids.bool(), "labels": ids})) == 64
    assert tokens(([X], {})) is None
    assert tokens(((Item(X, ids),), {})) == 64


@pytest.mark.parametrize(
    ("values", "expected"), [([16, 16, 16, 4], 16), ([600, 640, 500, 640], 595), ([None, 8], 8), ([None], None)]
)
def test_a_size_that_varies_is_a_mean(values: list[int | None], expected: int | None) -> None:
    """The last batch of an epoch is smaller; tokens differ in each step if batches are padded to their longest text."""
    assert usual(values) == expected


def test_an_evaluation_is_no_part_of_a_window() -> None:
    rows = [{"window": "plain", "step": number, "step_s": seconds} for number, seconds in enumerate((1.0, 9.0, 2.0))]
    labelled = label_evaluations(rows, {1})
    assert [(row["window"], row["window_s"]) for row in labelled] == [
        ("plain", 3.0),
        ("evaluation", None),
        ("plain", 3.0),
    ]


def test_a_job_travels_as_json() -> None:
    job = ScriptJob("train.py", "log", ("--a", "1"), {"A": "b"}, probe=SHORT)
    assert ScriptJob.from_json(job.to_json()) == job


def test_outside_a_study_marked_steps_are_the_loader() -> None:
    assert list(steps([1, 2])) == [1, 2]


# ---------------------------------------------------------------------------------------------- train functions


def train(model: nn.Module, batches: int) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(batches):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return batches


def result_of(batches: int) -> Session:
    with probe_session(SHORT, rank=0) as session:
        train(nn.Linear(4, 4), batches)
    return session


def test_a_train_function_ends_after_the_last_window_and_leaves_torch_as_it_was() -> None:
    before = (nn.Module.__call__, nn.Module.eval, torch.autograd._engine_run_backward, torch.amp.GradScaler.step)
    output = result_of(10_000).output
    assert output is not None
    assert output.failure is None
    assert output.evidence["steps_run"] == SHORT.needed_steps
    assert output.evidence["samples_per_step"] == 3
    assert output.evidence["step_flops"] == 2 * 2 * 3 * 4 * 4
    assert before == (
        nn.Module.__call__,
        nn.Module.eval,
        torch.autograd._engine_run_backward,
        torch.amp.GradScaler.step,
    )
    model = nn.Linear(4, 4)
    assert train(model, 3) == 3
    assert "_compiled_call_impl" not in vars(model)


def test_the_host_time_of_a_step_is_that_of_its_parts() -> None:
    output = result_of(10_000).output
    assert output is not None
    issue = [row for row in output.tables["steps"] if row["window"] == "issue"]
    assert len(issue) == SHORT.issue_steps
    parts = ("forward_launch_s", "backward_launch_s", "optimizer_launch_s")
    for row in issue:
        assert row["step_launch_s"] == pytest.approx(sum(row[part] for part in parts))
        assert 0 < row["step_launch_s"] <= row["step_s"]


def train_with_closure(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).sum()
        loss.backward()
        return loss

    while True:
        optimizer.step(closure)


def test_the_passes_inside_an_optimizer_call_are_not_the_optimizer() -> None:
    with probe_session(SHORT, rank=0) as session:
        train_with_closure(nn.Linear(4, 4))
    assert session.output is not None
    phases = [row for row in session.output.tables["steps"] if row["window"] == "phases"]
    assert len(phases) == SHORT.phase_steps
    for row in phases:
        assert min(row["forward_s"], row["backward_s"], row["optimizer_s"]) > 0
        parts = ("forward_s", "loss_s", "backward_s", "optimizer_s", "other_s")
        assert sum(row.get(part, 0.0) for part in parts) == pytest.approx(row["step_s"])


def test_a_train_function_that_ends_early_says_how_many_steps_are_missing() -> None:
    output = result_of(7).output
    assert output is not None
    assert output.failure is not None
    assert (output.failure.kind, output.failure.steps_run) == ("early", 7)
    assert len(output.tables["steps"]) == 7


# ------------------------------------------------------------------------------------------------ traces of GPUs


def event(name: str, category: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "args": arguments}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2)),
            torch.randn(2, 3, 16, 16),
        ),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
    ],
    ids=["linear", "convolution", "attention"],
)
def test_the_operations_of_a_trace_are_those_that_are_counted(
    model: nn.Module, inputs: torch.Tensor, tmp_path: Path
) -> None:
    counter = OperationCounter().start()
    model(inputs).sum().backward()
    counted = counter.stop()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(inputs).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert counted
    assert traced_operations(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == counted


def test_operations_in_a_cuda_graph_are_unknown() -> None:
    product = event("aten::mm", "cpu_op", 0.0, 1.0, **{"Input Dims": [[2, 3], [3, 4]], "Concrete Inputs": ["", ""]})
    assert traced_operations([product]) == 2 * 2 * 3 * 4
    assert traced_operations([product, event("cudaGraphLaunch", "cuda_runtime", 1.0, 1.0)]) is None


def test_operations_of_a_trace_without_shapes_are_unknown(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(2, 3) @ torch.ones(3, 4)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    assert traced_operations(events) is None
