"""Workloads in every form, on real gloo ranks: own steps, dict batches, streams, loaders, clipping, schedules."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import wide_workloads
from tests.support.gloo import RankFailed, on_ranks
from tests.support.wide_workloads import FEATURES, SAMPLES
from trainables.batch import byte_size, map_tensors, sample_count, to_device
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.step.check import check
from trainables.step.context import RankOutput, RankSetup, build_context, rank_context
from trainables.step.flops import counted_flops
from trainables.step.step import training_step
from trainables.step.timing import no_mark
from trainables.train.train import train
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import Workload, WorkloadError, pair

FILE = Path(wide_workloads.__file__)
CPU = torch.device("cpu")
PAIR = Trial(world_size=2, batch_per_gpu=8, warmup_steps=2, steps=3, communication_steps=2, sweep_bytes=64)
FORMS = ("dicts", "stream", "own_loader", "generator")
STRATEGIES = ("ddp", "ddp_delayed", "zero1", "fsdp2")


def workload(name: str) -> str:
    return f"{FILE}:{name}"


def norms_and_weights(trial: Trial, rank: int, group: Any) -> dict[str, Any]:
    """Return the gradient norms before clipping of four steps, and the weights after them."""
    with rank_context(trial, RankSetup(rank, CPU, group)) as context:
        norms: list[float] = vars(sys.modules[load_user_workload(trial.workload).__module__])["NORMS"]
        norms.clear()
        model = context.strategy.wrap_model(context.workload.model, trial, group)
        step = training_step(context, model)
        batches = endless_batches(trial, context.workload, rank)
        for _ in range(4):
            step(next(batches), no_mark)
        full = [getattr(value, "full_tensor", lambda value=value: value)() for value in model.parameters()]
        return {"norms": list(norms), "weights": [value.detach().clone() for value in full]}


def visit_all(rank: int) -> dict[str, Any]:
    alone: Any = dist.new_group([0])
    clipped = PAIR.but(workload=workload("clipped"))
    found: dict[str, Any] = {name: norms_and_weights(clipped.but(parallel=name), rank, None) for name in STRATEGIES}
    for name in ("fp16", "fp16_master"):
        found[name] = norms_and_weights(clipped.but(precision=name), rank, None)
    found["zero1, fp16"] = norms_and_weights(clipped.but(parallel="zero1", precision="fp16"), rank, None)
    found["accumulated"] = norms_and_weights(clipped.but(batch_per_gpu=4, accumulation_steps=2), rank, None)
    if rank == 0:
        single = clipped.but(world_size=1, batch_per_gpu=16, parallel="none")
        found["alone"] = norms_and_weights(single, 0, alone)
    setup = RankSetup(rank, CPU)
    for name in FORMS:
        found[name] = run(PAIR.but(workload=workload(name)), setup)
    for name in ("zero1", "fsdp2"):
        found[f"dicts, {name}"] = run(PAIR.but(workload=workload("dicts"), parallel=name), setup)
    for name in ("dicts", "own_loader"):
        found[f"{name}, epochs"] = train(PAIR.but(workload=workload(name), epochs=2, communication_steps=10), setup)
    try:
        train(PAIR.but(workload=workload("stream"), epochs=1, communication_steps=10), setup)
    except WorkloadError as error:
        found["stream, epochs"] = str(error)
    unused = PAIR.but(workload=workload("unused_parameters"), communication_steps=0)
    found["unused"] = run(unused.but(find_unused_parameters=True), setup)
    return found


@pytest.fixture(scope="module")
def visit() -> list[dict[str, Any]]:
    return on_ranks(2, visit_all)


# --------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("name", [*STRATEGIES, "accumulated"])
def test_clipping_uses_the_norm_of_the_complete_gradient(visit: list[dict[str, Any]], name: str) -> None:
    expected = visit[0]["alone"]
    assert min(expected["norms"]) > wide_workloads.MAX_NORM
    for rank in visit:
        assert rank[name]["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        for mine, weight in zip(rank[name]["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine, weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["fp16", "fp16_master", "zero1, fp16"])
def test_gradients_are_unscaled_before_they_are_clipped(visit: list[dict[str, Any]], name: str) -> None:
    """Without unscaling, the norms would be 65,536 times as large."""
    expected = visit[0]["alone"]
    for rank in visit:
        assert rank[name]["norms"] == pytest.approx(expected["norms"], rel=0.02)
        for mine, weight in zip(rank[name]["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(mine.float(), weight, rtol=0.02, atol=2e-3)


# --------------------------------------------------------------------------------------------------- timed windows


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_measured_and_learns(visit: list[dict[str, Any]], name: str) -> None:
    for rank in visit:
        rows = rank[name].tables["steps"]
        assert [row["window"] for row in rows].count("plain") == 3
        assert rows[-1]["loss"] < rows[0]["loss"]
        [phases] = [row for row in rows if row["window"] == "phases"][-1:]
        assert phases["forward_s"] > 0 and phases["backward_s"] > 0
        assert "loss_s" not in phases, "the loss is part of the forward pass"
        parts = {"load_wait_s", "forward_s", "backward_s", "optimizer_s"}
        if name == "dicts":
            assert phases["after_backward_s"] > 0
            parts |= {"after_backward_s"}
        assert sum(phases[part] for part in parts) == pytest.approx(phases["step_s"], abs=1e-9)


@pytest.mark.parametrize("name", ["zero1", "fsdp2"])
def test_schedule_and_clipping_have_the_same_effect_under_every_strategy(
    visit: list[dict[str, Any]], name: str
) -> None:
    def losses(output: RankOutput) -> list[float]:
        return [row["loss"] for row in output.tables["steps"] if row["window"] in ("warmup", "plain", "phases")]

    for rank in visit:
        expected = losses(rank["dicts"])
        assert len(set(expected)) == 8
        assert losses(rank[f"dicts, {name}"]) == pytest.approx(expected, rel=1e-4)


def test_the_evidence_has_tokens_and_samples_if_the_workload_knows_them(visit: list[dict[str, Any]]) -> None:
    known = {name: visit[0][name].evidence for name in FORMS}
    assert known["dicts"]["tokens_per_sample"] == FEATURES
    assert [known[name]["dataset_samples"] for name in FORMS] == [SAMPLES, None, None, None]
    assert known["stream"]["tokens_per_sample"] is None


def test_unused_parameters_are_found_if_the_trial_asks_for_it(visit: list[dict[str, Any]]) -> None:
    assert visit[0]["unused"].tables["steps"]


def test_a_failure_by_unused_parameters_names_the_field() -> None:
    with pytest.raises(RankFailed, match="set find_unused_parameters=true"):
        on_ranks(1, run_unused)


def run_unused(rank: int) -> None:
    run(PAIR.but(workload=workload("unused_parameters"), world_size=1), RankSetup(rank, CPU))


# --------------------------------------------------------------------------------------------------------- epochs


@pytest.mark.parametrize("name", ["dicts", "own_loader"])
def test_every_form_with_a_length_trains_by_epochs(visit: list[dict[str, Any]], name: str) -> None:
    steps = SAMPLES // 16
    tables = visit[0][f"{name}, epochs"].tables
    assert [row["step"] for row in tables["epochs"]] == [steps, 2 * steps]
    assert [row["samples"] for row in tables["epochs"]] == [SAMPLES, 2 * SAMPLES]
    validated = [row["validation_loss"] for row in tables["epochs"]]
    assert (None not in validated) if name == "dicts" else validated == [None, None]
    assert tables["epochs"][1]["train_loss"] < tables["epochs"][0]["train_loss"]


def test_a_users_schedule_sets_the_learning_rate_of_every_step(visit: list[dict[str, Any]]) -> None:
    rates = [row["learning_rate"] for row in visit[0]["dicts, epochs"].tables["steps"]]
    assert rates == pytest.approx([0.02 * 0.5**step for step in range(len(rates))])


def test_a_stream_has_no_epochs(visit: list[dict[str, Any]]) -> None:
    assert "has no epochs" in visit[0]["stream, epochs"] and "loader that has a length" in visit[0]["stream, epochs"]


class Saved:
    """Checkpoints in memory; the training ends with an exception after the first."""

    def __init__(self, content: bytes | None = None, stop: bool = True):
        self.content, self.stop = content, stop

    def load(self) -> bytes | None:
        return self.content

    def save(self, content: bytes) -> None:
        self.content = content
        if self.stop:
            raise KeyboardInterrupt


def test_a_resumed_training_continues_the_schedule() -> None:
    trial = PAIR.but(workload=workload("dicts"), world_size=1, parallel="none", epochs=3, communication_steps=10)
    first = Saved()
    with pytest.raises(KeyboardInterrupt):
        train(trial, RankSetup(0, CPU, checkpoints=first, checkpoint_every_s=0.0))
    resumed = train(trial, RankSetup(0, CPU, checkpoints=Saved(first.content, stop=False)))
    complete = train(trial, RankSetup(0, CPU))
    assert resumed.tables["steps"] == complete.tables["steps"]


# ---------------------------------------------------------------------------------------------------------- batches


def test_a_batch_that_is_no_pair_is_reported_with_its_keys() -> None:
    with pytest.raises(WorkloadError) as error:
        pair({"input_ids": 1, "labels": 2})
    assert str(error.value).startswith(
        "a batch must be (inputs, targets); this one is a dict with keys input_ids, labels: give Workload.step"
    )
    with pytest.raises(WorkloadError, match="a tuple of 3"):
        pair((1, 2, 3))


class Batch(dict[str, Any]):
    """A batch with a type of its own, as of a tokenizer."""


def test_dict_batches_are_mapped_and_counted() -> None:
    batch = Batch(ids=torch.zeros(3, 2), more={"mask": torch.ones(3)}, name="text")
    doubled = map_tensors(lambda tensor: tensor * 2, batch)
    assert doubled["name"] == "text" and doubled["more"]["mask"].tolist() == [2, 2, 2]
    assert byte_size(batch) == 4 * (6 + 3) and sample_count(batch) == 3
    assert sample_count([torch.zeros(3), torch.zeros(4)]) is None
    assert to_device(batch, torch.device("meta"), False)["ids"].device.type == "meta"


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A batch whose fields cannot be assigned."""

    ids: torch.Tensor
    more: list[torch.Tensor]
    name: str = "text"


def test_batches_that_are_dataclasses_are_mapped_and_counted() -> None:
    batch = Record(torch.zeros(3, 2), [torch.ones(3)])
    doubled = map_tensors(lambda tensor: tensor * 2 + 1, batch)
    assert isinstance(doubled, Record) and doubled.name == "text"
    assert doubled.more[0].tolist() == [3, 3, 3] and batch.more[0].tolist() == [1, 1, 1]
    assert byte_size(batch) == 4 * (6 + 3) and sample_count(batch) == 3
    assert to_device(batch, torch.device("meta"), False).ids.device.type == "meta"


def batches_of(loader: Any, **fields: Any) -> Any:
    made = Workload(model=nn.Linear(1, 1), optimizer=wide_workloads.adamw, step=wide_workloads.loss_of, loader=loader)
    return endless_batches(Trial(**{"batch_per_gpu": 4} | fields), made, rank=0)


def test_a_loader_starts_again_and_loses_only_its_incomplete_last_batch() -> None:
    data = torch.arange(10).split(4)
    batches = batches_of(lambda trial, rank, world: data)
    assert [next(batches)[0].item() for _ in range(5)] == [0, 4, 0, 4, 0]


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (lambda *_: iter(torch.arange(4).split(4)), "cannot be repeated"),
        (lambda *_: [], "yields no batch of 4 samples"),
        (lambda *_: torch.arange(10).split(5), "batches of 5 samples, but the trial's have 4"),
    ],
)
def test_a_loader_that_cannot_be_used_is_reported(loader: Any, expected: str) -> None:
    batches = batches_of(loader)
    with pytest.raises(WorkloadError, match=expected):
        for _ in range(3):
            next(batches)


# ------------------------------------------------------------------------------------------------------------ FLOPs


def test_operations_are_counted_on_the_model_itself() -> None:
    context = build_context(Trial(workload=workload("dicts"), parallel="none", batch_per_gpu=8), RankSetup(0, CPU))
    batch = next(endless_batches(context.trial, context.workload, 0))
    multiplications = 8 * (FEATURES * 16 + 16)
    # two operations per multiplication, in the forward pass and for weights and inputs in the backward pass, of which
    # the first layer needs no gradient of its inputs
    expected = 2 * (3 * multiplications - 8 * FEATURES * 16)
    assert counted_flops(lambda: wide_workloads.loss_of(context.workload.model, batch)) == expected


# ------------------------------------------------------------------------------------------------------------ check

HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import Workload
DATA = TensorDataset(torch.zeros(64, 3), torch.zeros(64, 1))
def make(**parts):
    return Workload(**{"model": nn.Linear(3, 1), "dataset": DATA, "loss": nn.functional.mse_loss,
                       "optimizer": torch.optim.AdamW} | parts)
"""

BROKEN = {
    "make(loss=None)": "give either step, or loss",
    "make(dataset=None)": "give either dataset or loader",
    "make(dataset=iter([]))": "dataset must have __len__ and __getitem__, or be an IterableDataset",
    "make(model='resnet')": "model must be a torch.nn.Module, got str",
    "make(optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(1))]))": "optimizer must be a function, got AdamW",
    "make(dataset=[{'a': torch.zeros(3), 'b': torch.zeros(1)}] * 64)": "is a dict with keys a, b: give Workload.step",
    "make(loss=lambda outputs, targets: 1.0)": "must return a scalar tensor, got float",
    "make(loss=lambda outputs, targets: outputs - targets)": "got shape [8, 1]; average it",
    "make(loss=lambda outputs, targets: outputs.detach().mean())": "without gradient",
    "make(model=nn.ReLU())": "model has no parameters to train",
    "make(model=nn.Linear(3, 1).requires_grad_(False))": "model has no parameters to train",
    "make(loss=None, step=lambda model, batch: nn.Linear(3, 1)(batch[0]).sum())": "no parameter of model gets a grad",
    "make(model=nn.Linear(4, 1))": "fails in its first step, at ",
    "make(scheduler=lambda optimizer: 3)": "AttributeError",
    "make(loader=3, dataset=None)": "loader must be a function, got int",
    "unknown": "NameError: name 'unknown' is not defined",
}


@pytest.mark.parametrize("expression", BROKEN)
def test_a_workload_that_cannot_work_is_described_in_one_line(tmp_path: Path, expression: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{HEAD}\ndef build(trial):\n    return {expression}\n")
    line = check(Trial(workload=f"{path}:build", batch_per_gpu=8)) or ""
    assert BROKEN[expression] in line and str(path) in line and "\n" not in line


def test_a_schedule_of_the_trial_is_refused_if_the_workload_has_one() -> None:
    trial = PAIR.but(workload=workload("dicts"), epochs=1, decay="cosine", communication_steps=10)
    assert "its scheduler replaces decay of the trial; omit it" in (check(trial) or "")


@pytest.mark.parametrize("name", [*FORMS, "clipped"])
def test_a_workload_that_works_passes_the_check(name: str) -> None:
    trial = PAIR.but(workload=workload(name), batch_per_gpu=4)
    assert check(trial) is None
    assert check(trial.but(accumulation_steps=2, parallel="fsdp2")) is None


def test_parameters_without_gradient_are_named_before_the_grid_starts() -> None:
    trial = PAIR.but(workload=workload("unused_parameters"))
    line = check(trial) or ""
    assert "parameters unused.weight, unused.bias get no gradient" in line and "find_unused_parameters=true" in line
    assert check(trial.but(find_unused_parameters=True)) is None
    assert check(trial.but(parallel="fsdp2")) is None


@pytest.mark.parametrize("parts", ["collate=lambda samples: samples", "dataset=[lambda: 0] * 64"])
def test_a_lambda_that_loader_processes_would_need_is_reported(tmp_path: Path, parts: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"{HEAD}\ndef build(trial):\n    return make({parts})\n")
    trial = Trial(workload=f"{path}:build", batch_per_gpu=8, loader_workers=1)
    line = check(trial) or ""
    assert f"{parts.partition('=')[0]} cannot be sent to a loader process" in line and "loader_workers 0" in line
    with pytest.raises(WorkloadError, match="cannot be sent to a loader process"):
        endless_batches(trial, dataclasses.replace(build_context(trial, RankSetup(0, CPU)).workload), 0)


def test_a_field_that_only_the_loader_reads_counts_as_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    loader = "lambda trial, rank, world: [(torch.zeros(8, 3), torch.zeros(8, 1))] * (trial.image_size // 7)"
    path.write_text(f"{HEAD}\ndef build(trial):\n    return make(dataset=None, loader={loader})\n")
    context = build_context(Trial(workload=f"{path}:build", batch_per_gpu=8), RankSetup(0, CPU))
    assert context.recorded_trial is not None
    assert "image_size" in context.recorded_trial.unread_fields()
    next(endless_batches(context.trial, context.workload, 0))
    assert "image_size" not in context.recorded_trial.unread_fields()
