"""The comparison of loss curves: what makes its cases comparable, on real ranks, and its goal."""

import pytest
import torch

from benchmarks.truth.losses import SMALL, Outcome, batches_of, comparison, initialise, train_seed, trial_of
from tests.support.gloo import on_ranks
from trainables.step.context import RankSetup, rank_context


def curves(rank: int, case: str, seeds: tuple[int, ...]) -> torch.Tensor:
    """Train these seeds one after the other, as the benchmark does. Return their losses: [seeds, steps]."""
    trial = trial_of(case, SMALL | {"device": "cpu", "small": True})
    found = []
    with rank_context(trial, RankSetup(rank, torch.device("cpu"))) as context:
        model = context.strategy.wrap_model(context.workload.model, trial, None)
        for seed in seeds:
            initialise(context, model, seed)
            found.append(train_seed(context, model, batches_of(context, seed, steps=20))[0])
    return torch.tensor(found)


def test_two_ranks_follow_the_loss_curve_of_one_within_rounding() -> None:
    [alone] = on_ranks(1, curves, "1:fp32", (0, 1))
    first, second = on_ranks(2, curves, "2:fp32", (0, 1))
    assert torch.equal(first, second), "both ranks report the mean of both"
    assert first == pytest.approx(alone, abs=1e-5)
    assert (alone[:, 0] - alone[:, -1]).min() > 0.1, "they learn, by much more than rounding"
    assert (alone[0] - alone[1]).abs().max() > 0.01, "seeds differ"


def test_a_seed_keeps_nothing_of_the_one_before_it() -> None:
    """Neither weights, master weights nor the state of the optimizer."""
    before, _, after = on_ranks(2, curves, "2:bf16_master+fused_loss", (0, 1, 0))[0]
    assert torch.equal(before, after)


def test_a_difference_of_losses_meets_its_goal_only_if_its_interval_does() -> None:
    reference = Outcome({seed: [6.0] * 10 + [5.0] * 10 for seed in range(3)})

    def compared(*differences: float) -> dict[str, object]:
        other = Outcome({seed: [6.0] * 10 + [5.0 + by] * 10 for seed, by in enumerate(differences)})
        return comparison("other - reference", other, reference)[0]

    assert compared(0.01, 0.02, 0.03)["value"] == pytest.approx(0.02)
    assert compared(0.01, 0.02, 0.03)["interval"] == pytest.approx((-0.00484, 0.04484), abs=1e-5)
    assert compared(0.01, 0.02, 0.03)["holds"] is True, "1 % of 5 nats are 0.05"
    assert compared(-0.06, 0.0, 0.06)["holds"] is False, "a mean of zero that is uncertain"
    assert compared(0.07, 0.07, 0.07)["holds"] is False
    assert compared(0.0)["holds"] is None, "one seed has no interval"
