"""The gradient noise scale, on problems with a known true value."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import on_ranks
from trainables.step.noise_scale import NoiseScale, estimates
from trainables.trial import Trial

BATCH, STEPS, WIDTH = 8, 300, 40
NORM2, TRACE = 9.0, 40 * 4.0
"""|G|^2, and tr(Sigma) of `WIDTH` weights whose gradients have a standard deviation of 2"""

PAIR = Trial(world_size=2, batch_per_gpu=BATCH, noise_scale=True, epochs=1)
PARTS = Trial(accumulation_steps=2, batch_per_gpu=BATCH, parallel="none", noise_scale=True, epochs=1)


class Linear(nn.Module):
    """The loss sum(x w) has the gradient x, so that samples are gradients. Two parameters, one of them a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(WIDTH // 4, 2))
        self.vector = nn.Parameter(torch.zeros(WIDTH // 2))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples @ torch.cat([self.matrix.flatten(), self.vector])


def samples_of(step: int) -> torch.Tensor:
    """Return a global batch for two ranks: gradients with mean G, |G| = 3, and variance 4 in each of 40 directions."""
    generator = torch.Generator().manual_seed(step)
    mean = torch.full((WIDTH,), math.sqrt(NORM2 / WIDTH))
    return mean + 2 * torch.randn(2 * BATCH, WIDTH, generator=generator)


def over_ranks(rank: int, trial: Trial, scale: float | None, infinite_step: int | None) -> dict[str, Any]:
    model = DistributedDataParallel(Linear(), bucket_cap_mb=1e-5)  # one parameter per bucket, after they are rebuilt
    noise = NoiseScale(trial, model)
    noise.attach(model)
    for step in range(STEPS):
        samples = samples_of(step)[rank * BATCH : (rank + 1) * BATCH]
        if step == infinite_step:
            samples = samples * float("inf")
        (model(samples).mean() * (scale or 1.0)).backward()
        noise.finish_step(None if scale is None else torch.tensor(scale))
        model.zero_grad()
    state_before = noise.state_dict()
    return {
        "estimates": noise.read(),
        "estimates again": noise.read(),
        "state before": state_before,
        "state": noise.state_dict(),
    }


def by_accumulation(trial: Trial, steps: range, noise: NoiseScale | None = None) -> NoiseScale:
    model = Linear()
    noise = noise or NoiseScale(trial, model)
    noise.parameters = list(model.parameters())
    for step in steps:
        for part in samples_of(step).split(BATCH):
            (model(part).mean() / trial.accumulation_steps).backward()
            noise.observe_part()
        noise.finish_step()
        model.zero_grad()
    return noise


def all_cases(rank: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": over_ranks(rank, PAIR, None, None),
        "scaled": over_ranks(rank, PAIR, 1024.0, None),
        "one infinite step": over_ranks(rank, PAIR, None, 150),
    }


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return on_ranks(2, all_cases)


@pytest.fixture
def visit(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [by_case["plain"] for by_case in cases]


def test_two_ranks_estimate_the_known_noise(visit: list[dict[str, Any]]) -> None:
    """Over 100 steps, the error of tr(Sigma) of 40 directions is about 2 / sqrt(40 * 2 * 100) = 2 %, of |G|^2 10 %."""
    for result in visit:
        trace, norm2 = result["estimates"]
        assert trace == pytest.approx(TRACE, rel=0.1)
        assert norm2 == pytest.approx(NORM2, rel=0.35)


def test_parts_of_one_rank_give_the_estimates_of_two_ranks(visit: list[dict[str, Any]]) -> None:
    alone = by_accumulation(PARTS, range(STEPS)).read()
    assert alone == pytest.approx(visit[0]["estimates"], rel=1e-4)
    assert visit[0]["estimates"] == visit[1]["estimates"]


def test_reading_starts_anew_on_all_ranks(visit: list[dict[str, Any]]) -> None:
    for result in visit:
        assert result["estimates again"] == (None, None)
        assert result["state"]["sums"].tolist() == [0.0, 0.0, 0.0]
    assert not torch.equal(visit[0]["state before"]["sums"], visit[1]["state before"]["sums"])


def test_epochs_have_no_step_in_common() -> None:
    noise = by_accumulation(PARTS, range(100))
    noise.read()
    by_accumulation(PARTS, range(100, 200), noise)
    assert noise.read() == by_accumulation(PARTS, range(100, 200)).read()


def averaged(rank: int, hooked: bool, parallel: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(Linear(), bucket_cap_mb=1e-5)
    if hooked:
        NoiseScale(Trial(world_size=3, parallel=parallel, noise_scale=True, epochs=1), model).attach(model)
    for step in range(2):
        model.zero_grad()
        model(samples_of(step)[rank * 5 : (rank + 1) * 5]).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def averaged_both_ways(rank: int) -> list[list[torch.Tensor]]:
    return [averaged(rank, False, "ddp"), averaged(rank, True, "ddp"), averaged(rank, True, "ddp_fp16")]


def test_the_noise_hook_averages_bit_for_bit_like_ddp() -> None:
    for plain, hooked, rounded in on_ranks(3, averaged_both_ways):  # 1/3 has no exact floating-point representation
        for expected, mine, half in zip(plain, hooked, rounded, strict=True):
            assert torch.equal(mine, expected)
            assert 0 < (half - expected).norm() / expected.norm() < 2e-3


def test_loss_scaling_and_a_non_finite_step_do_not_change_the_estimates(cases: list[dict[str, Any]]) -> None:
    for by_case in cases:
        assert by_case["scaled"]["estimates"] == pytest.approx(by_case["plain"]["estimates"], rel=1e-4)
        trace, norm2 = by_case["one infinite step"]["estimates"]
        assert trace == pytest.approx(TRACE, rel=0.1)
        assert norm2 == pytest.approx(NORM2, rel=0.35)


def test_a_saved_state_continues_exactly() -> None:
    half = by_accumulation(PARTS, range(100))
    resumed = NoiseScale(PARTS, Linear())
    resumed.load_state_dict(half.state_dict())
    by_accumulation(PARTS, range(100, 200), resumed)
    assert resumed.read() == by_accumulation(PARTS, range(200)).read()


def test_there_are_no_estimates_before_the_first_step() -> None:
    assert NoiseScale(PARTS, Linear()).read() == (None, None)


def test_the_estimates_follow_the_paper() -> None:
    """|G|^2 = 5 and tr(Sigma) = 12 give expected squared norms of 5 + 12/4 = 8 and 5 + 12/6 = 7."""
    assert estimates(8.0, 7.0, 4, 6) == pytest.approx((12.0, 5.0))


@pytest.mark.parametrize(
    ("trial", "fix"),
    [
        (Trial(world_size=2, parallel="fsdp2"), "use parallel ddp, ddp_fp16, ddp_bf16, zero1"),
        (Trial(), "use accumulation_steps >= 2"),
    ],
)
def test_a_trial_with_one_batch_size_is_rejected(trial: Trial, fix: str) -> None:
    with pytest.raises(ValueError, match=f"^noise_scale .*{fix}"):
        NoiseScale(trial, Linear())


def test_the_small_batch_is_that_of_a_rank_or_a_part() -> None:
    both = NoiseScale(PAIR.but(accumulation_steps=4), Linear())
    assert (both.small_batch, both.large_batch) == (32, 64)
    parts = NoiseScale(PARTS.but(accumulation_steps=4), Linear())
    assert (parts.small_batch, parts.large_batch) == (8, 32)
