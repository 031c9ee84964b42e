"""Optimizers, compared with their papers' formulas, computed number by number in float64."""

import copy
import math
from collections.abc import Callable, Iterable
from itertools import islice

import pytest
import torch
from torch import nn

from tests.support.gloo import on_ranks
from tests.trainables.step.test_parallel import trained
from trainables.data.loader import endless_batches
from trainables.models.optimizers import TRUST_COEFFICIENT, correct_momentum, make_optimizer, set_learning_rate
from trainables.registry import OPTIMIZERS
from trainables.step.context import RankSetup, rank_context
from trainables.step.parallel import fsdp2
from trainables.step.precision import Updater, fp16, fp16_master
from trainables.step.step import training_step
from trainables.step.timing import no_mark
from trainables.trial import Trial

STEPS = 4
RATES = (0.5, 0.5, 0.25, 1.0)
TRIAL = Trial(learning_rate=RATES[0], momentum=0.9, weight_decay=0.01)
Numbers = list[float]


def norm(values: Numbers) -> float:
    return math.sqrt(sum(value * value for value in values))


def sgd_reference(
    weights: Numbers, gradients: list[Numbers], decay: float, trust: bool, nesterov: bool = False
) -> Numbers:
    memory = [0.0] * len(weights)
    for rate, gradient in zip(RATES, gradients, strict=True):
        moves = []
        for i, weight in enumerate(weights):
            decayed = gradient[i] + decay * weight
            memory[i] = 0.9 * memory[i] + decayed
            moves.append(decayed + 0.9 * memory[i] if nesterov else memory[i])
        weights = [weight - rate * move for weight, move in zip(weights, moves, strict=True)]
    return weights


def nesterov_reference(weights: Numbers, gradients: list[Numbers], decay: float, trust: bool) -> Numbers:
    return sgd_reference(weights, gradients, decay, trust, nesterov=True)


def lars_reference(weights: Numbers, gradients: list[Numbers], decay: float, trust: bool) -> Numbers:
    """Algorithm 1, with momentum as in SGD here."""
    memory = [0.0] * len(weights)
    for rate, gradient in zip(RATES, gradients, strict=True):
        local = 1.0
        if trust and norm(weights) > 0 and norm(gradient) > 0:
            local = TRUST_COEFFICIENT * norm(weights) / (norm(gradient) + decay * norm(weights))
        for i, weight in enumerate(weights):
            memory[i] = 0.9 * memory[i] + local * (gradient[i] + decay * weight)
        weights = [weight - rate * move for weight, move in zip(weights, memory, strict=True)]
    return weights


def adam_direction(gradients: list[Numbers], i: int, epsilon: float) -> float:
    """Return Adam's update of one weight after these gradients, from the definition as weighted sums."""
    t = len(gradients)
    mean = sum(0.1 * 0.9 ** (t - 1 - s) * gradient[i] for s, gradient in enumerate(gradients)) / (1 - 0.9**t)
    square = sum(0.001 * 0.999 ** (t - 1 - s) * gradient[i] ** 2 for s, gradient in enumerate(gradients)) / (
        1 - 0.999**t
    )
    return mean / (math.sqrt(square) + epsilon)


def lamb_reference(weights: Numbers, gradients: list[Numbers], decay: float, trust: bool) -> Numbers:
    for t, rate in enumerate(RATES, start=1):
        moves = [adam_direction(gradients[:t], i, 1e-6) + decay * weight for i, weight in enumerate(weights)]
        ratio = norm(weights) / norm(moves) if trust and norm(weights) > 0 else 1.0
        weights = [weight - rate * ratio * move for weight, move in zip(weights, moves, strict=True)]
    return weights


def adamw_reference(weights: Numbers, gradients: list[Numbers], decay: float, trust: bool) -> Numbers:
    for t, rate in enumerate(RATES, start=1):
        weights = [
            weight * (1 - rate * decay) - rate * adam_direction(gradients[:t], i, 1e-8)
            for i, weight in enumerate(weights)
        ]
    return weights


REFERENCES: dict[str, Callable[..., Numbers]] = {
    "sgd": sgd_reference,
    "nesterov": nesterov_reference,
    "lars": lars_reference,
    "lamb": lamb_reference,
    "adamw": adamw_reference,
}


def problem() -> tuple[list[nn.Parameter], list[list[torch.Tensor]]]:
    """Return a matrix, a vector and a vector of zeros, and their gradients in every step."""
    generator = torch.Generator().manual_seed(3)
    first = [torch.randn(3, 2, generator=generator), torch.randn(4, generator=generator), torch.zeros(3)]
    gradients = [[torch.randn(value.shape, generator=generator) for value in first] for _ in range(STEPS)]
    return [nn.Parameter(value) for value in first], gradients


def updated(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[list[torch.Tensor]]
) -> list[Numbers]:
    for rate, step_gradients in zip(RATES, gradients, strict=True):
        set_learning_rate(optimizer, rate)
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in parameters]


def expected_weights(name: str, decay_vectors: bool) -> list[Numbers]:
    parameters, gradients = problem()
    weights = []
    for i, parameter in enumerate(parameters):
        decayed = decay_vectors or parameter.ndim > 1
        parameter_gradients = [step[i].double().flatten().tolist() for step in gradients]
        start = parameter.detach().double().flatten().tolist()
        weights.append(REFERENCES[name](start, parameter_gradients, 0.01 if decayed else 0.0, decayed))
    return weights


@pytest.mark.parametrize("decay_vectors", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_computes_the_formula_of_its_paper(name: str, decay_vectors: bool) -> None:
    parameters, gradients = problem()
    optimizer = make_optimizer(TRIAL.but(optimizer=name, decay_norm_and_bias=decay_vectors))(parameters)
    found = updated(optimizer, parameters, gradients)
    for mine, value in zip(found, expected_weights(name, decay_vectors), strict=True):
        assert mine == pytest.approx(value, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_tensor_learning_rate_is_overwritten_in_place(name: str) -> None:
    """A captured step reads the rate from the memory that was captured."""
    parameters, gradients = problem()
    optimizer = make_optimizer(TRIAL.but(optimizer=name, execution="graph", device="cuda", epochs=1))(parameters)
    [rate] = {id(group["lr"]): group["lr"] for group in optimizer.param_groups}.values()
    found = updated(optimizer, parameters, gradients)
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == RATES[-1]
    for mine, value in zip(found, expected_weights(name, True), strict=True):
        assert mine == pytest.approx(value, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_optimizer_state_continues_exactly(name: str) -> None:
    make = make_optimizer(TRIAL.but(optimizer=name, decay_norm_and_bias=False))
    parameters, gradients = problem()
    optimizer = make(parameters)
    updated(optimizer, parameters, gradients)
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = make(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert updated(other, again, gradients) == updated(optimizer, parameters, gradients)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_non_finite_step_changes_nothing_with_loss_scaling(name: str) -> None:
    def weights(infinite_step: int | None) -> list[Numbers]:
        parameters, gradients = problem()
        make = make_optimizer(TRIAL.but(optimizer=name))
        updater = Updater(fp16, make, parameters, "cpu")
        steps = [[gradient.clone() for gradient in step] for step in gradients]
        if infinite_step is not None:
            steps.insert(infinite_step, [torch.full_like(gradient, float("inf")) for gradient in gradients[0]])
        for step in steps:
            scale = updater.scaled(torch.ones(()))
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient * scale
            updater.update()
        return [parameter.detach().flatten().tolist() for parameter in parameters]

    plain = weights(None)
    for infinite_step in (0, 2):
        for mine, value in zip(weights(infinite_step), plain, strict=True):
            assert mine == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_are_updated_in_fp32(name: str) -> None:
    parameters, gradients = problem()
    halves = [nn.Parameter(parameter.detach().half()) for parameter in parameters]
    updater = Updater(fp16_master, make_optimizer(TRIAL.but(optimizer=name)), halves, "cpu")
    scale = updater.scaled(torch.ones(()))
    for parameter, gradient in zip(halves, gradients[0], strict=True):
        parameter.grad = (gradient * scale / 1024).half()
    updater.update()
    assert [master.dtype for master in updater.masters] == [torch.float32] * 3
    for half, master in zip(halves, updater.masters, strict=True):
        assert torch.equal(half, master.half())
    assert not torch.equal(updater.masters[0], updater.masters[0].half().float()), "not representable in fp16"


@pytest.mark.parametrize("name", ["sgd", "nesterov", "lars"])
def test_uncorrected_momentum_is_form_10_of_goyal(name: str) -> None:
    """v = m v + rate g; w = w - v, regardless of earlier rates."""
    parameters, gradients = problem()
    optimizer = make_optimizer(TRIAL.but(optimizer=name, weight_decay=0))(parameters[1:2])
    memory, weights = [0.0] * 4, parameters[1].detach().tolist()
    old = RATES[0]
    for rate, step_gradients in zip(RATES, gradients, strict=True):
        gradient = step_gradients[1].tolist()
        local = TRUST_COEFFICIENT * norm(weights) / norm(gradient) if name == "lars" else 1.0
        memory = [0.9 * v + rate * local * g for v, g in zip(memory, gradient, strict=True)]
        moves = [rate * g + 0.9 * v for g, v in zip(gradient, memory, strict=True)]
        weights = [w - v for w, v in zip(weights, moves if name == "nesterov" else memory, strict=True)]
        correct_momentum(optimizer, old, rate)
        set_learning_rate(optimizer, rate)
        parameters[1].grad = step_gradients[1].clone()
        optimizer.step()
        old = rate
    assert parameters[1].detach().tolist() == pytest.approx(weights, rel=1e-5)


def test_momentum_correction_ignores_optimizers_without_momentum() -> None:
    parameters, gradients = problem()
    optimizer = make_optimizer(TRIAL.but(optimizer="lamb"))(parameters)
    updated(optimizer, parameters, gradients)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    correct_momentum(optimizer, 0.1, 0.4)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[i][key], after[i][key]) for i in before for key in before[i])


def test_nesterov_without_momentum_is_rejected() -> None:
    with pytest.raises(ValueError, match="momentum > 0"):
        Trial(optimizer="nesterov", momentum=0)


PAIR = Trial(model="mlp", world_size=2, batch_per_gpu=8, decay_norm_and_bias=False, learning_rate=0.05)
SHARDED = [
    *((name, "zero1") for name in ("sgd", "lars", "lamb")),
    *((name, "fsdp2") for name in ("sgd", "lars", "lamb", "adamw")),
]


def train_sharded(rank: int) -> dict[tuple[str, str], list[torch.Tensor]]:
    pairs = [*SHARDED, *((name, "ddp") for name in ("sgd", "lars", "lamb", "adamw"))]
    return {
        (name, parallel): trained(PAIR.but(optimizer=name, parallel=parallel), rank, None, steps=2)["weights"]
        for name, parallel in pairs
    }


def test_sharded_optimizers_train_like_unsharded_ones() -> None:
    for found in on_ranks(2, train_sharded):
        for name, parallel in SHARDED:
            for mine, value in zip(found[name, parallel], found[name, "ddp"], strict=True):
                torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5, msg=f"{name} {parallel}")


@pytest.mark.parametrize(("name", "is_fused"), [("adamw", True), ("sgd", False)])
def test_optimizers_of_sharded_weights_are_fused_if_their_kernel_supports_them(name: str, is_fused: bool) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        return optimizers[name](parameters, lr=0.1, fused=True)

    optimizer = fsdp2.optimizer(make, [nn.Parameter(torch.ones(4))], None)
    assert optimizer.param_groups[0]["fused"] is is_fused


@pytest.mark.parametrize(
    ("name", "rate"), [("sgd", 0.05), ("nesterov", 0.05), ("lars", 10.0), ("lamb", 0.02), ("adamw", 0.002)]
)
def test_every_optimizer_learns_the_bundled_sample(name: str, rate: float) -> None:
    trial = Trial(model="mlp", parallel="none", batch_per_gpu=64, optimizer=name, learning_rate=rate)
    with rank_context(trial, RankSetup(0, torch.device("cpu"))) as context:
        step = training_step(context, context.workload.model)
        losses = [float(step(batch, no_mark).loss) for batch in islice(endless_batches(trial, context.workload, 0), 60)]
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
