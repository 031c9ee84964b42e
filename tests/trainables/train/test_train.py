"""Training by epochs on real gloo ranks: curves independent of the division of the batch, validation, resuming."""

import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo import on_ranks
from trainables.step.context import RankOutput, RankSetup
from trainables.step.precision import fp32
from trainables.step.timing import Row
from trainables.train.checkpoint import CheckpointError
from trainables.train.train import train
from trainables.train.validation import evaluate
from trainables.trial import Trial
from trainables.user_workload import load_user_workload
from trainables.workload import HeldOutSet, WorkloadError

CPU = torch.device("cpu")
PAIR = Trial(
    model="mlp",
    world_size=2,
    batch_per_gpu=272,
    epochs=2,
    learning_rate=0.05,
    optimizer="nesterov",
    decay="cosine",
    lr_rule="linear",
    warmup="gradual",
    warmup_epochs=1,
    reference_batch=136,
    resident_data=True,
    deterministic=True,
)
ALONE = PAIR.but(world_size=1, batch_per_gpu=544)
PARTS = ALONE.but(batch_per_gpu=136, accumulation_steps=4, noise_scale=True, parallel="none")
NOISY = PAIR.but(noise_scale=True)
SHARDED = PAIR.but(parallel="zero1", optimizer="adamw", learning_rate=0.002, lr_rule="none", warmup="none")
STEPS = 19
"""per epoch of 10,000 samples: 18 of 544 and one of 208"""

RECIPE = Trial(
    model="mlp",
    parallel="none",
    batch_per_gpu=100,
    epochs=3,
    learning_rate=0.05,
    optimizer="nesterov",
    decay="cosine",
    label_smoothing=0.05,
    resident_data=True,
)
"""reaches `ENOUGH` on the shipped sample"""
ENOUGH = 0.82


class InMemory:
    """Checkpoints in memory."""

    def __init__(self, content: bytes | None = None):
        self.content = content
        self.saved: list[bytes] = []

    def load(self) -> bytes | None:
        return self.content

    def save(self, content: bytes) -> None:
        self.saved.append(content)


class Unused:
    """Checkpoints of ranks other than 0, which must not be called."""


# ------------------------------------------------------------------------------------- one visit of two gloo ranks


def train_all(rank: int, users: str) -> dict[str, Any]:
    """Trials of one and of two ranks, one after another in the same processes."""
    alone: Any = dist.new_group([0])
    checkpoints: Any = InMemory() if rank == 0 else Unused()
    reported: list[Row] = []
    results: dict[str, Any] = {
        "pair": train(
            PAIR,
            RankSetup(rank=rank, device=CPU, checkpoints=checkpoints, checkpoint_every_s=0, on_epoch=reported.append),
        )
    }
    results["reported epochs"] = reported
    if rank == 0:
        results["saved"] = checkpoints.saved
        checkpoints = InMemory(checkpoints.saved[0])
    results["pair resumed"] = train(
        PAIR, RankSetup(rank=rank, device=CPU, checkpoints=checkpoints, on_epoch=reported.append)
    )
    checkpoints = InMemory() if rank == 0 else Unused()
    results["sharded"] = train(SHARDED, RankSetup(rank=rank, device=CPU, checkpoints=checkpoints, checkpoint_every_s=0))
    checkpoints = InMemory(checkpoints.saved[0]) if rank == 0 else checkpoints
    results["sharded resumed"] = train(SHARDED, RankSetup(rank=rank, device=CPU, checkpoints=checkpoints))
    results["noisy"] = train(NOISY, RankSetup(rank=rank, device=CPU))
    results["users"] = train(users_trial(f"{users}:build", world_size=2), RankSetup(rank=rank, device=CPU))
    if rank == 0:
        results["alone"] = train(ALONE, RankSetup(rank=0, device=CPU, group=alone))
        results["users alone"] = train(
            users_trial(f"{users}:build", batch_per_gpu=8), RankSetup(rank=0, device=CPU, group=alone)
        )
    return results


USERS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import HeldOutSet, Workload

def numbers(count, seed):
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())

def build(trial, held_out=31, loss=nn.functional.cross_entropy, **more):
    torch.manual_seed(5)
    return Workload(
        model=nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7, momentum=None), nn.Linear(7, 2)),
        dataset=numbers(44, 0), loss=loss,
        validation=HeldOutSet(numbers(held_out, 1), nn.functional.cross_entropy) if held_out else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=trial.learning_rate), **more)

def no_validation(trial):
    return build(trial, held_out=0)

def diverging(trial):
    return build(trial, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * float("nan"))

def endless(trial):
    return build(trial, batch_indices=lambda rank: iter([[0]]))
"""


def users_trial(spec: str, **fields: Any) -> Trial:
    return Trial(workload=spec, batch_per_gpu=4, epochs=2, learning_rate=0.1).but(**fields)


@pytest.fixture(scope="module")
def users_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("users") / "users_sets.py"
    path.write_text(USERS)
    return str(path)


@pytest.fixture(scope="module")
def visit(users_file: str) -> list[dict[str, Any]]:
    return on_ranks(2, train_all, users_file, timeout_s=280)


def losses(trained: RankOutput) -> list[float]:
    return [row["loss"] for row in trained.tables["steps"]]


def without_times(rows: list[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]


# --------------------------------------------------------------------------------------------------- equal curves


def test_one_and_two_ranks_with_equal_global_batch_have_the_same_curve(visit: list[dict[str, Any]]) -> None:
    pair, alone = visit[0]["pair"], visit[0]["alone"]
    assert len(losses(pair)) == 2 * STEPS
    assert losses(pair)[:10] == pytest.approx(losses(alone)[:10], rel=1e-5)
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-3)
    assert losses(pair)[-1] < 0.6 * losses(pair)[0]
    for mine, other in zip(without_times(pair.tables["epochs"]), without_times(alone.tables["epochs"]), strict=True):
        assert mine.keys() == other.keys()
        known = {name: value for name, value in other.items() if value is not None}
        assert {name: value for name, value in mine.items() if value is not None} == pytest.approx(known, rel=3e-3)


def test_accumulated_batches_train_like_the_large_batch(visit: list[dict[str, Any]]) -> None:
    parts = train(PARTS, RankSetup(rank=0, device=CPU))
    alone = visit[0]["alone"]
    assert losses(parts)[:10] == pytest.approx(losses(alone)[:10], rel=1e-5)
    assert losses(parts) == pytest.approx(losses(alone), rel=2e-3)


def test_the_noise_scale_does_not_change_the_curve(visit: list[dict[str, Any]]) -> None:
    noisy = visit[0]["noisy"]
    assert losses(noisy) == losses(visit[0]["pair"])
    for row in noisy.tables["epochs"]:
        assert row["noise_trace"] > 0 and math.isfinite(row["noise_norm2"])
    assert {row["noise_trace"] for row in visit[0]["pair"].tables["epochs"]} == {None}


# ------------------------------------------------------------------------------------------------------- rows


def test_rows_contain_steps_samples_and_rates_of_all_ranks(visit: list[dict[str, Any]]) -> None:
    pair = visit[0]["pair"]
    assert [(row["epoch"], row["step"], row["samples"]) for row in pair.tables["epochs"]] == [
        (1, STEPS, 10_000),
        (2, 2 * STEPS, 20_000),
    ]
    assert [row["samples"] for row in pair.tables["steps"]] == [*[544] * 18, 208] * 2
    assert [row["epoch"] for row in pair.tables["steps"]] == [1 + number // STEPS for number in range(2 * STEPS)]
    assert [row["step"] for row in pair.tables["steps"]] == list(range(2 * STEPS))
    rates = [row["learning_rate"] for row in pair.tables["steps"]]
    assert rates[0] == 0.05 and max(rates) == rates[STEPS] == pytest.approx(0.2) and rates[-1] < 0.002
    assert [row["learning_rate"] for row in pair.tables["epochs"]] == rates[STEPS - 1 :: STEPS]
    for number, row in enumerate(pair.tables["epochs"]):
        steps = pair.tables["steps"][number * STEPS : (number + 1) * STEPS]
        assert row["train_loss"] == pytest.approx(sum(step["loss"] * step["samples"] for step in steps) / 10_000)
        assert 0 < row["train_top1"] < row["train_top5"] <= 1
        assert 0 < row["validation_top1"] < row["validation_top5"] <= 1
        assert row["non_finite_steps"] == 0 and row["validation_s"] > 0
    times = [row["train_s"] for row in pair.tables["epochs"]]
    assert 0 < times[0] < times[1] < pair.span[1] - pair.span[0]


def test_only_rank_0_has_rows_and_reports_each_epoch_once(visit: list[dict[str, Any]]) -> None:
    pair, resumed_pair = visit[0]["pair"].tables["epochs"], visit[0]["pair resumed"].tables["epochs"]
    assert visit[1]["pair"].tables["epochs"] == visit[1]["pair"].tables["steps"] == visit[1]["reported epochs"] == []
    assert visit[0]["reported epochs"] == pair + resumed_pair[1:]


# -------------------------------------------------------------------------------------------------- validation


def held_out_accuracy(trained: RankOutput) -> list[float]:
    return [row["validation_top1"] for row in trained.tables["epochs"]]


def test_validation_takes_each_sample_once(visit: list[dict[str, Any]]) -> None:
    """Validates 31 samples on two ranks, with a model whose running statistics differ between the ranks."""
    for row in visit[0]["users"].tables["epochs"]:
        assert (row["validation_top1"] * 31) == pytest.approx(round(row["validation_top1"] * 31), abs=1e-9)
        assert row["validation_top5"] is None and row["train_top5"] is None, "there are only two classes"
        assert row["validation_loss"] > 0
    alone = visit[0]["users alone"]
    assert (
        [row["samples"] for row in alone.tables["epochs"]]
        == [row["samples"] for row in visit[0]["users"].tables["epochs"]]
        == [44, 88]
    )


@pytest.mark.parametrize("samples", [1, 2, 3, 31, 64])
def test_sums_of_ranks_add_up_to_the_validation_of_one(users_file: str, samples: int) -> None:
    trial = users_trial(f"{users_file}:build")
    workload = load_user_workload(trial.workload)(trial)
    numbers: Any = load_user_workload(f"{users_file}:numbers")
    held_out = HeldOutSet(numbers(samples, 3), torch.nn.functional.cross_entropy)
    total = evaluate(trial, workload, held_out, fp32, CPU, 0)
    for ranks in (2, 3):
        shares = [evaluate(trial.but(world_size=ranks), workload, held_out, fp32, CPU, rank) for rank in range(ranks)]
        assert sum(share.samples for share in shares) == total.samples == samples
        assert sum(share.top1 or 0 for share in shares) == total.top1
        assert sum(share.loss for share in shares) == pytest.approx(total.loss, rel=1e-5)


def test_a_workload_without_held_out_samples_has_no_validation(users_file: str) -> None:
    trained = train(users_trial(f"{users_file}:no_validation", parallel="none"), RankSetup(rank=0, device=CPU))
    for row in trained.tables["epochs"]:
        assert {name for name, value in row.items() if value is None} == {
            "train_top5", "noise_trace", "noise_norm2",
            "validation_s", "validation_loss", "validation_top1", "validation_top5",
        }  # fmt: skip


def test_a_workload_with_endless_batches_is_rejected(users_file: str) -> None:
    trial = users_trial(f"{users_file}:endless", parallel="none")
    with pytest.raises(WorkloadError) as error:
        train(trial, RankSetup(rank=0, device=CPU))
    assert repr(trial.workload) in str(error.value)
    assert "endless" in str(error.value) and "Workload.batch_indices" in str(error.value)


def test_a_non_finite_loss_is_null_and_counted(users_file: str) -> None:
    trained = train(users_trial(f"{users_file}:diverging", parallel="none"), RankSetup(rank=0, device=CPU))
    assert {row["loss"] for row in trained.tables["steps"]} == {None}
    assert [(row["train_loss"], row["non_finite_steps"]) for row in trained.tables["epochs"]] == [
        (None, 11),
        (None, 11),
    ]


# ---------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("name", ["pair", "sharded"])
def test_a_resumed_training_equals_the_unbroken_one(visit: list[dict[str, Any]], name: str) -> None:
    unbroken, resumed = visit[0][name], visit[0][f"{name} resumed"]
    assert resumed.tables["steps"] == unbroken.tables["steps"]
    assert without_times(resumed.tables["epochs"]) == without_times(unbroken.tables["epochs"])
    assert resumed.tables["epochs"][0] == unbroken.tables["epochs"][0], "the first epoch was not trained again"
    assert resumed.tables["epochs"][1]["train_s"] > unbroken.tables["epochs"][0]["train_s"], "time continues"


def test_every_epoch_but_the_last_saves_a_checkpoint_without_pickle(visit: list[dict[str, Any]]) -> None:
    saved = visit[0]["saved"]
    checkpoints = [torch.load(io.BytesIO(content), weights_only=True) for content in saved]
    assert [checkpoint["progress"]["epoch"] for checkpoint in checkpoints] == [1]
    assert {checkpoint["trial_id"] for checkpoint in checkpoints} == {PAIR.trial_id}


def resumed(trial: Trial) -> RankOutput:
    checkpoints = InMemory()
    unbroken = train(trial, RankSetup(rank=0, device=CPU, checkpoints=checkpoints, checkpoint_every_s=0))
    again = train(trial, RankSetup(rank=0, device=CPU, checkpoints=InMemory(checkpoints.saved[0])))
    assert again.tables["steps"] == unbroken.tables["steps"]
    assert without_times(again.tables["epochs"]) == without_times(unbroken.tables["epochs"])
    return unbroken


def test_one_rank_resumes_with_augmentation_accumulation_and_loss_scaling() -> None:
    fields = {"augment": "device", "precision": "fp16", "accumulation_steps": 2, "batch_per_gpu": 1000}
    trained = resumed(RECIPE.but(**fields, epochs=2, noise_scale=True))
    assert all(row["noise_trace"] > 0 for row in trained.tables["epochs"])


def test_checkpoints_respect_the_minimum_interval() -> None:
    checkpoints = InMemory()
    trial = RECIPE.but(epochs=2, batch_per_gpu=5000)
    train(trial, RankSetup(rank=0, device=CPU, checkpoints=checkpoints, checkpoint_every_s=1e6))
    assert checkpoints.saved == []


def test_damaged_checkpoints_and_those_of_another_trial_are_rejected(visit: list[dict[str, Any]]) -> None:
    other = RECIPE.but(epochs=2)
    content = visit[0]["saved"][0]
    for checkpoint, trial_ids in ((content, (PAIR.trial_id, other.trial_id)), (content[:1000], (other.trial_id,))):
        with pytest.raises(CheckpointError) as error:
            train(other, RankSetup(rank=0, device=CPU, checkpoints=InMemory(checkpoint)))
        message = str(error.value)
        assert all(trial_id in message for trial_id in trial_ids)
        assert "remove it" in message and "\n" not in message


# -------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp16_master", "fp16_pure"])
def test_every_precision_reaches_the_expected_accuracy(precision: str) -> None:
    trained = train(RECIPE.but(precision=precision), RankSetup(rank=0, device=CPU))
    assert held_out_accuracy(trained)[-1] >= ENOUGH
    assert trained.tables["epochs"][-1]["samples"] == 30_000


def test_training_ends_after_the_epoch_that_reaches_the_target() -> None:
    target = 0.7
    checkpoints = InMemory()
    trial = RECIPE.but(epochs=50, decay="constant", target_accuracy=target)
    trained = train(trial, RankSetup(rank=0, device=CPU, checkpoints=checkpoints, checkpoint_every_s=0))
    reached = [accuracy >= target for accuracy in held_out_accuracy(trained)]
    assert 1 <= len(reached) < 50
    assert reached == [*[False] * (len(reached) - 1), True]
    assert len(checkpoints.saved) == len(reached) - 1


def test_uncorrected_momentum_differs_after_the_rate_changes() -> None:
    trial = RECIPE.but(epochs=3, decay="step", batch_per_gpu=1000)
    corrected, plain = (
        losses(train(trial.but(momentum_correction=value), RankSetup(rank=0, device=CPU))) for value in (True, False)
    )
    assert corrected[:11] == plain[:11], "the loss of a step belongs to the weights before it"
    assert corrected[11:] != plain[11:]
