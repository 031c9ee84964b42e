"""The gradient noise scale, on problems whose true value is known."""

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
"""|G|^2, and tr(Sigma) of `WIDTH` weights whose gradients vary by 2"""

PAIR = Trial(world_size=2, batch_per_gpu=BATCH, noise_scale=True, epochs=1)
PARTS = Trial(accumulation_steps=2, batch_per_gpu=BATCH, parallel="none", noise_scale=True, epochs=1)


class Linear(nn.Module):
    """A loss of sum(x w) has the gradient x, whatever the weights: samples are gradients. Two parameters, one a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(WIDTH // 4, 2))
        self.vector = nn.Parameter(torch.zeros(WIDTH // 2))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples @ torch.cat([self.matrix.flatten(), self.vector])


def samples_of(step: int) -> torch.Tensor:
    """A global batch of two halves: gradients with mean G, |G| = 3, and a variance of 4 in each of 40 directions."""
    generator = torch.Generator().manual_seed(step)
    mean = torch.full((WIDTH,), math.sqrt(NORM2 / WIDTH))
    return mean + 2 * torch.randn(2 * BATCH, WIDTH, generator=generator)


def over_ranks(rank: int, trial: Trial, scale: float | None, spoiled_at: int | None) -> dict[str, Any]:
    model = DistributedDataParallel(Linear(), bucket_cap_mb=1e-5)  # buckets of a parameter each, once they are rebuilt
    noise = NoiseScale(trial, model)
    noise.attach(model)
    for step in range(STEPS):
        own = samples_of(step)[rank * BATCH : (rank + 1) * BATCH]
        if step == spoiled_at:
            own = own * float("inf")
        (model(own).mean() * (scale or 1.0)).backward()
        noise.finish_step(None if scale is None else torch.tensor(scale))
        model.zero_grad()
    own_state = noise.state_dict()
    found = noise.read()
    return {
        "found": found,
        "again": noise.read(),
        "before": own_state,
        "state": noise.state_dict(),
    }


def by_accumulation(trial: Trial, steps: range, noise: NoiseScale | None = None) -> NoiseScale:
    model = Linear()
    kept = noise or NoiseScale(trial, model)
    kept.parameters = list(model.parameters())
    for step in steps:
        for part in samples_of(step).split(BATCH):
            (model(part).mean() / trial.accumulation_steps).backward()
            kept.observe_part()
        kept.finish_step()
        model.zero_grad()
    return kept


def all_cases(rank: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": over_ranks(rank, PAIR, None, None),
        "scaled": over_ranks(rank, PAIR, 1024.0, None),
        "spoiled": over_ranks(rank, PAIR, None, 150),
    }


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return on_ranks(2, all_cases)


@pytest.fixture
def visit(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [of_rank["plain"] for of_rank in cases]


def test_two_ranks_recover_the_noise_of_known_gradients(visit: list[dict[str, Any]]) -> None:
    """Over 100 steps, tr(Sigma) of 40 directions is known to about 2 / sqrt(40 * 2 * 100), 2 %, and |G|^2 to some 10 %."""
    for found in visit:
        trace, norm2 = found["found"]
        assert trace == pytest.approx(TRACE, rel=0.1)
        assert norm2 == pytest.approx(NORM2, rel=0.35)


def test_parts_of_one_rank_give_what_ranks_give(visit: list[dict[str, Any]]) -> None:
    alone = by_accumulation(PARTS, range(STEPS)).read()
    assert alone == pytest.approx(visit[0]["found"], rel=1e-4)
    assert visit[0]["found"] == visit[1]["found"]


def test_reading_changes_nothing_and_makes_the_state_the_same_on_every_rank(visit: list[dict[str, Any]]) -> None:
    for found in visit:
        assert found["again"] == found["found"]
        assert torch.equal(found["state"]["smoothed"], visit[0]["state"]["smoothed"])
    assert not torch.equal(visit[0]["before"]["smoothed"], visit[1]["before"]["smoothed"])


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


def test_the_hook_averages_bit_for_bit_as_ddp_and_rounds_only_where_the_strategy_does() -> None:
    for plain, hooked, rounded in on_ranks(3, averaged_both_ways):  # a third is no number of the machine's
        for expected, mine, half in zip(plain, hooked, rounded, strict=True):
            assert torch.equal(mine, expected)
            assert 0 < (half - expected).norm() / expected.norm() < 2e-3


def test_a_scaled_loss_and_a_step_that_is_not_finite_change_no_reading(cases: list[dict[str, Any]]) -> None:
    for of_rank in cases:
        assert of_rank["scaled"]["found"] == pytest.approx(of_rank["plain"]["found"], rel=1e-4)
        trace, norm2 = of_rank["spoiled"]["found"]
        assert trace == pytest.approx(TRACE, rel=0.1)
        assert norm2 == pytest.approx(NORM2, rel=0.35)


def test_a_saved_state_goes_on_where_it_ended() -> None:
    half = by_accumulation(PARTS, range(100))
    resumed = NoiseScale(PARTS, Linear())
    resumed.load_state_dict(half.state_dict())
    by_accumulation(PARTS, range(100, 200), resumed)
    assert resumed.read() == by_accumulation(PARTS, range(200)).read()


def test_before_any_step_nothing_is_known() -> None:
    assert NoiseScale(PARTS, Linear()).read() == (None, None)


def test_the_estimates_are_the_papers() -> None:
    """|G|^2 = 5 and tr(Sigma) = 12 make expected squared norms of 5 + 12/4 = 8 and 5 + 12/6 = 7."""
    assert estimates(8.0, 7.0, 4, 6) == pytest.approx((12.0, 5.0))


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (
            Trial(world_size=2, parallel="fsdp2"),
            (
                "noise_scale with parallel 'fsdp2': no hook sees a rank's own gradient there; use parallel ddp, ddp_fp16, "
                "ddp_bf16, zero1"
            ),
        ),
        (
            Trial(),
            (
                "noise_scale compares gradients of two batch sizes; one rank with accumulation_steps 1 has one: use "
                "accumulation_steps 2 or more, or 2 ranks"
            ),
        ),
    ],
)
def test_a_trial_with_one_batch_size_is_refused(trial: Trial, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        NoiseScale(trial, Linear())
    assert str(caught.value) == message


def test_the_small_batch_is_a_ranks_own_or_a_part() -> None:
    both = NoiseScale(PAIR.but(accumulation_steps=4), Linear())
    assert (both.small_batch, both.large_batch) == (32, 64)
    parts = NoiseScale(PARTS.but(accumulation_steps=4), Linear())
    assert (parts.small_batch, parts.large_batch) == (8, 32)
