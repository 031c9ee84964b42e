"""Correct predictions, crops of small images, residual initialisation, and rollback of training steps."""

import copy

import pytest
import torch
from torch import nn

from trainables.build import build_workload
from trainables.data.images.augment import padded_crop_and_flip
from trainables.models.optimizers import zero_momentum
from trainables.step.correct import count_correct
from trainables.step.precision import Updater, fp16_master, fp32
from trainables.train.trainer import rollback
from trainables.trial import Trial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_counts_match_topk_and_argmax(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(500, 10).to(dtype), torch.randint(10, (500,))
    top1, top5 = count_correct(outputs, targets).tolist()
    assert top1 == (outputs.argmax(1) == targets).sum()
    if dtype == torch.float32:  # topk breaks ties arbitrarily
        assert top5 == (outputs.topk(5).indices == targets[:, None]).any(1).sum()


def test_equal_scores_count_for_the_lowest_class_only() -> None:
    targets = torch.arange(8)
    assert count_correct(torch.zeros(8, 8), targets).tolist() == [1, 5]


def test_nan_scores_are_never_correct() -> None:
    assert count_correct(torch.full((6, 6), float("nan")), torch.arange(6)).tolist() == [0, 0]


@pytest.mark.parametrize(("edge", "padding"), [(28, 4), (32, 4)])
def test_a_small_image_is_shifted_within_its_padding_and_mirrored(edge: int, padding: int) -> None:
    torch.manual_seed(0)
    image = torch.randint(1, 256, (1, 1, edge, edge), dtype=torch.uint8)
    padded = nn.functional.pad(image, [padding] * 4)[0, 0]
    possible = {}
    for down in range(2 * padding + 1):
        for right in range(2 * padding + 1):
            cut = padded[down : down + edge, right : right + edge]
            possible[cut.contiguous().numpy().tobytes()] = (down, right, False)
            possible[cut.flip(1).contiguous().numpy().tobytes()] = (down, right, True)
    crops = padded_crop_and_flip(image.expand(3000, 1, edge, edge))
    drawn = [possible[crop[0].contiguous().numpy().tobytes()] for crop in crops]
    assert len(set(drawn)) == 2 * (2 * padding + 1) ** 2, "every position occurs, mirrored and not"
    assert 0.45 < sum(mirrored for *_, mirrored in drawn) / len(drawn) < 0.55


def test_zero_gamma_makes_every_block_start_as_the_identity() -> None:
    for name, blocks in (("resnet18_small", 8), ("resnet50", 16)):
        trial = Trial(model=name, parallel="none", zero_gamma=True)
        model = build_workload(trial, torch.device("cpu")).model
        zero = [
            key for key, value in model.named_parameters() if "bn" in key and key.endswith("weight") and not value.any()
        ]
        assert len(zero) == blocks
        assert {key.split(".")[-2] for key in zero} == {"bn2" if name == "resnet18_small" else "bn3"}


@pytest.mark.parametrize("precision", [fp32, fp16_master], ids=["fp32", "fp16_master"])
@pytest.mark.parametrize("trained_before", [0, 2])
def test_rollback_undoes_training_steps(precision, trained_before: int) -> None:  # type: ignore[no-untyped-def]
    def build() -> tuple[nn.Module, Updater]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        updater = Updater(
            precision, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), model.parameters(), "cpu"
        )
        zero_momentum(updater.local_optimizer)
        return model, updater

    def train(model: nn.Module, updater: Updater, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            updater.scaled(model(inputs).square().mean()).backward()
            updater.update()

    model, updater = build()
    train(model, updater, 0, trained_before)
    addresses = [value.data_ptr() for value in model.state_dict().values()]
    before = copy.deepcopy((model.state_dict(), updater.local_optimizer.state_dict()["state"]))
    with rollback(model, updater, None):
        train(model, updater, 50, 3)
        assert not torch.equal(model[0].weight, before[0]["0.weight"])  # type: ignore[index]
    after = (model.state_dict(), updater.local_optimizer.state_dict()["state"])
    assert [value.data_ptr() for value in model.state_dict().values()] == addresses
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    train(model, updater, trained_before, 2)
    plain, plain_updater = build()
    train(plain, plain_updater, 0, trained_before + 2)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
