"""Loops that hide the parts of a step from a simple view: wrappers of optimizers, and modules that contain the loop."""

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from trainables.probe.counter import DEEPSPEED_ENGINE
from trainables.probe.job import ProbeJob, ScriptOutput
from trainables.probe.session import probe_session

SHORT = ProbeJob(warmup_steps=6, plain_steps=4, phase_steps=4, trace_steps=0)
PARTS = ("forward_s", "loss_s", "backward_s", "optimizer_s", "other_s")


def measured(step: Callable[[], Any]) -> ScriptOutput:
    with probe_session(SHORT, rank=0) as session:
        for _ in range(200):
            step()
    assert session.output is not None and session.output.failure is None
    return session.output


def phases(output: ScriptOutput) -> list[dict[str, Any]]:
    return [row for row in output.tables["steps"] if row["window"] == "phases"]


class SharpnessAware(torch.optim.Optimizer):
    """An optimizer around another one, whose own `step` is never called."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("not called")


def test_a_wrapper_whose_step_is_never_called_is_no_optimizer_of_the_cycle() -> None:
    model = nn.Linear(4, 4)
    optimizer = SharpnessAware(model.parameters())

    def step() -> None:
        for _ in range(2):
            model(torch.ones(3, 4)).square().mean().backward()
        optimizer.base.step()

    output = measured(step)
    assert output.evidence["optimizer_calls_per_step"] == 1
    assert output.evidence["micro_batches"] == 2
    assert all(row["forward_s"] > 0 and row["backward_s"] > 0 for row in phases(output))


def test_modules_that_see_the_same_samples_do_not_count_them_more_than_once() -> None:
    """Two critics learn twice per step, an actor once; an encoder reads tokens for a head on all of them."""
    critics, actor = [nn.Linear(4, 1), nn.Linear(4, 1)], nn.Linear(4, 4)
    encoder, head = nn.Embedding(10, 4), nn.Linear(4, 10)
    modules = nn.ModuleList([*critics, actor, encoder, head])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(2):  # micro-batches
            states = encoder(torch.ones(6, 5, dtype=torch.int64))
            loss = head(states.flatten(0, 1)).sum()
            for _ in range(2):
                loss = loss + sum(critic(torch.ones(6, 4)).sum() for critic in critics)
            (loss + actor(torch.ones(6, 4)).sum()).backward()
        optimizer.step()

    evidence = measured(step).evidence
    assert (evidence["samples_per_step"], evidence["micro_batches"], evidence["tokens_per_step"]) == (12, 2, 60)


ENGINE = """
class DeepSpeedEngine:
    def __init__(self, *optimizers):
        self.optimizer = optimizers[0]
        self.optimizers = optimizers

    def _take_model_step(self):
        for optimizer in self.optimizers:
            optimizer.step()
"""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that counts as DeepSpeed's."""
    module = ModuleType(DEEPSPEED_ENGINE)
    exec(ENGINE, vars(module))  # noqa: S102
    monkeypatch.setitem(sys.modules, DEEPSPEED_ENGINE, module)
    return module.DeepSpeedEngine


@pytest.mark.usefixtures("engine")
def test_deepspeed_that_is_only_imported_does_not_hide_the_steps() -> None:
    """accelerate and transformers import it if it is installed."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    assert measured(step).evidence["optimizers"] == ["SGD"]


def test_the_steps_of_an_engine_of_deepspeed_are_counted(engine: Any) -> None:
    model = nn.Linear(4, 4)
    trained = engine(*(torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()))

    def step() -> None:
        model(torch.ones(3, 4)).square().mean().backward()
        trained._take_model_step()

    output = measured(step)
    assert output.evidence["optimizers"] == ["DeepSpeedEngine"]
    assert output.evidence["samples_per_step"] == 3


@pytest.mark.parametrize("part", ["accuracy", "frozen layer"])
def test_an_evaluation_is_seen_although_each_step_looks_like_one(part: str) -> None:
    """torchvision computes the accuracy of each step in inference mode; some loops freeze the statistics of a layer."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = itertools.count(1)

    def step() -> None:
        model.train()
        if part == "frozen layer":
            model[0].eval()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            loss.item()
        if next(steps) % 5 == 0:
            model.eval()

    evidence = measured(step).evidence
    assert evidence["evaluation_steps"] == [5, 10, 15]
    assert "evaluation" not in evidence["nulls"]


class ManualOptimization(nn.Module):
    """A module whose `forward` trains, as a LightningModule with manual optimization inside DDP does."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 8), nn.Linear(8, 1)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.discriminator, self.generator)]

    def forward(self, noise: torch.Tensor) -> None:
        fake = self.generator(noise)
        for optimizer, inputs in zip(self.optimizers, (fake.detach(), fake), strict=True):
            self.discriminator(inputs).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_module_that_contains_the_loop_is_no_forward_pass(layers: int) -> None:
    inner = ManualOptimization()
    outer: nn.Module = inner
    for _ in range(layers - 1):
        outer = nn.Sequential(outer)
    output = measured(lambda: outer(torch.ones(3, 4)))
    assert output.evidence["optimizer_calls_per_step"] == 2
    assert sorted(output.evidence["modules"]) == ["Linear", "Linear"]
    for row in phases(output):
        assert all((row.get(part) or 0) >= 0 for part in PARTS), "no part is counted twice"
        assert row["forward_s"] > 0 and row["backward_s"] > 0 and row["optimizer_s"] > 0
        assert sum(row.get(part) or 0 for part in PARTS) == pytest.approx(row["step_s"], rel=1e-6)


def test_a_step_is_a_backward_pass_with_updates_and_the_optimizers_after_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fused, rest = ([torch.optim.SGD([parameter], lr=0.1) for parameter in layer.parameters()] for layer in model)
    for parameter, optimizer in zip(model[0].parameters(), fused, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def step() -> None:
        model(torch.ones(3, 4)).square().mean().backward()
        for optimizer in rest:
            optimizer.step()

    output = measured(step)
    assert output.evidence["optimizer_calls_per_step"] == 3
    assert output.evidence["samples_per_step"] == 3
    for row in phases(output):
        assert row["backward_s"] > 0 and row["optimizer_s"] > 0
        assert sum(row.get(part) or 0 for part in PARTS) == pytest.approx(row["step_s"], rel=1e-6)


def test_no_backward_pass_is_watched_in_the_plain_window_unless_its_hooks_update_weights() -> None:
    original = torch.autograd._engine_run_backward
    entries: list[Any] = []
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        entries.append(torch.autograd._engine_run_backward)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    output = measured(step)
    assert sum(row["window"] == "plain" for row in output.tables["steps"]) == SHORT.plain_steps
    first = entries.index(original)
    assert entries[first : first + SHORT.plain_steps] == [original] * SHORT.plain_steps
    instrumented = [entry is not original for entry in entries]
    assert instrumented[0] and any(instrumented[first:]), "windows before and after the plain one have instruments"
    assert torch.autograd._engine_run_backward is original
